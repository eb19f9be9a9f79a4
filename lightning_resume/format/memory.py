"""Memory by its address: what python has no call for."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

_library: Any = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
_library.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_library.memcmp.restype = ctypes.c_int
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
if _HUGE_PAGES is not None:
    _library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _library.madvise.restype = ctypes.c_int


def compare_memory(left: int, right: int, num_bytes: int) -> bool:
    """Whether two pieces of memory hold the same bytes; other threads run meanwhile.

    Args:
        left: address of one.
        right: address of the other.
        num_bytes: size of both.
    """
    return bool(_library.memcmp(left, right, num_bytes) == 0)


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Asks for large pages under fresh memory that is about to be filled; where there are none, nothing happens.

    Most of the time that reading into fresh memory takes goes into its page faults: with pages of 2 MiB there are 512
    times fewer. The system's pages at both ends are included, so that neighbours stay one piece of memory for the
    system, which can hold only so many.

    Args:
        address: of memory that is mapped.
        num_bytes: its size.
    """
    if _HUGE_PAGES is not None:
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        _library.madvise(begin, -(-(address + num_bytes - begin) // mmap.PAGESIZE) * mmap.PAGESIZE, _HUGE_PAGES)
