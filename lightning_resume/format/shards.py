"""Safetensors shards: planned, written in one pass with their digest, and read into memory in one pass with a check."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_resume.errors import CorruptCheckpointError, UnsupportedStateError
from lightning_resume.format.blobs import Blob
from lightning_resume.format.contained import CheckpointFiles
from lightning_resume.format.durable import FileWriter, write_file
from lightning_resume.format.header import DTYPE_BYTES, Entry, build_header, read_header, read_into
from lightning_resume.format.index import FileEntry
from lightning_resume.format.strict_json import dump_json
from lightning_resume.format.tensors import TORCH_DTYPES
from lightning_resume.format.verify import WEIGHT_MAP_NAME

# A quarter of what readers accept: names are counted in characters here, and one takes up to 12 bytes in the header.
HEADER_BUDGET_BYTES = 8_000_000
ENTRY_BYTES = 200  # what an entry takes in the header besides its name and shape, rounded up
MAX_SHARDS = 99_999
READ_BLOCK_BYTES = 4 * 2**20


def plan_shards(blobs: Sequence[Blob], max_shard_bytes: int) -> list[list[Blob]]:
    """Cuts blobs into shards, in order, each with at least one and of at most `max_shard_bytes` if it has more."""
    shards: list[list[Blob]] = []
    num_bytes = header_bytes = 0
    for blob in blobs:
        entry_bytes = ENTRY_BYTES + len(blob.name) + 20 * len(blob.shape)
        is_full = num_bytes + blob.num_bytes > max_shard_bytes or header_bytes + entry_bytes > HEADER_BUDGET_BYTES
        if not shards or is_full:
            shards.append([])
            num_bytes = header_bytes = 0
        shards[-1].append(blob)
        num_bytes += blob.num_bytes
        header_bytes += entry_bytes
    return shards


def write_group(directory: Path, group: str, blobs: Sequence[Blob], max_shard_bytes: int) -> dict[str, FileEntry]:
    """Writes all shards of a group of files, each durable when this returns.

    Args:
        directory: the directory that is to become the checkpoint.
        group: "model", "optimizer", "state" or "rank-00000".
        blobs: named; with none of them a file without tensors is written.
        max_shard_bytes: data bytes of a shard with more than one tensor.

    Returns:
        File name → size and digest.

    Raises:
        OSError: from the file system.
        UnsupportedStateError: a value changed its size since it was planned.
    """
    shards = plan_shards(blobs, max_shard_bytes) or [[]]
    if len(shards) > MAX_SHARDS:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} would make {len(shards)} shards, more than {MAX_SHARDS}")
    written: dict[str, FileEntry] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{group}.safetensors" if len(shards) == 1 else f"{group}-{number:05d}-of-{len(shards):05d}.safetensors"
        written[name] = write_file(directory / name, functools.partial(_fill, blobs=shard))
        weight_map.update((blob.name, name) for blob in shard)
    if group == "model" and len(shards) > 1:
        total = sum(blob.num_bytes for blob in blobs)
        text = dump_json({"metadata": {"total_size": total}, "weight_map": weight_map})
        written[WEIGHT_MAP_NAME] = write_file(directory / WEIGHT_MAP_NAME, lambda writer: writer.write(text))
    return written


def _fill(writer: FileWriter, blobs: Sequence[Blob]) -> None:
    # Widest items first, so that each tensor is aligned to its item size without a hole, as the library does it too.
    ordered = sorted(blobs, key=lambda blob: -DTYPE_BYTES[blob.dtype])
    metadata = {"format": "pt"}
    for blob in ordered:
        metadata.update((alias, blob.name) for alias in blob.aliases if alias != "format")
    writer.write(build_header([(blob.name, blob.dtype, blob.shape) for blob in ordered], metadata))
    for blob in ordered:
        data = blob.source()
        if len(data) != blob.num_bytes:
            raise UnsupportedStateError(blob.key_path, "it changed while it was saved", "Save a copy of it.")
        writer.write(data)


def read_group(
    files: CheckpointFiles, shards: Mapping[str, FileEntry], *, verify: bool
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Reads all shards of a group.

    Args:
        files: the open checkpoint.
        shards: file name → size and digest.
        verify: compare the digests.

    Returns:
        Tensor name → tensor, with memory of its own; tensor name → file name.

    Raises:
        CorruptCheckpointError: a file is not what was written.
        CheckpointReadError: the operating system could not read it.
    """
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    for name, entry in shards.items():
        for key, tensor in read_shard(files, name, entry, verify=verify).items():
            if key in tensors:
                raise CorruptCheckpointError(files.shown, name, "tensor names of its own", f"again {key!r}")
            tensors[key] = tensor
            places[key] = name
    return tensors, places


def read_shard(files: CheckpointFiles, name: str, entry: FileEntry, *, verify: bool) -> dict[str, torch.Tensor]:
    """Reads one file: plain reads into memory that is allocated for it, hashed on the way."""
    digest = hashlib.sha256()
    tensors: dict[str, torch.Tensor] = {}
    with files.open(name) as (raw, num_bytes):
        files.require_size(name, entry, num_bytes)
        try:
            header, text = read_header(raw, num_bytes)
            if verify:
                digest.update(text)
            reader = _BlockReader(raw, digest if verify else None)
            for item in header.entries:
                tensors[item.name] = _read_tensor(reader, item)
        except ValueError as error:
            raise CorruptCheckpointError(files.shown, name, "a whole safetensors file", str(error)) from error
    if verify:
        files.require_digest(name, entry, digest.hexdigest())
    return tensors


def _read_tensor(reader: _BlockReader, entry: Entry) -> torch.Tensor:
    if math.prod(max(size, 1) for size in entry.shape) >= 2**62:
        raise ValueError(f"a shape of {entry.name!r} that no tensor can have")
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="cpu")
    if tensor.numel():
        reader.read_into(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return tensor


class _BlockReader:
    """Reads a file in order; small reads are served from one block, large ones go straight to their memory."""

    def __init__(self, file: Any, digest: Any) -> None:
        self._file = file
        self._digest = digest
        self._block = memoryview(bytearray(READ_BLOCK_BYTES))
        self._left = self._block[:0]

    def read_into(self, view: memoryview) -> None:
        taken = min(len(view), len(self._left))
        view[:taken] = self._left[:taken]
        self._left = self._left[taken:]
        view = view[taken:]
        while len(view) >= READ_BLOCK_BYTES:
            part, view = view[:READ_BLOCK_BYTES], view[READ_BLOCK_BYTES:]
            read_into(self._file, part)
            self._hash(part)
        while view:
            count = self._file.readinto(self._block)
            if not count:
                raise ValueError(f"the file ends {len(view)} bytes too early")
            self._left = self._block[:count]
            self._hash(self._left)
            taken = min(len(view), count)
            view[:taken] = self._left[:taken]
            self._left = self._left[taken:]
            view = view[taken:]

    def _hash(self, part: memoryview) -> None:
        if self._digest is not None:
            self._digest.update(part)
