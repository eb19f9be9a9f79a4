"""Frozen tensors that are taken for unchanged while training waits, and compared when it goes on.

To compare 1 GB takes as long as to copy it. Whether a tensor was written to can be seen from its version and its place
where autograd was told, and from a few of its bytes where not, mostly. What is taken for unchanged that way is a claim:
before it goes into a checkpoint all of its bytes are compared with those that lie in the image. Where the claim was
wrong, there is no checkpoint: the bytes of the moment of the save are gone.

Only this is not seen: a value that was changed past autograd, in none of the bytes that are looked at, and was put back
before the comparison, a fraction of a second after the save began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import starmap

import torch

from lightning_resume.format.blobs import Blob
from lightning_resume.format.gather import Part, is_in_place, pieces_of
from lightning_resume.format.memory import compare_memory
from lightning_resume.format.runs import Piece, Run

SAMPLE_BYTES = 64
NUM_SAMPLES = 8  # of each tensor

Marks = list[tuple[int, int]]
"""Address and version of each tensor."""


class StaleCopyError(Exception):
    """A claim was wrong; nothing was written."""


class Claim:
    """That the contents of a file lie in the image already.

    Args:
        pieces: where each of them should be, where it is, and its size.
        owners: what keeps their memory alive.
    """

    def __init__(self, pieces: Sequence[Piece], owners: object) -> None:
        self._pieces, self._owners = pieces, owners

    def is_likely(self) -> bool:
        """Whether some bytes of each piece are there."""
        return all(starmap(compare_memory, _samples(self._pieces)))

    def holds(self) -> bool:
        """Whether all bytes are there. Other threads run meanwhile; nothing may be resized until this returns."""
        return all(starmap(compare_memory, self._pieces))


def marks_of(parts: Sequence[Part]) -> Marks | None:
    """What tells a tensor that was written to from one that was not, where autograd knows; None: nothing does."""
    marks: Marks = []
    for part in parts:
        if isinstance(part, bytes):
            continue
        if isinstance(part, Blob) and not isinstance(part.owner, torch.Tensor):  # of a state dict's hook
            return None
        try:
            marks += ((tensor.data_ptr(), tensor._version) for tensor in _tensors(part))
        except RuntimeError:  # made in inference mode: such a tensor has no version
            return None
    return marks


def claim_unchanged(parts: Sequence[Part], memory: torch.Tensor, marks: Marks | None) -> Claim | None:
    """A claim that what lies in memory since an earlier save is what the parts hold, if that is likely.

    Args:
        parts: contents of a file.
        memory: where they lay, and should lie: uint8, 1-D.
        marks: of the parts of that time.
    """
    if marks is None or not all(isinstance(part, bytes) or _is_plain(part) for part in parts):
        return None
    if marks_of(parts) != marks:
        return None
    pieces, owners = pieces_of(parts, memory)
    claim = Claim(pieces, owners)
    return claim if claim.is_likely() else None


def _is_plain(part: Blob | Run) -> bool:
    # What torch has to copy is in no piece, and would not be compared.
    return isinstance(part, Run) or is_in_place(part)


def _tensors(part: Blob | Run) -> Sequence[torch.Tensor]:
    return part.tensors if isinstance(part, Run) else [part.owner]


def _samples(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for to, source, size in pieces:
        count = min(SAMPLE_BYTES, size)
        for number in range(NUM_SAMPLES):
            offset = (size - count) * number // (NUM_SAMPLES - 1)
            yield to + offset, source + offset, count
