"""Host memory that is kept from save to save: fresh pages cost several times what copying into used ones does."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping

import torch

from lightning_resume.format.accelerator import pin
from lightning_resume.format.claims import Marks
from lightning_resume.format.links import KeptFile
from lightning_resume.format.memory import map_memory
from lightning_resume.format.output import ALIGNMENT


def whole_pages(num_bytes: int) -> int:
    """The size, rounded up to whole pages."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Image:
    """One piece of memory, cut anew for each save; it grows when it has to, and is never kept twice.

    Attributes:
        kept: name → the file of a committed checkpoint that has the bytes which lie in the image under that name.
        marks: name → what the tensors of a frozen file showed when its bytes were last copied or compared.
    """

    def __init__(self) -> None:
        """Has no memory yet."""
        self._num_divided = 0
        self._pid = os.getpid()
        self.kept: dict[str, KeptFile] = {}
        self.marks: dict[str, Marks | None] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._unpin: weakref.finalize[[], Image] | None = None

    @property
    def version(self) -> tuple[int, int]:
        """Which contents the memory holds: others after each division, and in a forked child, where it is wiped."""
        return os.getpid(), self._num_divided

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self._bytes.numel()

    def divide(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Pieces of these sizes, each at the beginning of a page. What earlier pieces hold is overwritten with them.

        A piece that lies where the one of the same name and size lay the last time holds the bytes of that time, and
        its entry of `kept` stays; the others' are dropped.

        Args:
            sizes: name → bytes.

        Returns:
            Name → tensor of uint8.

        Raises:
            MemoryError: there is no memory for them.
        """
        places, end = {}, 0
        for name, size in sizes.items():
            places[name] = (end, size)
            end += whole_pages(size)
        self._num_divided += 1
        self.reserve(end)
        self.kept = {name: file for name, file in self.kept.items() if self._places.get(name) == places.get(name)}
        self._places = places
        return {name: self._bytes[begin : begin + size] for name, (begin, size) in places.items()}

    def reserve(self, num_bytes: int) -> None:
        """Makes the memory at least so large, and touches its pages.

        Raises:
            MemoryError: there is no memory.
        """
        if self._pid != os.getpid():
            self._leave_to_parent()
        if num_bytes <= self.num_bytes:
            return
        self.kept = {}
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._bytes = torch.empty(0, dtype=torch.uint8)  # given back before more is asked for
        try:
            memory = map_memory(num_bytes)
        except (OSError, ValueError) as error:
            raise MemoryError(f"{num_bytes} bytes for a copy of the state") from error
        self._bytes = memory.zero_()

    def _leave_to_parent(self) -> None:
        """In a forked child: lets go of what it was born with. Where nothing wipes it, the parent may be writing it."""
        self._pid, self.kept, self._bytes = os.getpid(), {}, torch.empty(0, dtype=torch.uint8)
        if self._unpin is not None:
            self._unpin.detach()  # it is pinned in the parent
            self._unpin = None

    def pin(self) -> None:
        """Pins the memory that there is, for copies from a GPU; once, until it grows."""
        if self._unpin is None and self.num_bytes:
            unpin = pin(self._bytes)
            self._unpin = weakref.finalize(self, unpin) if unpin is not None else None
