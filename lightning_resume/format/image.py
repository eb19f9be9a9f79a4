"""Host memory that is kept from save to save: fresh pages cost several times what copying into used ones does."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

ALIGNMENT = 4096  # a page: what unbuffered writing asks of memory


class Image:
    """One piece of memory, cut anew for each save; it grows when it has to, and is never kept twice.

    Forked children do not see it: otherwise each of their lives would make the next save copy all of its pages.
    """

    def __init__(self) -> None:
        """Has no memory yet."""
        self._memory: mmap.mmap | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return len(self._memory) if self._memory is not None else 0

    def divide(self, sizes: Sequence[int]) -> list[memoryview]:
        """Pieces of these sizes in bytes, each at the beginning of a page. All pieces that were handed out are void.

        Raises:
            MemoryError: there is no memory for them.
        """
        begins, end = [], 0
        for size in sizes:
            begins.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.reserve(end)
        view = memoryview(self._memory) if self._memory is not None else memoryview(b"")
        return [view[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]

    def reserve(self, num_bytes: int) -> None:
        """Makes the memory at least so large, and touches its pages.

        Raises:
            MemoryError: there is no memory.
        """
        if num_bytes <= self.num_bytes:
            return
        self._memory = None  # given back before more is asked for
        try:
            memory = mmap.mmap(-1, num_bytes)
        except (OSError, ValueError) as error:
            raise MemoryError(f"{num_bytes} bytes for a copy of the state") from error
        if hasattr(mmap, "MADV_DONTFORK"):
            memory.madvise(mmap.MADV_DONTFORK)
        for place in range(0, num_bytes, ALIGNMENT):
            memory[place] = 0
        self._memory = memory
