"""Safetensors shards read into memory, several at once, each in one pass with a check of its digest."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

import torch

from lightning_resume.errors import CorruptCheckpointError
from lightning_resume.format.contained import READ_BLOCK_BYTES, CheckpointFiles, announce_reading
from lightning_resume.format.header import DTYPE_BYTES, Entry, read_exactly, read_header, read_into
from lightning_resume.format.index import FileEntry
from lightning_resume.format.tensors import TORCH_DTYPES
from lightning_resume.format.threads import beside, for_each, threads_to_read

LARGE_BYTES = 2**20  # smaller tensors are read together
TOGETHER_BYTES = 4 * 2**20  # of them, at most
_CPU = torch.device("cpu")  # said each time: the caller may have another default
_copy_of_parts: Any = torch.split_with_sizes_copy  # its annotation says that it returns nothing


def read_groups(
    files: CheckpointFiles, groups: Mapping[str, Mapping[str, FileEntry]], *, verify: bool
) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """Reads all shards of some groups, on one thread more than there are cores, up to five.

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
    largest_first = sorted(entries, key=lambda name: -entries[name].num_bytes)
    begun = [_begin_shard(files, name, entries[name]) for name in largest_first]
    num_threads = threads_to_read(entry.num_bytes for entry in entries.values())
    for_each(begun, lambda shard: _finish_shard(files, shard, verify=verify), num_threads)
    read = {shard.name: shard.tensors for shard in begun}
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


class _Shard(NamedTuple):
    """A file of which the header was read.

    Attributes:
        name: of the file.
        entry: its size and digest in the index.
        text: what was read as the header.
        entries: where each tensor stands, in order.
        tensors: name → tensor; at first the large ones alone, with memory that nothing was read into.
    """

    name: str
    entry: FileEntry
    text: bytes
    entries: Sequence[Entry]
    tensors: dict[str, torch.Tensor]


def _begin_shard(files: CheckpointFiles, name: str, entry: FileEntry) -> _Shard:
    """Reads the header of one file, and allocates memory for its large tensors.

    The thread that wants them does so for all files. An allocator like glibc's serves each other thread from a heap of
    its own, which it gives back in part and gets again as fresh pages: another load could take a third longer.
    Each tensor's memory is aligned as torch's own is: the last bits of a product can depend on that.
    """
    with _open_shard(files, name, entry) as (file, num_bytes):
        header, text = read_header(file, num_bytes)
        tensors = {large.name: _empty(large) for large in header.entries if large.end - large.begin >= LARGE_BYTES}
    return _Shard(name, entry, text, header.entries, tensors)


def _finish_shard(files: CheckpointFiles, shard: _Shard, *, verify: bool) -> None:
    """Reads all tensors of a file: plain reads into their memory, hashed on the way.

    The file is not mapped: one that is cut short meanwhile would end the process. It may be another one than that
    whose header was read, and without digests nothing else would tell: the header is compared.
    """
    with _open_shard(files, shard.name, shard.entry) as (file, _):
        announce_reading(file)
        if read_exactly(file, len(shard.text)) != shard.text:
            raise ValueError("another header than a moment before: the file was replaced")
        digest = hashlib.sha256() if verify else None
        if digest is not None:
            digest.update(shard.text)
        _read_tensors(file, shard, digest)
    if digest is not None:
        files.require_digest(shard.name, shard.entry, digest.hexdigest())


@contextlib.contextmanager
def _open_shard(files: CheckpointFiles, name: str, entry: FileEntry) -> Iterator[tuple[BinaryIO, int]]:
    """The file and its size; what is malformed in it is a fault of the checkpoint."""
    with files.open(name) as (file, num_bytes):
        files.require_size(name, entry, num_bytes)
        try:
            yield file, num_bytes
        except ValueError as error:
            raise CorruptCheckpointError(files.shown, name, "a whole safetensors file", str(error)) from error


def _read_tensors(file: BinaryIO, shard: _Shard, digest: Any) -> None:
    """All tensors of a file that stands where its data begins."""
    tensors = shard.tensors
    block = torch.empty(0, dtype=torch.uint8, device=_CPU)
    together: list[Entry] = []
    begin = 0
    for entry in shard.entries:
        large = tensors.get(entry.name)
        if together and (large is not None or entry.end - begin > TOGETHER_BYTES):
            block = _read_together(file, together, block, digest, tensors)
            together = []
        if large is not None:
            # By its address: a tensor whose memory numpy has seen can never be resized.
            memory = (ctypes.c_ubyte * large.nbytes).from_address(large.data_ptr())
            _read_whole(file, memoryview(memory).cast("B"), digest)
        else:
            if not together:
                begin = entry.begin
            together.append(entry)
    if together:
        _read_together(file, together, block, digest, tensors)


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
