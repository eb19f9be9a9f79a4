"""Tensors that follow each other in a file, checked and copied many at a time: python's cost of each is what counts.

A `Row` knows what was true of such tensors when they were encoded one by one. It makes a `Run` of their successors,
if all of that is true of them too. Everything is asked of the tensors of a row by loops in C, and of one row after the
other, so that they are still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, starmap
from operator import attrgetter, ge
from typing import Any

import numpy as np
import torch

from lightning_resume.format.blobs import Blob
from lightning_resume.format.memory import MAX_PIECES, compare_memory, gather_memory, list_pieces
from lightning_resume.format.tensors import bytes_in_place

Piece = tuple[int, int, int]  # address to copy to, address to copy from, bytes

MAX_TENSORS = min(256, MAX_PIECES)  # of a row: they stay in the cache while they are looked at several times

_flags = attrgetter("dtype", "shape", "is_cpu", "requires_grad")


class DifferentError(Exception):
    """The state does not fit the plan, or no plan can be made of it."""


@dataclass(eq=False, slots=True)
class Run:
    """A part of a file: tensors whose memory was found to be what the file is to have.

    From then on nothing may be resized, and no tensor may be given other memory, until it is copied. It would be
    refused, since the addresses are asked for again; unless another piece of memory came to the same address.

    Attributes:
        blobs: what they are called.
        tensors: kept alive, with their memory.
        addresses: of their memory.
        sizes: of each, in bytes; at least one.
        listed: both, as `gather_memory` takes them.
        num_bytes: of all.
        largest_bytes: of the largest.
    """

    blobs: Sequence[Blob]
    tensors: Sequence[torch.Tensor]
    addresses: list[int]
    sizes: list[int]
    listed: np.ndarray[Any, Any]
    num_bytes: int
    largest_bytes: int

    def pieces(self, to: int) -> Iterator[Piece]:
        """What is to be copied to an address."""
        return zip(accumulate(self.sizes, initial=to), self.addresses, self.sizes)  # noqa: B905 (one sum more)

    def copy_to(self, to: int) -> None:
        """Copies all to an address."""
        gather_memory(to, self.listed, self.num_bytes)

    def is_at(self, to: int) -> bool:
        """Whether the same bytes are at an address."""
        return all(starmap(compare_memory, self.pieces(to)))

    def data(self) -> memoryview:
        """The bytes of all; a copy if there are several tensors.

        Raises:
            UnsupportedStateError: a tensor has other memory than when it was checked.
        """
        self.require_same_memory()
        if len(self.tensors) == 1:
            return bytes_in_place(self.tensors[0])
        return memoryview(b"".join(map(bytes_in_place, self.tensors)))

    def require_same_memory(self) -> None:
        """Raises `UnsupportedStateError` if a tensor has other memory than when it was checked."""
        addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        if addresses != self.addresses:
            changed = next(n for n, address in enumerate(addresses) if address != self.addresses[n])
            self.blobs[changed].refuse_change()


class Row:
    """What has to be true of tensors that take the places of others in a file.

    Args:
        blobs: the others: encoded just now as `bytes_in_place`, none of them empty.

    Raises:
        DifferentError: something else than plain tensors is among them.
    """

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self.blobs = blobs
        self.sizes = [blob.num_bytes for blob in blobs]
        self.num_bytes, self._largest_bytes = sum(self.sizes), max(self.sizes)
        tensors = [blob.owner for blob in blobs]
        self._kinds: list[type] = list(map(type, tensors))
        if not set(self._kinds) <= {torch.Tensor, torch.nn.Parameter}:
            raise DifferentError
        self._flags = list(map(_flags, tensors))
        self._strides = list(map(torch.Tensor.stride, tensors))
        self._may_vary_strides = not all(size > 1 for tensor in tensors for size in tensor.shape)
        self._offsets = list(map(torch.Tensor.storage_offset, tensors))
        self._addresses: list[int] = []  # at which all was there
        self._listed = list_pieces([], [])
        self._is_complex = any(tensor.is_complex() for tensor in tensors)
        self._spans = [
            offset * tensor.element_size() + size
            for offset, tensor, size in zip(self._offsets, tensors, self.sizes, strict=True)
        ]
        if not all(tensor.is_contiguous() and tensor.nbytes == size for tensor, size in zip(tensors, self.sizes)):  # noqa: B905
            raise DifferentError
        self.fill(tensors)

    def fill(self, tensors: Sequence[Any]) -> Run:
        """A run of as many other values.

        What has no strides, or no storage, or a layout of its own, raises an error of torch's when it is asked for it.

        Raises:
            DifferentError: they are not plain tensors of the same types, dtypes, shapes, strides and flags in memory
                that is all there.
            RuntimeError: the same, from torch.
        """
        kinds = list(map(type, tensors))  # before anything else: from here on they are known to be tensors
        if kinds != self._kinds or list(map(_flags, tensors)) != self._flags:
            raise DifferentError
        if self._may_vary_strides:  # sizes of 1 can have any, and be contiguous
            if list(map(torch.Tensor.stride, tensors)) != self._strides:
                raise DifferentError
        elif not all(map(torch.Tensor.is_contiguous, tensors)):
            raise DifferentError
        if any(map(torch.Tensor.is_neg, tensors)):
            raise DifferentError
        if self._is_complex and any(map(torch.Tensor.is_conj, tensors)):
            raise DifferentError
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses != self._addresses:
            if 0 in addresses or list(map(torch.Tensor.storage_offset, tensors)) != self._offsets:
                raise DifferentError
            self._addresses, self._listed = addresses, list_pieces(addresses, self.sizes)
        # What is copied by address has to be all there. A storage that is resized may come back to an address of old.
        storages = map(torch.Tensor.untyped_storage, tensors)
        if not all(map(ge, map(torch.UntypedStorage.nbytes, storages), self._spans)):
            raise DifferentError
        return Run(self.blobs, tensors, addresses, self.sizes, self._listed, self.num_bytes, self._largest_bytes)
