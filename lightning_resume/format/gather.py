"""Copying the contents of a file into memory: many small tensors by few calls, large ones by torch's own threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Union

import numpy as np
import torch

from lightning_resume.format.blobs import Blob
from lightning_resume.format.tensors import TORCH_DTYPES, bytes_in_place, bytes_of, has_memory

Part = Union[bytes, Blob]  # noqa: UP007 (evaluated when the module is loaded, on Python 3.10 too)

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
    return part.num_bytes if isinstance(part, Blob) else len(part)


def part_data(part: Part) -> memoryview:
    """Bytes of a part; raises `UnsupportedStateError` as `Blob.data` does."""
    return part.data() if isinstance(part, Blob) else memoryview(part)


def copy_parts(parts: Sequence[Part], memory: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copies parts one behind the other. Draws no random number, leaves no trace in an autograd graph.

    Args:
        parts: what to copy.
        memory: uint8, 1-D, of just the size of all parts; its first byte is aligned as that of the first part is in
            its file, so that every tensor lies at a multiple of its item size.
        non_blocking: copies from an accelerator are only queued, on its current stream.

    Raises:
        UnsupportedStateError: a value changed its size since it was planned.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    end = 0
    with torch.no_grad():
        for dtype, run in _runs(parts):
            begin = end
            end += sum(map(part_bytes, run))
            if dtype is None:
                np.copyto(memory[begin:end].numpy(), np.frombuffer(part_data(run[0]), np.uint8))
            else:
                _pair(dtype, run, memory[begin:end], targets, sources)
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def _pair(
    dtype: str, blobs: Sequence[Blob], place: torch.Tensor, targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> None:
    item_bytes = TORCH_DTYPES[dtype].itemsize
    copied_as = _COPIED_AS.get(dtype)
    pieces = place.view(copied_as or TORCH_DTYPES[dtype]).split_with_sizes(
        [blob.num_bytes // item_bytes for blob in blobs]
    )
    for blob, piece in zip(blobs, pieces, strict=True):
        tensor: torch.Tensor = blob.owner
        numel = tensor.numel()
        is_contiguous = tensor.is_contiguous()
        if numel * item_bytes != blob.num_bytes or not has_memory(tensor, numel if is_contiguous else None):
            blob.refuse_change()
        if copied_as is not None:
            tensor = tensor.view(copied_as)
        if tensor.dim() != 1:
            if is_contiguous:
                tensor = tensor.view(-1)
            else:
                piece = piece.view(tensor.shape)
        targets.append(piece)
        sources.append(tensor)


def _runs(parts: Sequence[Part]) -> Iterator[tuple[str | None, list[Blob]]]:
    """Neighbours that can be copied as tensors of one dtype; None with each part that is copied on its own."""
    run: list[Blob] = []
    run_dtype = None
    for part in parts:
        dtype = _copyable_dtype(part)
        if run and (dtype is None or dtype != run_dtype):
            yield run_dtype, run
            run = []
        run_dtype = dtype
        run.append(part)  # type: ignore[arg-type]
    if run:
        yield run_dtype, run


def _copyable_dtype(part: Part) -> str | None:
    if not isinstance(part, Blob) or not part.num_bytes:
        return None
    if part.source is bytes_in_place:
        return part.dtype
    tensor = part.owner
    if part.source is not bytes_of or tensor.dtype is not TORCH_DTYPES[part.dtype]:
        return None
    return None if tensor.is_conj() or tensor.is_neg() else part.dtype
