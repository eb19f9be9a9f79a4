"""Writing and reading whole checkpoints: plain nested dicts in, plain nested dicts out. Works without Lightning."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_resume.errors import MissingStateError
from lightning_resume.format.collector import paused_collection
from lightning_resume.format.contained import CheckpointFiles, look_into
from lightning_resume.format.encoding import RANK_STATE_KEY
from lightning_resume.format.index import CheckpointIndex
from lightning_resume.format.migrate import migrate_checkpoint
from lightning_resume.format.prepared import prepare_checkpoint, require_little_endian
from lightning_resume.format.registry import DECODERS, register_type
from lightning_resume.format.shards import read_groups
from lightning_resume.format.skeleton import references
from lightning_resume.format.tree import DecodeWalk, decode_state
from lightning_resume.format.verify import load_index, load_state, read_index, require_weight_map, verify_checkpoint

__all__ = [
    "migrate_checkpoint",
    "read_checkpoint",
    "read_index",
    "register_type",
    "verify_checkpoint",
    "write_checkpoint",
]


def write_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    model_key: str = "state_dict",
    optimizer_key: str = "optimizer_states",
    rank_states: Sequence[Mapping[str, Any]] = (),
    counters: Mapping[str, int] | None = None,
    identity: Mapping[str, Any] | None = None,
    kind: str = "full",
    run_id: str | None = None,
    timeline: int = 0,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = 2**30,
    overwrite: bool = False,
) -> CheckpointIndex:
    """Writes a state as one checkpoint directory, which appears at its path whole and durable, or not at all.

    Everything is checked before anything is created. Tensors are written from where they are (those of an accelerator
    one after the other through main memory), so nobody may change them meanwhile. A process killed in here leaves a
    hidden directory beside the path that scans call incomplete; with `overwrite`, the old checkpoint is deleted only
    when the new one is durable, and a kill in between leaves at least one of them readable at `path`.
    No random number is drawn. Any thread may call it; of several ranks, one.

    Args:
        path: the directory to be; its parents are created.
        state: str keys → nested values. Types are kept; see `register_type` for the caller's own classes.
        model_key: the top-level key whose tensors go to ``model.safetensors`` under their own names.
        optimizer_key: the top-level key whose tensors go to ``optimizer.safetensors``.
        rank_states: what belongs to each rank, in order of rank.
        counters: ``global_step``, ``current_epoch``, ``batch_in_epoch``, ``world_size``, …; ints of 64 bits.
        identity: fingerprint of the data: None, bool, int, float, str, list and dict with str keys.
        kind: "full", or "weights" for a model-only save.
        run_id: of the run.
        timeline: how often the run had gone back to an earlier step; orders checkpoints ahead of the counters.
        metadata: the caller's own texts.
        max_shard_bytes: data bytes of a file with more than one tensor; a larger tensor gets a file of its own.
        overwrite: replace a checkpoint (or a file) at the path.

    Returns:
        The index, as it is on disk.

    Raises:
        UnsupportedStateError: a value has no exact encoding; nothing was created.
        CheckpointExistsError: something is at the path that may not be replaced.
        CheckpointWriteError: the file system failed (errno is kept); what was at the path before is still there,
            and a half-written directory has been removed as far as possible.
        ValueError, TypeError: wrong arguments.
    """
    return prepare_checkpoint(
        path,
        state,
        model_key=model_key,
        optimizer_key=optimizer_key,
        rank_states=rank_states,
        counters=counters,
        identity=identity,
        kind=kind,
        run_id=run_id,
        timeline=timeline,
        metadata=metadata,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    ).commit()


def read_checkpoint(
    path: str | os.PathLike[str],
    *,
    keys: Collection[str] | None = None,
    exclude: Collection[str] = (),
    verify: bool = True,
    rank: int | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint back: the state that was written, equal in value and type, tensors on the CPU.

    Nothing is returned, and nothing outside is changed, unless every file that is needed is sound. Files are read, not
    mapped, into memory of their own. Any thread or rank may call it.

    Args:
        path: the checkpoint directory.
        keys: read only these top-level keys (those that are not there are left out), and only the files they need:
            ``{"state_dict"}`` reads the model's files and the JSON.
        exclude: do not read these top-level keys, nor files that only they need.
        verify: compare every file that is read with its digest. Without it sizes and structure are checked only.
        rank: add this rank's own state under ``"rank_state"``.

    Returns:
        A new dict with the keys in their saved order.

    Raises:
        CheckpointNotFoundError: no directory at the path.
        IncompleteCheckpointError: the directory was never committed.
        CorruptCheckpointError: a file is not what was written.
        UnsafePathError: a file name leads out of the directory, or a file is a symlink or a device.
        SchemaError: written in an unknown schema.
        CheckpointReadError: the operating system could not read it.
        MissingStateError: it has no state of that rank.
        UnsupportedStateError: it holds an object of a class that is not registered here.
        TypeError: `keys` or `exclude` is a str.
    """
    for name, value in (("keys", keys), ("exclude", exclude)):
        if isinstance(value, str):
            raise TypeError(f"{name}={value!r} is one text: pass a set of keys")
    require_little_endian()
    wanted = None if keys is None and not exclude else functools.partial(_is_wanted, keys, exclude)
    with paused_collection(), torch.inference_mode(False), torch.no_grad():  # the caller's mode would mark the tensors
        return look_into(Path(path), lambda files: _read(files, wanted, verify, rank))


def _is_wanted(keys: Collection[str] | None, exclude: Collection[str], key: str) -> bool:
    return (keys is None or key in keys) and key not in exclude


def _read(
    files: CheckpointFiles, wanted: Callable[[str], bool] | None, verify: bool, rank: int | None
) -> dict[str, Any]:
    index = load_index(files)
    if rank is not None and not 0 <= rank < index.num_ranks:
        raise MissingStateError(f"state of rank {rank}, only of {index.num_ranks} ranks")
    state = _decode(files, index, "state.json", ("model", "optimizer", "state"), wanted, verify)
    if rank is not None:
        file = f"rank-{rank:05d}"
        state[RANK_STATE_KEY] = _decode(files, index, f"{file}.json", (file,), None, verify)
    return state


def _decode(
    files: CheckpointFiles,
    index: CheckpointIndex,
    file: str,
    groups: Collection[str],
    wanted: Callable[[str], bool] | None,
    verify: bool,
) -> dict[str, Any]:
    nodes = load_state(files, index, file, verify=verify)
    needed = set(groups)  # also one that nothing refers to: all of the files are vouched for
    if wanted is not None:
        nodes = {key: node for key, node in nodes.items() if wanted(key)}
        needed &= {reference.group for reference in references(list(nodes.values()))}
    shards = {group: {name: index.files[name] for name in index.shards(group)} for group in groups if group in needed}
    loaded = read_groups(files, shards, verify=verify)
    if "model" in loaded:
        require_weight_map(files, index, loaded["model"][1], verify=verify)

    def load(group: str) -> dict[str, torch.Tensor]:
        if group not in loaded:
            raise ValueError(f"a reference to data in {group!r}")
        return loaded[group][0]

    return decode_state(DecodeWalk(DECODERS, load), nodes, files.shown, file)
