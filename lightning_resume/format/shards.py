"""Safetensors shards read into memory, in one pass with a check of their digest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch

from lightning_resume.errors import CorruptCheckpointError
from lightning_resume.format.contained import CheckpointFiles
from lightning_resume.format.header import Entry, read_header, read_into
from lightning_resume.format.index import FileEntry
from lightning_resume.format.tensors import TORCH_DTYPES

READ_BLOCK_BYTES = 4 * 2**20


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
