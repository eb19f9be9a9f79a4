"""Looking at a checkpoint without loading it: the quick look at its index, and the full check. Knows no torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_resume.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from lightning_resume.format.contained import READ_BLOCK_BYTES, CheckpointFiles, announce_reading, look_into
from lightning_resume.format.header import Header, read_header
from lightning_resume.format.index import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    CheckpointIndex,
    index_from_bytes,
    require_safe_name,
)
from lightning_resume.format.skeleton import MAX_STATE_BYTES, references, state_from_bytes
from lightning_resume.format.strict_json import parse_json, require_few_parts
from lightning_resume.format.threads import for_each, threads_to_read

WEIGHT_MAP_NAME = "model.safetensors.index.json"
MAX_WEIGHT_MAP_BYTES = 256 * 2**20


def read_index(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Reads what a checkpoint says about itself, and checks that all its files are there with the right sizes.

    The contents of the data files are not read; `verify_checkpoint` does that. Any thread or rank may call it.

    Args:
        path: the checkpoint directory.

    Raises:
        CheckpointNotFoundError: no directory at the path.
        IncompleteCheckpointError: the directory was never committed.
        CorruptCheckpointError: the index is damaged, a file is missing, of another size, or not of the checkpoint.
        UnsafePathError: the index names a file outside the directory, or a file is a symlink or a device.
        SchemaError: written in an unknown schema.
        CheckpointReadError: the operating system could not read it.
    """
    return look_into(Path(path), load_index)


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Reads every byte of a checkpoint and compares it with the digests; changes nothing, loads nothing.

    Memory: some MB, whatever the size. One thread more than cores, up to five; any thread or rank may call it.

    Args:
        path: the checkpoint directory.

    Returns:
        Its index.

    Raises:
        CheckpointError: the first fault, with the subclasses of `read_index`.
    """
    return look_into(Path(path), verify_files)


def verify_files(files: CheckpointFiles) -> CheckpointIndex:
    """The index of an open checkpoint all of whose bytes are right; raises as `verify_checkpoint` does."""
    index = load_index(files)
    largest_first = sorted(index.files.items(), key=lambda item: -item[1].num_bytes)
    num_threads = threads_to_read(entry.num_bytes for entry in index.files.values())
    for_each(largest_first, lambda item: files.require_digest(*item, _digest(files, item[0])), num_threads)
    require_sound_structure(files, index)
    return index


def load_index(files: CheckpointFiles) -> CheckpointIndex:
    """The index of an open checkpoint; raises as `read_index` does."""
    names = files.names()
    if INDEX_NAME not in names:
        raise IncompleteCheckpointError(files.shown, _checkpoints_among(files.shown, names))
    index = index_from_bytes(files.read(INDEX_NAME, MAX_INDEX_BYTES), files.shown)
    for name in names:
        if name != INDEX_NAME and name not in index.files:
            raise CorruptCheckpointError(files.shown, name, "no such file in the checkpoint", "an extra file")
    for name, entry in index.files.items():
        files.require_size(name, entry, files.num_bytes(name))
    return index


def _checkpoints_among(folder: Path, names: Sequence[str]) -> list[str]:
    """Those names in a folder that are committed checkpoints, the newest last; for a message only."""
    found: list[tuple[tuple[int, ...], str]] = []
    for name in names:
        if name.startswith(".") or not (folder / name / INDEX_NAME).is_file():
            continue
        with contextlib.suppress(CheckpointError, OSError):
            index = read_index(folder / name)
            place = index.timeline, index.global_step, index.current_epoch, index.batch_in_epoch
            found.append((tuple(-1 if number is None else number for number in place), name))
    return [name for _, name in sorted(found)]


def load_state(files: CheckpointFiles, index: CheckpointIndex, name: str, *, verify: bool) -> dict[str, Any]:
    """Top-level key → skeleton, from ``state.json`` or a rank's file."""
    data = files.read_checked(name, index.files[name], MAX_STATE_BYTES, verify=verify)
    try:
        return state_from_bytes(data)
    except ValueError as error:
        raise CorruptCheckpointError(files.shown, name, "a state in JSON", str(error)) from error


def load_header(files: CheckpointFiles, name: str) -> Header:
    """The header of one shard."""
    with files.open(name) as (file, num_bytes):
        try:
            return read_header(file, num_bytes)[0]
        except ValueError as error:
            raise CorruptCheckpointError(files.shown, name, "a whole safetensors file", str(error)) from error


def require_weight_map(
    files: CheckpointFiles, index: CheckpointIndex, found: Mapping[str, str], *, verify: bool
) -> None:
    """Checks that the Hugging Face index, where there is one, says where the model's tensors are.

    Args:
        files: the open checkpoint.
        index: its index.
        found: tensor name → shard, as the shards have it.
        verify: whether to compare the file's digest.
    """
    entry = index.files.get(WEIGHT_MAP_NAME)
    if entry is None:
        return
    data = files.read_checked(WEIGHT_MAP_NAME, entry, MAX_WEIGHT_MAP_BYTES, verify=verify)
    try:
        require_few_parts(data, 5 * len(found) + 100)  # four quotes and a comma for each tensor
        document = parse_json(data)
    except ValueError as error:
        raise CorruptCheckpointError(files.shown, WEIGHT_MAP_NAME, "a weight map in JSON", str(error)) from error
    weight_map = document.get("weight_map") if type(document) is dict else None
    if type(weight_map) is not dict or not all(type(shard) is str for shard in weight_map.values()):
        raise CorruptCheckpointError(files.shown, WEIGHT_MAP_NAME, "a weight map in JSON", "something else")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        require_safe_name(shard, files.shown)
    if weight_map != found:
        raise CorruptCheckpointError(files.shown, WEIGHT_MAP_NAME, "every tensor in its shard", "another weight map")


def require_sound_structure(files: CheckpointFiles, index: CheckpointIndex) -> None:
    """Checks the headers of all shards, and that each piece of data that a state refers to is there once."""
    held: dict[str, dict[str, str]] = {}
    for group in ("model", "optimizer", "state", *(f"rank-{rank:05d}" for rank in range(index.num_ranks))):
        names = held.setdefault(group, {})
        for shard in index.shards(group):
            for entry in load_header(files, shard).entries:
                if names.setdefault(entry.name, shard) != shard:
                    raise CorruptCheckpointError(files.shown, shard, "tensor names of its own", f"again {entry.name!r}")
    for name in ("state.json", *(f"rank-{rank:05d}.json" for rank in range(index.num_ranks))):
        for group, tensor in references(list(load_state(files, index, name, verify=False).values())):
            if tensor not in held.get(group, {}):
                raise CorruptCheckpointError(files.shown, name, "references to its own data", f"one to {tensor!r}")
    require_weight_map(files, index, held["model"], verify=False)


def _digest(files: CheckpointFiles, name: str) -> str:
    digest = hashlib.sha256()
    with files.open(name) as (file, num_bytes):
        announce_reading(file)
        block = memoryview(bytearray(min(READ_BLOCK_BYTES, num_bytes + 1)))
        while count := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:count])
    return digest.hexdigest()
