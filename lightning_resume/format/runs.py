"""Tensors that follow each other in a file, checked and copied many at a time: python's cost of each is what counts.

A `Row` knows what was true of such tensors when they were encoded one by one. A `Run` has their successors, of which
all of that has to be true too. Everything is asked of the tensors of a row by loops in C, and of one row after the
other, so that they are still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    """A part of a file: tensors that take the places of others. Whether they can is seen when they are looked at.

    That is done right before they are copied: what is looked at was brought into the processor's cache, and nothing can
    come between.

    Attributes:
        row: what has to be true of them.
        tensors: kept alive.
        places: of the whole state; the addresses of those that were looked at are added.
        addresses: of their memory, once they were looked at.
    """

    row: Row
    tensors: Sequence[torch.Tensor]
    places: set[int]
    addresses: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Size of all."""
        return self.row.num_bytes

    def look(self) -> None:
        """Looks at the tensors. From now on none may be resized or given other memory until it is copied.

        Raises:
            DifferentError: they are not plain tensors of the same types, dtypes, shapes, strides and flags as the
                others, in memory that is all there.
        """
        try:
            self.addresses = self.row.addresses_of(self.tensors)
        except (AttributeError, RuntimeError) as error:  # of torch: it has no strides, no storage, a layout of its own
            raise DifferentError from error
        self.places.update(self.addresses)

    def pieces(self, to: int) -> Iterator[Piece]:
        """What is to be copied to an address."""
        sizes = self.row.sizes
        return zip(accumulate(sizes, initial=to), self.addresses, sizes)  # noqa: B905 (one sum more)

    def copy_to(self, to: int) -> None:
        """Copies all to an address."""
        gather_memory(to, self.row.listed(self.addresses), self.num_bytes)

    def is_at(self, to: int) -> bool:
        """Whether the same bytes are at an address."""
        return all(starmap(compare_memory, self.pieces(to)))

    def data(self) -> memoryview:
        """The bytes of all; a copy if there are several tensors. Looks at them first."""
        self.look()
        if len(self.tensors) == 1:
            return bytes_in_place(self.tensors[0])
        return memoryview(b"".join(map(bytes_in_place, self.tensors)))


class Row:
    """What has to be true of tensors that take the places of others in a file.

    Args:
        blobs: the others: encoded just now as `bytes_in_place`, none of them empty.

    Attributes:
        sizes: of each, in bytes; at least one.
        num_bytes: of all.
        largest_bytes: of the largest.

    Raises:
        DifferentError: something else than plain tensors is among them.
    """

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self.sizes = [blob.num_bytes for blob in blobs]
        self.num_bytes, self.largest_bytes = sum(self.sizes), max(self.sizes)
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
        self.addresses_of(tensors)

    def addresses_of(self, tensors: Sequence[Any]) -> list[int]:
        """Where the memory of as many other values is.

        Raises:
            DifferentError: they are not plain tensors of the same types, dtypes, shapes, strides and flags in memory
                that is all there.
            AttributeError, RuntimeError: the same, from torch.
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
        return self._addresses

    def listed(self, addresses: list[int]) -> np.ndarray[Any, Any]:
        """The places as `gather_memory` takes them; kept for the addresses that were looked at last."""
        return self._listed if addresses is self._addresses else list_pieces(addresses, self.sizes)
