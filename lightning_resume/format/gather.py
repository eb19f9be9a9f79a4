"""Copying the contents of files into memory: what a save in the background makes training wait for."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby, starmap
from typing import Any, Union

import numpy as np
import torch

from lightning_resume.format.blobs import Blob
from lightning_resume.format.memory import compare_memory, copy_small
from lightning_resume.format.runs import Piece, Run
from lightning_resume.format.tensors import TORCH_DTYPES, bytes_in_place, bytes_of, has_memory
from lightning_resume.format.threads import default_threads, for_each

Part = Union[bytes, Blob, Run]  # noqa: UP007 (evaluated when the module is loaded, on Python 3.10 too)

PIECE_BYTES = 8 * 2**20  # what a thread copies at a time
LARGE_BYTES = 2**18  # smaller pieces are left to one thread: several python threads over them are slower
SHARED_BYTES = 32 * 2**20  # less than this is not worth a thread
# Of runs whose tensors are smaller than this on average most of the work is python's, and threads take turns at it.
SHARED_TENSOR_BYTES = 2**12

# Copied as integers of the same size: not every kernel knows these, and one might tidy up a bool that is neither 0
# nor 1.
_COPIED_AS = {
    "BOOL": torch.uint8,
    "F8_E4M3": torch.uint8,
    "F8_E5M2": torch.uint8,
    "U16": torch.int16,
    "U32": torch.int32,
    "U64": torch.int64,
    "C64": torch.int64,
}


def part_bytes(part: Part) -> int:
    """Size of a part."""
    return len(part) if isinstance(part, bytes) else part.num_bytes


def part_data(part: Part) -> memoryview:
    """Bytes of a part; raises `UnsupportedStateError` as `Blob.data` does."""
    return memoryview(part) if isinstance(part, bytes) else part.data()


def copy_parts(parts: Sequence[Part], memory: torch.Tensor) -> None:
    """Copies the parts of one file, or some of them, on this thread; see `copy_files`, also for what it raises."""
    layout = _Layout(parts, memory)
    for run, to in layout.runs:
        run.look()
        run.copy_to(to)
    _move(layout.small, copy_small)
    _move(layout.large, ctypes.memmove)
    layout.copy_tensors()


def copy_files(
    files: Sequence[tuple[Sequence[Part], torch.Tensor]],
    *,
    compare: Collection[int] = (),
    non_blocking: bool = False,
) -> list[bool]:
    """Copies the contents of files, much of it on several threads. Draws no random number, touches no autograd graph.

    Torch's own threads would meet after every tensor; where the cores are busy, that takes many times as long.

    Args:
        files: for each its parts, and where they go: uint8, 1-D, of just their size, at the beginning of a page.
        compare: numbers of the files that are compared with what is in memory before, byte for byte.
        non_blocking: copies from an accelerator are only queued, on its current stream.

    Returns:
        For each file whether it was compared and found equal.

    Raises:
        UnsupportedStateError: a value changed its size since it was planned.
        DifferentError: the tensors of a run are other ones than those that it was planned for.
    """
    layouts = [_Layout(parts, memory) for parts, memory in files]
    is_equal = [number in compare and not layout.targets for number, layout in enumerate(layouts)]

    def copy(bundle: tuple[int, Iterable[Piece]], move: Callable[[int, int, int], object] = ctypes.memmove) -> None:
        number, pieces = bundle[0], iter(bundle[1])
        if is_equal[number]:  # so far
            for piece in pieces:
                if not compare_memory(*piece):
                    is_equal[number] = False  # never the other way round: another thread may have found a difference
                    move(*piece)
                    break
        _move(pieces, move)

    def copy_run(place: tuple[int, Run, int]) -> None:
        number, run, to = place
        run.look()
        if not is_equal[number] or not run.is_at(to):
            is_equal[number] = False
            run.copy_to(to)

    for layout in layouts:
        layout.copy_tensors(non_blocking=non_blocking)
    large: list[tuple[int, list[Piece]]] = []
    for number, layout in enumerate(layouts):
        copy((number, layout.small), copy_small)
        large += ((number, bundle) for bundle in _bundles(layout.large))
    is_much = sum(memory.numel() for _, memory in files) >= SHARED_BYTES
    num_threads = default_threads() if is_much else 1
    runs = [(number, run, to) for number, layout in enumerate(layouts) for run, to in layout.runs]
    num_bytes, num_tensors = sum(run.num_bytes for _, run, _ in runs), sum(len(run.tensors) for _, run, _ in runs)
    for_each(runs, copy_run, num_threads if num_bytes >= SHARED_TENSOR_BYTES * num_tensors else 1)
    for_each(large, copy, num_threads)
    return is_equal


def pieces_of(parts: Sequence[Part], memory: torch.Tensor) -> tuple[list[Piece], object]:
    """What would be copied to where, but for what torch has to copy; and what keeps the addresses valid.

    Raises:
        UnsupportedStateError: a value changed its size since it was planned.
        DifferentError: as in `copy_files`.
    """
    layout = _Layout(parts, memory)
    pieces = [*layout.small, *layout.large]
    for run, to in layout.runs:
        run.look()
        pieces += run.pieces(to)
    return pieces, layout


def _move(pieces: Iterable[Piece], move: Callable[[int, int, int], object]) -> None:
    deque(starmap(move, pieces), maxlen=0)  # a loop in python takes half as long again


def _bundles(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Large pieces, cut and put together to what is worth a turn of a thread."""
    bundle: list[Piece] = []
    num_bytes = 0
    for to, source, size in pieces:
        for begin in range(0, size, PIECE_BYTES):
            count = min(PIECE_BYTES, size - begin)
            bundle.append((to + begin, source + begin, count))
            num_bytes += count
            if num_bytes >= PIECE_BYTES:
                yield bundle
                bundle, num_bytes = [], 0
    if bundle:
        yield bundle


class _Layout:
    """What of a file is to be copied where: pieces of memory, and tensors that torch copies.

    Args:
        parts: of the file; the layout keeps them alive, with the memory that it has the addresses of.
        memory: where they go.

    Attributes:
        large: the pieces of `LARGE_BYTES` and more.
        small: the others.
        runs: runs that have none but small ones, and the address that each goes to; they are still to be looked at.
        targets: what torch copies to.
    """

    def __init__(self, parts: Sequence[Part], memory: torch.Tensor) -> None:
        self.large: list[Piece] = []
        self.targets: list[torch.Tensor] = []
        self.small: list[Piece] = []
        self.runs: list[tuple[Run, int]] = []
        self._sources: list[torch.Tensor] = []
        self._kept: list[object] = [parts]
        self._memory = memory
        begin = 0
        for add, group in groupby(parts, self._adder):
            begin = add(group, begin)

    def _adder(self, part: Part) -> Callable[[Iterable[Any], int], int]:
        if isinstance(part, Run):
            return self._add_runs
        return self._add_in_place if is_in_place(part) else self._add_others

    def _add_runs(self, runs: Iterable[Run], begin: int) -> int:
        for run in runs:
            to = self._memory.data_ptr() + begin
            if run.row.largest_bytes < LARGE_BYTES:
                self.runs.append((run, to))
            else:
                run.look()
                self._add_pieces(run.pieces(to))
            begin += run.num_bytes
        return begin

    def _add_pieces(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            (self.small if piece[2] < LARGE_BYTES else self.large).append(piece)

    def _add_in_place(self, blobs: Iterable[Blob], begin: int) -> int:
        """Adds tensors that lie in memory as they do in the file.

        All that is asked of one of 10^5 tensors is asked at once: then it is in the processor's cache.
        """
        place = self._memory.data_ptr()
        pieces: list[Piece] = []
        for blob in blobs:
            tensor: torch.Tensor = blob.owner
            num_bytes = blob.num_bytes
            if tensor.nbytes != num_bytes or not tensor.is_contiguous():
                blob.refuse_change()
            offset = tensor.storage_offset()
            if num_bytes + (offset and offset * tensor.element_size()) > tensor.untyped_storage().nbytes():
                blob.refuse_change()  # what is copied by address from here on has to be all there
            pieces.append((place + begin, tensor.data_ptr(), num_bytes))
            begin += num_bytes
        self._add_pieces(pieces)
        return begin

    def _add_others(self, parts: Iterable[Part], begin: int) -> int:
        for part in parts:
            num_bytes = part_bytes(part)
            if isinstance(part, Blob) and _is_copyable(part):
                tensor = part.owner
                copied_as = _COPIED_AS.get(part.dtype, tensor.dtype)
                self.targets.append(self._memory[begin : begin + num_bytes].view(copied_as).view(tensor.shape))
                self._sources.append(tensor.detach().view(copied_as))
            elif num_bytes:
                array = np.frombuffer(part_data(part), np.uint8)
                self._kept.append(array)
                self._add_pieces([(self._memory.data_ptr() + begin, array.ctypes.data, num_bytes)])
            begin += num_bytes
        return begin

    def copy_tensors(self, *, non_blocking: bool = False) -> None:
        """Copies the tensors that do not lie in memory as they do in the file, or that an accelerator has."""
        if self.targets:
            with torch.no_grad():
                torch._foreach_copy_(self.targets, self._sources, non_blocking=non_blocking)


def is_in_place(part: Part) -> bool:
    """Whether a part is one tensor that lies in memory as it does in the file."""
    return isinstance(part, Blob) and part.source is bytes_in_place


def _is_copyable(blob: Blob) -> bool:
    """Whether torch can copy a blob to where its bytes are to be: a tensor with strides, or on an accelerator."""
    if blob.source is not bytes_of or not blob.num_bytes:
        return False
    tensor: torch.Tensor = blob.owner
    if tensor.dtype is not TORCH_DTYPES[blob.dtype] or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.numel() * tensor.element_size() != blob.num_bytes or not has_memory(tensor):
        blob.refuse_change()
    return True
