"""Files that did not change since an earlier checkpoint are linked from it: both names then stand for the same bytes.

A file's bytes stay on the disk as long as one name is left, so deleting one checkpoint takes nothing from another.
Nothing in this package ever writes into a file of a committed checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lightning_resume.format.index import FileEntry


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of a committed checkpoint.

    Attributes:
        path: where it is.
        entry: its size and digest.
        status: device, inode, size and time of the last change of its contents, in ns.
    """

    path: Path
    entry: FileEntry
    status: tuple[int, int, int, int]


def keep_file(path: Path, entry: FileEntry, committed_path: Path) -> KeptFile:
    """Notes a file that was written.

    Args:
        path: where it is now.
        entry: its size and digest.
        committed_path: where it will be when the checkpoint is committed.

    Raises:
        OSError: it is not there.
    """
    return KeptFile(committed_path, entry, _status(path))


def link_file(kept: KeptFile, path: Path) -> bool:
    """Gives an earlier checkpoint's file a second name, if it is there as it was written.

    Args:
        kept: the file.
        path: the new name; must not exist.

    Returns:
        Whether that was done. If not (the checkpoint was pruned, the file was replaced or written to, the file system
        has no links), nothing is at `path`.

    Raises:
        OSError: a file that is not the wanted one could not be taken away again.
    """
    try:
        os.link(kept.path, path)
    except (OSError, NotImplementedError):
        return False
    if _status(path) == kept.status:
        return True
    os.unlink(path)
    return False


def _status(path: Path) -> tuple[int, int, int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
