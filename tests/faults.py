"""Every file operation of a process under one folder, counted; one of them is told to kill, to fail, or to lose power.

Works on whatever `os.<call>` the code under test makes, in any thread: no test knows a save's sequence of operations.
`Faults.install` patches `os` for the rest of the process's life, so it is for forked children.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from toy_records import die, emit

WRITES = ("write", "pwrite", "writev", "pwritev")
SYNCS = ("fsync", "fdatasync")
RENAMES = ("rename", "replace")
REMOVALS = ("unlink", "remove", "rmdir")
CALLS = (
    "open",
    *WRITES,
    *SYNCS,
    *RENAMES,
    *REMOVALS,
    "ftruncate",
    "truncate",
    "posix_fallocate",
    "mkdir",
    "link",
    "symlink",
)
CHANGES = tuple(name for name in CALLS if name != "open")
ON_DESCRIPTORS = (*WRITES, *SYNCS, "ftruncate", "posix_fallocate")
TAKES_SPACE = (*WRITES, "posix_fallocate", "mkdir", "link")


class Operation(NamedTuple):
    """One call.

    Attributes:
        number: counted from 1.
        name: of the function in `os`.
        path: what it works on; of a rename or link: its old name.
        target: the new name of a rename or link, or "".
        is_directory: whether that is a directory.
        is_reading: whether a file is opened to be read.
        thread: that made it.
    """

    number: int
    name: str
    path: str
    target: str
    is_directory: bool
    is_reading: bool
    thread: str


class _NameChange(NamedTuple):
    """A change of names that no fsync of its directory has made durable. Paths are those at the time of the change."""

    directory: str  # as it is called now
    undo: str  # of `os`, or "rmtree"
    paths: tuple[str, ...]


class Faults:
    """Counts the file operations under a folder.

    Args:
        folder: what happens elsewhere is not counted.
        how: what to do at the operation: "kill" this process just ahead of it; "torn": a write does its first half,
            then the process is killed; "power": killed, and what is not durable is lost: contents that no fsync
            reached, names that no fsync of their directory reached; "power-names": killed, and all names are there,
            but contents that no fsync reached are empty; or a number, the errno with which it fails.
        at: which operation; 0: none.
        only: names of the calls that are counted.
        lasting: whether a failure stays: all later operations that take space fail too.
    """

    def __init__(
        self,
        folder: Path,
        how: str | int = "kill",
        at: int = 0,
        *,
        only: Iterable[str] = CALLS,
        lasting: bool = False,
    ) -> None:
        self.folder, self.how, self.at, self.only, self.lasting = os.fspath(folder), how, at, set(only), lasting
        self.operations: list[Operation] = []
        self._real = {name: getattr(os, name) for name in (*CALLS, "close") if hasattr(os, name)}
        self._lock = threading.RLock()
        self._paths: dict[int, str] = {}
        self._unsynced: set[str] = set()
        self._names: list[_NameChange] = []

    def install(self) -> Faults:
        """Begins to count."""
        for name in self._real:
            setattr(os, name, self._close if name == "close" else self._wrap(name))
        return self

    def uninstall(self) -> None:
        """Ends it."""
        for name, real in self._real.items():
            setattr(os, name, real)

    def tell(self) -> None:
        """Records the operations with `emit`."""
        self.uninstall()
        for operation in self.operations:
            emit("operation", **operation._asdict())

    def _wrap(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*arguments: Any, **keywords: Any) -> Any:
            path, target = self._subject(name, arguments, keywords)
            if path is None:
                return real(*arguments, **keywords)
            if name in self.only:
                with self._lock:
                    self._count(name, path, target, arguments)
            result = real(*arguments, **keywords)
            with self._lock:
                self._note(name, path, target, arguments, result)
            return result

        return call

    def _close(self, fd: int) -> None:
        with self._lock:
            self._paths.pop(fd, None)
        self._real["close"](fd)

    def _subject(self, name: str, arguments: Any, keywords: Any) -> tuple[str | None, str]:
        """The path that a call works on, if it is under the folder, and its second one."""
        if name in ON_DESCRIPTORS or isinstance(arguments[0], int):
            return self._paths.get(arguments[0]), ""
        base = self._paths.get(keywords.get("dir_fd", keywords.get("src_dir_fd", -1)), os.getcwd())
        path = os.path.join(base, os.fspath(arguments[0]))
        target = os.path.abspath(arguments[1]) if name in (*RENAMES, "link", "symlink") else ""
        return (path if path == self.folder or path.startswith(self.folder + os.sep) else None), target

    def _count(self, name: str, path: str, target: str, arguments: Any) -> None:
        number = len(self.operations) + 1
        is_reading = name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR)
        thread = threading.current_thread().name
        self.operations.append(Operation(number, name, path, target, os.path.isdir(path), is_reading, thread))
        if number == self.at:
            self._strike(name, arguments)
        elif self.lasting and 0 < self.at < number and name in TAKES_SPACE:
            self._fail()

    def _strike(self, name: str, arguments: Any) -> None:
        if isinstance(self.how, int):
            self._fail()
        if self.how == "torn":
            with contextlib.suppress(OSError):  # unbuffered writes take whole blocks only
                self._write_half(name, arguments)
        if self.how.startswith("power"):
            self.uninstall()
            self._lose_power(with_names=self.how == "power")
        die()

    def _fail(self) -> None:
        raise OSError(self.how, os.strerror(int(self.how)))

    def _write_half(self, name: str, arguments: Any) -> None:
        fd, data, *rest = arguments
        whole = memoryview(data if name in ("write", "pwrite") else b"".join(data)).cast("B")
        half = whole[: len(whole) // 2 // 4096 * 4096 or len(whole) // 2]
        self._real["pwrite" if rest else "write"](fd, half, *rest[:1])

    # -- what is durable ----------------------------------------------------------------------------------------------

    def _note(self, name: str, path: str, target: str, arguments: Any, result: Any) -> None:
        parent = os.path.dirname(path)
        if name == "open":
            self._paths[result] = path
            if arguments[1] & os.O_CREAT:
                self._unsynced.add(path)
                self._names.append(_NameChange(parent, "unlink", (path,)))
        elif name in WRITES or name in ("ftruncate", "posix_fallocate"):
            self._unsynced.add(path)
        elif name in SYNCS:
            self._unsynced.discard(path)
            self._sync_names(path)
        elif name in RENAMES:
            self._unsynced = {_moved(each, path, target) for each in self._unsynced}
            self._paths = {fd: _moved(each, path, target) for fd, each in self._paths.items()}
            self._names = [each._replace(directory=_moved(each.directory, path, target)) for each in self._names]
            self._names.append(_NameChange(parent, "rename", (target, path)))
        elif name == "mkdir":
            self._names.append(_NameChange(parent, "rmtree", (path,)))
        elif name in ("link", "symlink"):
            if path in self._unsynced:
                self._unsynced.add(target)
            self._names.append(_NameChange(os.path.dirname(target), "unlink", (target,)))

    def _sync_names(self, directory: str) -> None:
        """Takes the directory's changes off the list; earlier changes below a renamed directory go with it."""
        kept: list[_NameChange] = []
        for change in self._names:
            if change.directory != directory:
                kept.append(change)
            elif change.undo == "rename":
                new, old = change.paths
                kept = [each._replace(paths=tuple(_moved(path, old, new) for path in each.paths)) for each in kept]
        self._names = kept

    def _lose_power(self, *, with_names: bool) -> None:
        for path in self._unsynced:
            if os.path.isfile(path):
                os.truncate(path, 0)
        for change in reversed(self._names if with_names else []):
            with contextlib.suppress(FileNotFoundError):
                (shutil.rmtree if change.undo == "rmtree" else getattr(os, change.undo))(*change.paths)


def _moved(path: str, old: str, new: str) -> str:
    """The path, after `old` was renamed to `new`."""
    return new + path[len(old) :] if path == old or path.startswith(old + os.sep) else path
