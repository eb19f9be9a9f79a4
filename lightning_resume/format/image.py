"""Host memory that is kept from save to save: fresh pages cost several times what copying into used ones does."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch

from lightning_resume.format.output import ALIGNMENT


class Image:
    """One piece of memory, cut anew for each save; it grows when it has to, and is never kept twice.

    Forked children do not see it: otherwise each of their lives would make the next save copy all of its pages.
    """

    def __init__(self) -> None:
        """Has no memory yet."""
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self._bytes.numel()

    def divide(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Pieces of these sizes, each at the beginning of a page. What earlier pieces hold is overwritten with them.

        Args:
            sizes: in bytes.

        Returns:
            Tensors of uint8.

        Raises:
            MemoryError: there is no memory for them.
        """
        begins, end = [], 0
        for size in sizes:
            begins.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.reserve(end)
        return [self._bytes[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]

    def reserve(self, num_bytes: int) -> None:
        """Makes the memory at least so large, and touches its pages.

        Raises:
            MemoryError: there is no memory.
        """
        if num_bytes <= self.num_bytes:
            return
        self._bytes = torch.empty(0, dtype=torch.uint8)  # given back before more is asked for
        try:
            memory = mmap.mmap(-1, num_bytes)
        except (OSError, ValueError) as error:
            raise MemoryError(f"{num_bytes} bytes for a copy of the state") from error
        for advice in (
            "MADV_DONTFORK",
            "MADV_HUGEPAGE",
        ):  # huge pages are touched in half the time, where there are any
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):
                    memory.madvise(getattr(mmap, advice))
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8).zero_()
