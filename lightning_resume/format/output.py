"""One new file: written past the page cache where the file system takes that, which costs half of the time."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ALIGNMENT = 4096  # a page: addresses, offsets and sizes of what is written past the page cache are multiples of it


class OutputFile:
    """A file that is being written.

    Args:
        path: where; it must not exist. Permissions follow the umask.
        is_direct: past the page cache, if that can be had; what is written must then lie at page addresses.

    Raises:
        OSError: it could not be created.
    """

    def __init__(self, path: Path, *, is_direct: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        self._fd = os.open(path, flags, 0o666)
        self._is_direct = is_direct and self._set_direct(True)

    def write(self, data: memoryview) -> None:
        """Appends data. Only the last piece of a file may be of a size that is no multiple of the page.

        Raises:
            OSError: from the file system.
        """
        tail = len(data) % ALIGNMENT
        if tail and self._is_direct:
            self._put(data[: len(data) - tail])
            self._leave_direct()
            data = data[len(data) - tail :]
        self._put(data)

    def finish(self) -> None:
        """Makes the file durable and closes it.

        Raises:
            OSError: from the file system.
        """
        os.fsync(self._fd)
        fd, self._fd = self._fd, -1
        os.close(fd)

    def abandon(self) -> None:
        """Closes the file if it is open; its contents are void."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def _put(self, data: memoryview) -> None:
        while data:
            try:
                written = os.write(self._fd, data)
            except OSError as error:
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._leave_direct()  # the file system promised more than it holds, or its blocks are larger
                continue
            if written <= 0:
                raise OSError(errno.EIO, "the file system took no data")
            data = data[written:]
            if self._is_direct and written % ALIGNMENT:
                self._leave_direct()

    def _leave_direct(self) -> None:
        if not self._set_direct(False):
            raise OSError(errno.EINVAL, "the file system took no data")
        self._is_direct = False

    def _set_direct(self, is_direct: bool) -> bool:
        direct = getattr(os, "O_DIRECT", 0)
        if not direct or fcntl is None:
            return False
        try:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | direct if is_direct else flags & ~direct)
        except OSError:  # as tmpfs and some network file systems answer
            return False
        return True
