"""Safetensors shards read into memory, several at once, each in one pass with a check of its digest."""

from __future__ import annotations

import ctypes
import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, BinaryIO

import torch

from lightning_resume.errors import CorruptCheckpointError
from lightning_resume.format.contained import READ_BLOCK_BYTES, CheckpointFiles
from lightning_resume.format.header import DTYPE_BYTES, Entry, read_header, read_into
from lightning_resume.format.index import FileEntry
from lightning_resume.format.tensors import TORCH_DTYPES
from lightning_resume.format.threads import beside, for_each, threads_for

LARGE_BYTES = 2**20  # smaller tensors are read together
TOGETHER_BYTES = 4 * 2**20  # of them, at most
_CPU = torch.device("cpu")  # said each time: the caller may have another default
_copy_of_parts: Any = torch.split_with_sizes_copy  # its annotation says that it returns nothing


def read_groups(
    files: CheckpointFiles, groups: Mapping[str, Mapping[str, FileEntry]], *, verify: bool
) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """Reads all shards of some groups, on as many threads as there are cores, up to four.

    Args:
        files: the open checkpoint.
        groups: group → file name → size and digest.
        verify: compare the digests.

    Returns:
        Group → (tensor name → tensor, with memory of its own; tensor name → file name).

    Raises:
        CorruptCheckpointError: a file is not what was written.
        CheckpointReadError: the operating system could not read it.
    """
    entries = {name: entry for shards in groups.values() for name, entry in shards.items()}
    read: dict[str, dict[str, torch.Tensor]] = {}

    def read_one(name: str) -> None:
        read[name] = read_shard(files, name, entries[name], verify=verify)

    largest_first = sorted(entries, key=lambda name: -entries[name].num_bytes)
    for_each(largest_first, read_one, threads_for(entry.num_bytes for entry in entries.values()))
    return {group: _merge(files, {name: read[name] for name in shards}) for group, shards in groups.items()}


def _merge(
    files: CheckpointFiles, shards: Mapping[str, Mapping[str, torch.Tensor]]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    for name, shard in shards.items():
        if doubled := tensors.keys() & shard:
            raise CorruptCheckpointError(files.shown, name, "tensor names of its own", f"again {min(doubled)!r}")
        tensors.update(shard)
        places.update(dict.fromkeys(shard, name))
    return tensors, places


def read_shard(files: CheckpointFiles, name: str, entry: FileEntry, *, verify: bool) -> dict[str, torch.Tensor]:
    """Reads one file: plain reads into memory that is allocated for it, hashed on the way.

    The file is not mapped: one that is cut short meanwhile would end the process. Each tensor has a piece of memory
    that is aligned as torch's own are: the last bits of a product can depend on that.
    """
    digest = hashlib.sha256()
    with files.open(name) as (raw, num_bytes):
        files.require_size(name, entry, num_bytes)
        try:
            header, text = read_header(raw, num_bytes)
            if verify:
                digest.update(text)
            tensors = _read_tensors(raw, header.entries, digest if verify else None)
        except ValueError as error:
            raise CorruptCheckpointError(files.shown, name, "a whole safetensors file", str(error)) from error
    if verify:
        files.require_digest(name, entry, digest.hexdigest())
    return tensors


def _read_tensors(file: BinaryIO, entries: Sequence[Entry], digest: Any) -> dict[str, torch.Tensor]:
    """All tensors of a file that stands where its data begins."""
    tensors: dict[str, torch.Tensor] = {}
    block = torch.empty(0, dtype=torch.uint8, device=_CPU)
    together: list[Entry] = []
    begin = 0
    for entry in entries:
        is_large = entry.end - entry.begin >= LARGE_BYTES
        if together and (is_large or entry.end - begin > TOGETHER_BYTES):
            block = _read_together(file, together, block, digest, tensors)
            together = []
        if is_large:
            tensor = tensors[entry.name] = _empty(entry)
            # By its address: a tensor whose memory numpy has seen can never be resized.
            memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
            _read_whole(file, memoryview(memory).cast("B"), digest)
        else:
            if not together:
                begin = entry.begin
            together.append(entry)
    if together:
        _read_together(file, together, block, digest, tensors)
    return tensors


def _empty(entry: Entry) -> torch.Tensor:
    # With data the file bounds the shape; without, the other sizes can be anything.
    if entry.begin == entry.end and math.prod(max(size, 1) for size in entry.shape) >= 2**62:
        raise ValueError(f"a shape of {entry.name!r} that no tensor can have")
    return torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device=_CPU)


def _read_whole(file: BinaryIO, view: memoryview, digest: Any) -> None:
    for begin in range(0, len(view), READ_BLOCK_BYTES):  # hashed while it is still in the processor's cache
        part = view[begin : begin + READ_BLOCK_BYTES]
        read_into(file, part)
        if digest is not None:
            digest.update(part)


def _read_together(
    file: BinaryIO, entries: Sequence[Entry], block: torch.Tensor, digest: Any, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Reads neighbours by one call, by way of a block; returns the block for the next time."""
    total = entries[-1].end - entries[0].begin
    if total > block.numel():
        block = torch.empty(total, dtype=torch.uint8, device=_CPU)
    view = block.numpy().data[:total]
    read_into(file, view)

    def copy(is_hashed: bool) -> None:
        if not is_hashed:
            digest.update(view)
        _copy_out(block, entries, tensors)

    if digest is None or total < LARGE_BYTES:
        copy(is_hashed=digest is None)
    else:  # if the thread failed, its part would be missing in the digest, which then fits no file
        beside([threading.Thread(target=digest.update, args=(view,))], copy)
    return block


def _copy_out(block: torch.Tensor, entries: Sequence[Entry], tensors: dict[str, torch.Tensor]) -> None:
    """Gives each of the neighbours in a block memory of its own."""
    first = entries[0].begin
    place = block.data_ptr() - first
    for vectors_of, group in _runs_of_vectors(entries):
        begin, end = group[0].begin - first, group[-1].end - first
        if vectors_of is not None and len(group) > 1 and begin % DTYPE_BYTES[vectors_of] == 0:
            source = block[begin:end].view(TORCH_DTYPES[vectors_of])
            # By one call, which takes half of the time of the loop below.
            vectors = _copy_of_parts(source, [entry.shape[0] for entry in group])
            tensors.update(zip([entry.name for entry in group], vectors, strict=True))
            continue
        for entry in group:
            tensor = tensors[entry.name] = _empty(entry)
            ctypes.memmove(tensor.data_ptr(), place + entry.begin, entry.end - entry.begin)


def _runs_of_vectors(entries: Sequence[Entry]) -> Iterator[tuple[str | None, Sequence[Entry]]]:
    """Neighbours of the same dtype with one dimension, and those that are not such, in order."""
    dtypes = {entry.dtype for entry in entries}
    if len(dtypes) == 1 and "BOOL" not in dtypes and all(len(entry.shape) == 1 for entry in entries):
        yield dtypes.pop(), entries  # at once: thousands of small ones are mostly alike
        return
    for dtype, run in groupby(entries, _dtype_of_vector):
        yield dtype, list(run)


def _dtype_of_vector(entry: Entry) -> str | None:
    # A bool's byte may be another one than 0 and 1; a copy by torch need not keep it.
    return entry.dtype if len(entry.shape) == 1 and entry.dtype != "BOOL" else None
