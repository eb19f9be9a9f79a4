"""One writer for a folder of checkpoints: an advisory lock that a dead process does not hold. Knows no torch.

The file ``.lock`` in the folder names its owner; what locks is a POSIX record lock on it, which the kernel takes away
when the process dies, and which forked worker processes do not inherit. Closing any handle of the file in the process
that holds the lock would end it: nothing else in this package opens it. Where the file system has no record locks, the
file itself is the lock, for as long as its owner lives and gives signs of life.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import time
import warnings
import weakref
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NoReturn

from lightning_resume.errors import FolderLockedError
from lightning_resume.format.hidden import has_ended, hidden_path, process_token

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = ".lock"
SILENT_AFTER = timedelta(hours=1)
REFRESH_SECONDS = 60.0
MAX_TRIES = 100  # each one fails only because another process took or left the lock in that instant
MAX_OWNER_BYTES = 4096
OWNER_TRIES = 100  # 0.01 s apart
PATIENCE_SECONDS = 5.0  # a killed training's other processes take a moment to die, and its successor may be quicker

_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
_NO_RECORD_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: dict[tuple[int, int], weakref.ref[FolderLock]] = {}  # device and inode of each folder that this process holds


@dataclass(frozen=True)
class Owner:
    """Who holds a folder.

    Attributes:
        host: name of the machine.
        pid: of the process.
        process: machine and start of the process in hex digits, which tells it from a later one with the same pid.
        since: moment at which it took the folder, ISO 8601 in UTC.
        run_id: of its run, or None.
    """

    host: str
    pid: int
    process: str
    since: str
    run_id: str | None = None


class FolderLock:
    """The right to write checkpoints to a folder; a context manager.

    It is held until `release`, the end of the process (of whatever kind), or the last reference to it. It is advisory:
    it stops those who ask. A crash leaves the file, which the next one takes over.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Takes nothing yet.

        Args:
            folder: must exist when the lock is taken.
        """
        self.folder = Path(folder)
        self._path = self.folder / LOCK_NAME
        self._fd = -1
        self._pid = 0
        self._key = (0, 0)
        self._owner: Owner | None = None
        self._refreshed = 0.0

    @property
    def is_held(self) -> bool:
        """Whether this process holds the folder through this object; a forked child holds nothing."""
        return self._fd >= 0 and self._pid == os.getpid()

    def acquire(self, run_id: str | None = None) -> None:
        """Takes the folder, or does nothing if this object holds it already.

        A folder whose lock file cannot be made or opened is not locked; a warning says so.

        Args:
            run_id: of the run, for those who find the folder taken.

        Raises:
            FolderLockedError: another process holds it, and still does some seconds later, or another lock of this
                process.
        """
        if self.is_held:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._owner = Owner(platform.node(), os.getpid(), process_token(), now, run_id)
        try:
            self._refuse_a_second_one()
            self._take()
        except OSError as error:
            reason = f"{str(self.folder)!r} cannot be locked ({error.strerror or error})"
            warnings.warn(f"{reason}: a second process that writes there would not be noticed", stacklevel=2)

    def note_run(self, run_id: str | None) -> None:
        """Writes the run's id into the file, once it is known."""
        if self.is_held and self._owner is not None:
            self._owner = Owner(**{**asdict(self._owner), "run_id": run_id})
            self._write_owner()

    def refresh(self) -> None:
        """A sign of life, for those who cannot ask for the process; costs nothing more often than once a minute.

        The record lock is taken again, should somebody in this process have read the file (a backup of the folder).
        """
        now = time.monotonic()
        if self.is_held and now - self._refreshed > REFRESH_SECONDS:
            self._refreshed = now
            with contextlib.suppress(OSError):
                os.utime(self._path)
                if _take_record_lock(self._fd) is False:
                    warnings.warn(f"another process has taken {str(self.folder)!r} too", stacklevel=2)

    def release(self) -> None:
        """Leaves the folder and removes the file; nothing if it is not held."""
        if not self.is_held:
            return
        fd, self._fd = self._fd, -1
        _held.pop(self._key, None)
        with contextlib.suppress(OSError):
            # While the lock is still held: whoever opened the file meanwhile finds out that it is no longer in place.
            if os.path.samestat(os.fstat(fd), os.lstat(self._path)):
                os.unlink(self._path)
        with contextlib.suppress(OSError):
            os.close(fd)

    def __reduce__(self) -> tuple[type[FolderLock], tuple[Path]]:
        """A copy, of a deep-copied callback say, holds nothing."""
        return FolderLock, (self.folder,)

    def __enter__(self) -> FolderLock:
        """Takes the folder; see `acquire`."""
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves it."""
        self.release()

    def __del__(self) -> None:
        """Leaves it: a training that nobody can reach any more writes nothing."""
        with contextlib.suppress(Exception):
            self.release()

    def _refuse_a_second_one(self) -> None:
        """A record lock would not stop this process's own second one, and opening the file would end the first."""
        status = os.stat(self.folder)
        self._key = status.st_dev, status.st_ino
        reference = _held.get(self._key)
        other = reference() if reference is not None else None
        if other is not None and other.is_held:
            self._refuse(other._owner)

    def _take(self) -> None:
        deadline, tries_left = time.monotonic() + PATIENCE_SECONDS, MAX_TRIES
        while tries_left:
            try:
                if self._try():
                    return
                tries_left -= 1
            except FolderLockedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        raise OSError(errno.EBUSY, "it changes hands all the time")

    def _try(self) -> bool:
        """One try; False: somebody else was quicker, or has just left."""
        opened = _open(self._path)
        if opened is None:
            return False
        fd, is_new = opened
        try:
            is_ours = _take_record_lock(fd)
            if is_ours is False:
                self._refuse(_read_owner(fd, patient=True))
            if is_ours is None and not is_new:
                self._evict(fd)
            elif _is_at(fd, self._path):
                self._fd, self._pid = fd, os.getpid()
                _held[self._key] = weakref.ref(self)
                self._write_owner()
        finally:
            if self._fd != fd:
                os.close(fd)
        return self._fd == fd

    def _evict(self, fd: int) -> None:
        """Without record locks: removes the file of an owner that is dead, or silent where it cannot be asked."""
        owner = _read_owner(fd)
        is_dead = has_ended(owner.pid, owner.process) if owner is not None else None
        if is_dead is None:
            is_dead = time.time() - os.fstat(fd).st_mtime > SILENT_AFTER.total_seconds()
        if not is_dead:
            self._refuse(owner)
        aside = hidden_path(self._path, "trash")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, aside)
            if _is_at(fd, aside):
                os.unlink(aside)
            else:  # another process was quicker: this one is its file
                os.rename(aside, self._path)

    def _write_owner(self) -> None:
        with contextlib.suppress(OSError):  # on a full disk the folder is held all the same, by nobody known
            data = json.dumps(asdict(self._owner)).encode() if self._owner is not None else b""
            os.lseek(self._fd, 0, os.SEEK_SET)
            os.ftruncate(self._fd, 0)
            os.write(self._fd, data)

    def _refuse(self, owner: Owner | None) -> NoReturn:
        facts = (owner.host, owner.pid, owner.since, owner.run_id) if owner is not None else (None, None, None, None)
        raise FolderLockedError(self.folder, *facts)


def _open(path: Path) -> tuple[int, bool] | None:
    """The open file, and whether it was made here; None if it vanished in between."""
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        try:
            return os.open(path, flags), False
        except FileNotFoundError:
            return None


def _take_record_lock(fd: int) -> bool | None:
    """Whether the lock is ours now; False: another process has it; None: there are no record locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        if error.errno in _NO_RECORD_LOCKS:
            return None
        raise
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one at the path."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _read_owner(fd: int, *, patient: bool = False) -> Owner | None:
    """What the file says, or None; the owner may have the lock and be about to write who it is."""
    for _ in range(OWNER_TRIES if patient else 1):
        os.lseek(fd, 0, os.SEEK_SET)
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            owner = Owner(**json.loads(os.read(fd, MAX_OWNER_BYTES)))
            if type(owner.pid) is int and type(owner.process) is str:
                return owner
        time.sleep(0.01 if patient else 0)
    return None
