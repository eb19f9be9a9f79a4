"""Rewriting a checkpoint of an older schema in its place. Knows no torch."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from lightning_resume.errors import CheckpointNotFoundError, CheckpointWriteError, ResumeError
from lightning_resume.format.contained import READ_BLOCK_BYTES, CheckpointFiles, look_into
from lightning_resume.format.durable import commit_directory, find_checkpoint, write_file
from lightning_resume.format.index import INDEX_NAME, MAX_INDEX_BYTES, CheckpointIndex, FileEntry, index_to_bytes
from lightning_resume.format.migrations import SCHEMA
from lightning_resume.format.output import OutputFile
from lightning_resume.format.strict_json import parse_json
from lightning_resume.format.verify import load_index, verify_files


def migrate_checkpoint(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Brings a checkpoint of an older schema to the newest, in place and in one step.

    It is verified in full first. The data files are hard-linked into a new directory (copied where links cannot be
    made), which gets an index of the newest schema and takes the old directory's place; one that is of the newest
    schema already stays as it is. A crash at any point leaves the old or the new checkpoint readable at `path`, and at
    most a hidden directory beside it, which scans call incomplete. Any thread may call it; of several ranks, one.

    Args:
        path: the checkpoint directory. Of a symbolic link, the directory that it leads to is rewritten.

    Returns:
        Its index, as it is on disk now.

    Raises:
        CheckpointWriteError: the file system failed (errno is kept); the old or the new checkpoint is whole.
        CheckpointError: it is not a sound checkpoint of a known schema; see `verify_checkpoint`.
    """
    return look_into(Path(os.path.realpath(path)), _migrate)


def saved_schema(path: str | os.PathLike[str]) -> str:
    """The schema that a checkpoint is in on disk; a `CheckpointIndex` has the newest one, whatever it was read from.

    Raises:
        CheckpointError: as `read_index` does.
    """
    return look_into(Path(path), _schema)


def _schema(files: CheckpointFiles) -> str:
    load_index(files)  # refuses what is no index
    return str(parse_json(files.read(INDEX_NAME, MAX_INDEX_BYTES))["schema"])


def _migrate(files: CheckpointFiles) -> CheckpointIndex:
    index = verify_files(files)
    if _schema(files) == SCHEMA:
        return index
    try:
        return commit_directory(files.shown, functools.partial(_fill, files, index), overwrite=True)
    except ResumeError:
        raise
    except OSError as error:
        raise CheckpointWriteError(files.shown, error) from error


def _fill(files: CheckpointFiles, index: CheckpointIndex, directory: Path) -> CheckpointIndex:
    for name, entry in index.files.items():
        _take_over(files, name, entry, directory / name)
    if not files.is_in_place():  # another writer replaced it: `look_into` begins again with what is there now
        raise CheckpointNotFoundError(files.shown)
    index, data = index_to_bytes(index)
    write_file(directory / INDEX_NAME, data)
    return index


def _take_over(files: CheckpointFiles, name: str, entry: FileEntry, target: Path) -> None:
    """Gives a verified file a second name, or copies it. Durable then, even if the old one never was."""
    try:
        os.link(find_checkpoint(files.shown) / name, target, follow_symlinks=False)
    except (OSError, NotImplementedError):
        _copy(files, name, entry, target)
    else:
        fd = os.open(target, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _copy(files: CheckpointFiles, name: str, entry: FileEntry, target: Path) -> None:
    digest = hashlib.sha256()
    output = OutputFile(target)
    try:
        for block in _blocks(files, name):
            digest.update(block)
            output.write(memoryview(block))  # outside of the reader: its errors are others
        output.finish()
    finally:
        output.abandon()
    files.require_digest(name, entry, digest.hexdigest())


def _blocks(files: CheckpointFiles, name: str) -> Iterator[bytes]:
    with files.open(name) as (file, _):
        while block := file.read(READ_BLOCK_BYTES):
            yield block
