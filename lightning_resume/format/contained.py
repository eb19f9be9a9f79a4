"""Reading files of one directory and of nowhere else: no symlink, pipe or device, no name that leads out."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from lightning_resume.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CorruptCheckpointError,
    ResumeError,
    UnsafePathError,
)
from lightning_resume.format.durable import find_checkpoint
from lightning_resume.format.index import FileEntry, require_safe_name

READ_BLOCK_BYTES = 4 * 2**20  # stays in the processor's cache until it is hashed
MAX_TRIES = 10  # of a read whose checkpoint is replaced each time
T = TypeVar("T")
HAS_DIR_FD = os.open in os.supports_dir_fd  # not on Windows


class CheckpointFiles:
    """The files of one checkpoint directory, opened by plain name relative to a handle on the directory.

    The handle goes with the directory when that is renamed, so a reader sees one checkpoint, even while it is replaced.
    """

    def __init__(self, path: Path, shown: Path) -> None:
        """Opens the directory; use `look_into`, which closes it again.

        Args:
            path: the directory.
            shown: the path that messages name.

        Raises:
            CheckpointNotFoundError: there is no directory.
            CheckpointReadError: it cannot be opened.
        """
        self.shown = shown
        self._path = path
        self._fd = -1
        try:
            if HAS_DIR_FD:
                self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            elif not path.is_dir():
                raise NotADirectoryError(path) if path.exists() else FileNotFoundError(path)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(shown) from error
        except NotADirectoryError as error:
            raise CheckpointNotFoundError(shown, "a file" if os.path.lexists(path) else "nothing") from error
        except OSError as error:
            raise CheckpointReadError(shown, None, error) from error

    def close(self) -> None:
        """Closes the handle."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def is_in_place(self) -> bool:
        """Whether the directory that was opened is still the one to be found at its path."""
        if self._fd < 0:
            return True
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(find_checkpoint(self.shown)))
        except OSError:
            return False

    def names(self) -> list[str]:
        """Everything that is in the directory, sorted."""
        try:
            return sorted(os.listdir(self._fd if self._fd >= 0 else self._path))
        except OSError as error:
            raise CheckpointReadError(self.shown, None, error) from error

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """Opens one file for reading.

        Args:
            name: a plain name; checked before anything is opened.

        Yields:
            The unbuffered file, and its size in bytes.

        Raises:
            UnsafePathError: an unsafe name, or something else than a regular file.
            CorruptCheckpointError: the file is missing.
            CheckpointReadError: any other failure, also while the file is read inside the block.
        """
        require_safe_name(name, self.shown)
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe must not make us wait
        try:
            if self._fd >= 0:
                self._require_regular(name, os.stat(name, dir_fd=self._fd, follow_symlinks=False))
                fd = os.open(name, flags, dir_fd=self._fd)
            else:
                self._require_regular(name, os.lstat(self._path / name))
                fd = os.open(self._path / name, flags)
            with os.fdopen(fd, "rb", buffering=0) as file:
                status = os.fstat(fd)  # once more, of what was really opened
                self._require_regular(name, status)
                yield file, status.st_size
        except FileNotFoundError as error:
            raise CorruptCheckpointError(self.shown, name, "a file", "nothing") from error
        except ResumeError:
            raise
        except OSError as error:
            raise CheckpointReadError(self.shown, name, error) from error

    def num_bytes(self, name: str) -> int:
        """Size of one file, which must be a regular one."""
        with self.open(name) as (_, num_bytes):
            return num_bytes

    def read(self, name: str, limit: int) -> bytes:
        """Contents of one small file.

        Raises:
            CorruptCheckpointError: it is larger than `limit` bytes, or missing.
        """
        with self.open(name) as (file, num_bytes):
            if num_bytes > limit:
                raise CorruptCheckpointError(self.shown, name, f"at most {limit} bytes", f"{num_bytes} bytes")
            return b"".join(iter(lambda: file.read(READ_BLOCK_BYTES), b""))

    def read_checked(self, name: str, entry: FileEntry, limit: int, *, verify: bool = True) -> bytes:
        """Contents of one small file, compared with its entry in the index."""
        data = self.read(name, limit)
        self.require_size(name, entry, len(data))
        if verify:
            self.require_digest(name, entry, hashlib.sha256(data).hexdigest())
        return data

    def require_size(self, name: str, entry: FileEntry, num_bytes: int) -> None:
        """Raises `CorruptCheckpointError` unless the size is that of the index."""
        if num_bytes != entry.num_bytes:
            raise CorruptCheckpointError(self.shown, name, f"{entry.num_bytes} bytes", f"{num_bytes} bytes")

    def require_digest(self, name: str, entry: FileEntry, digest: str) -> None:
        """Raises `CorruptCheckpointError` unless the digest is that of the index."""
        if digest != entry.sha256:
            raise CorruptCheckpointError(self.shown, name, f"sha256 {entry.sha256}", f"sha256 {digest}")

    def _require_regular(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
            raise UnsafePathError(self.shown, name, f"it is {what}")


def announce_reading(file: BinaryIO) -> None:
    """Tells the system that all of a file will be read in order: it then reads twice as far ahead of us (Linux)."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # a file system that takes no advice
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)


def look_into(path: Path, look: Callable[[CheckpointFiles], T]) -> T:
    """Opens a checkpoint directory and hands it to `look`; again, if it was replaced or pruned in the middle.

    Args:
        path: the checkpoint directory; its replaced version is read if a kill fell between the renames of an overwrite.
        look: reads from the open checkpoint.

    Returns:
        What `look` returned.

    Raises:
        CheckpointNotFoundError: there is no directory.
        CheckpointError: from `look`, about a checkpoint that is still in its place.
    """
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            files = CheckpointFiles(find_checkpoint(path), path)
        except CheckpointNotFoundError:
            if tries_left and find_checkpoint(path).exists():
                continue
            raise
        try:
            return look(files)
        except CheckpointError:
            if not tries_left or files.is_in_place():
                raise
        finally:
            files.close()
    raise CheckpointNotFoundError(path)
