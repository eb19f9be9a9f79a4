"""Writing so that a kill, a full disk or a power cut at any instant leaves whole checkpoints only.

The ladder: every file written and fsynced in a hidden directory beside the target, that directory fsynced, renamed to
its place, the parent fsynced, and only then anything deleted. A deletion is first a rename out of sight.
Every change of the file system goes through the functions of this module and of `output`, and in them through
``os.<call>``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lightning_resume.errors import CheckpointExistsError
from lightning_resume.format.hidden import hidden_path, hidden_siblings
from lightning_resume.format.index import INDEX_NAME
from lightning_resume.format.output import OutputFile

_NO_DIRECTORY_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
T = TypeVar("T")


def write_file(path: Path, data: bytes) -> None:
    """Creates one durable file.

    Args:
        path: where; must not exist.
        data: its contents.

    Raises:
        OSError: from the file system; the file may be left in part.
    """
    file = OutputFile(path)
    try:
        file.write(memoryview(data))
        file.finish()
    finally:
        file.abandon()


def commit_directory(target: Path, fill: Callable[[Path], T], *, overwrite: bool) -> T:
    """Makes a directory appear at `target` in one step, whole and durable, or not at all.

    Missing parents are created. A process killed in here leaves a hidden directory beside the target (`hidden.py`).
    With `overwrite`, a kill between the two renames leaves the old checkpoint as the target's ``.old`` sibling,
    where `find_checkpoint` and a scan see it.

    Args:
        target: the directory to be.
        fill: writes and fsyncs the files in the directory that it is handed.
        overwrite: replace a checkpoint (or file) at the target; any other directory is never replaced.

    Returns:
        What `fill` returned.

    Raises:
        CheckpointExistsError: something is there that may not be replaced.
        OSError: from the file system. The target is absent, or what it was before, or (when only the last
            fsync failed) the new checkpoint.
    """
    require_replaceable(target, overwrite)
    make_directories(target.parent)
    temp = hidden_path(target, "tmp")
    try:
        os.mkdir(temp)
        result = fill(temp)
        sync_directory(temp)
        require_replaceable(target, overwrite)
        _move_into_place(temp, target, overwrite)
    except BaseException:
        with contextlib.suppress(OSError):
            delete_tree(temp)
        raise
    sync_directory(target.parent)
    if overwrite:
        retire_old_versions(target)
    return result


def require_replaceable(target: Path, overwrite: bool) -> None:
    """Raises `CheckpointExistsError` where something stands at `target` that may not be replaced."""
    try:
        mode = os.lstat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(mode):
        if not (overwrite and (stat.S_ISREG(mode) or stat.S_ISLNK(mode))):
            raise CheckpointExistsError(target, "a file")
    elif not _looks_like_checkpoint(target):
        raise CheckpointExistsError(target, "a directory that is no checkpoint")
    elif not overwrite:
        raise CheckpointExistsError(target)


def _looks_like_checkpoint(directory: Path) -> bool:
    names = os.listdir(directory)
    return not names or INDEX_NAME in names


def _move_into_place(temp: Path, target: Path, overwrite: bool) -> None:
    if not (overwrite and os.path.lexists(target)):
        try:
            os.rename(temp, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # another writer was quicker
                raise CheckpointExistsError(target) from error
            raise
        return
    if hidden_siblings(target, "old"):  # an earlier overwrite was cut short; two old versions would be ambiguous
        sync_directory(target.parent)
        retire_old_versions(target)
    old = hidden_path(target, "old")
    os.rename(target, old)
    try:
        os.rename(temp, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rename(old, target)
        raise


def retire_old_versions(target: Path) -> None:
    """Deletes the replaced versions of `target`; call it only when the target itself is durable."""
    for old in hidden_siblings(target, "old"):
        with contextlib.suppress(OSError):  # left for the next time; the save itself has succeeded
            discard(old, name=target.name)


def discard(path: Path, *, name: str | None = None) -> None:
    """Deletes a file or directory: renamed out of sight, parent fsynced, then deleted.

    Args:
        path: what to delete; a symlink is removed, never followed.
        name: the visible name that the hidden one is derived from; that of the path by default.

    Raises:
        FileNotFoundError: it is gone already.
        OSError: it is still there, or hidden under a ``.trash`` name.
    """
    trash = hidden_path(path.with_name(name or path.name), "trash")
    os.rename(path, trash)
    sync_directory(path.parent)
    delete_tree(trash)


def delete_tree(path: Path) -> None:
    """Deletes a file, a symlink (never what it points to) or a directory with all that is in it."""
    try:
        is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_directory:
        os.unlink(path)
        return
    for name in os.listdir(path):
        delete_tree(path / name)
    os.rmdir(path)


def make_directories(path: Path) -> None:
    """Creates a directory and its missing parents, each made durable in its own parent."""
    if path.is_dir():
        return
    make_directories(path.parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes renames, creations and deletions in a directory durable, where the file system can do that at all."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0))
    except PermissionError:
        if os.name == "nt":  # Windows opens no directories
            return
        raise
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(fd)


def find_checkpoint(path: Path) -> Path:
    """The directory to read for `path`: itself, or its replaced version if a kill fell between the two renames."""
    if os.path.lexists(path):
        return path
    return next(iter(hidden_siblings(path, "old")), path)
