"""Memory by its address: what python has no call for."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

LARGE_PAGE_BYTES = 2 * 2**20  # on most machines; elsewhere it is only a size to align to
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux, for which python has no name yet

_library: Any = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
_library.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_library.memcmp.restype = ctypes.c_int
_held: Any = ctypes.PyDLL("msvcrt" if os.name == "nt" else None)

# To an address, from an address, so many bytes. No other thread runs meanwhile: of a few KB, letting others run takes
# longer than copying.
copy_small: Callable[[int, int, int], None] = _held.memcpy
_held.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_held.memcpy.restype = None


_write_pieces: Any = getattr(_library, "process_vm_writev", None)  # Linux
if _write_pieces is not None:
    _write_pieces.argtypes = (
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_ulong) * 2,
        ctypes.c_ulong,
    )
    _write_pieces.restype = ctypes.c_ssize_t
MAX_PIECES = 1024  # what the system call takes


def list_pieces(addresses: Sequence[int], sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    """Pieces of memory as `gather_memory` takes them: uint64, one row of address and size for each."""
    pieces = np.empty((len(sizes), 2), np.uint64)
    pieces[:, 0], pieces[:, 1] = addresses, sizes
    return pieces


def gather_memory(to: int, pieces: np.ndarray[Any, Any], num_bytes: int) -> None:
    """Copies many small pieces to one place, one behind the other.

    Linux does it in one call for all of them, in which other threads run.

    Args:
        to: address of the place.
        pieces: from `list_pieces`, at most `MAX_PIECES`; none overlaps the place.
        num_bytes: size of all.
    """
    if _write_pieces is not None:
        place = np.array([to, num_bytes], np.uint64)
        if _write_pieces(os.getpid(), pieces.ctypes.data, len(pieces), place.ctypes.data, 1, 0) == num_bytes:
            return
    # A sandbox may forbid the call; and what it leaves in part is copied again.
    addresses, sizes = pieces.T.tolist()
    deque(map(copy_small, accumulate(sizes, initial=to), addresses, sizes), maxlen=0)


def map_memory(num_bytes: int) -> torch.Tensor:
    """Memory at the beginning of a page, zeros; it becomes real when it is first written to.

    In large pages where the system has some: they are made ready, copied to and written to a disk in much less time.
    A forked child finds zeros in its place (Linux), or shares it: were it copied on write, the parent's next write to
    each page would copy it. Keeping it from the child altogether (MADV_DONTFORK) would make a child that let go of it
    unmap whatever it had put in its place, stacks of its threads for one.

    Args:
        num_bytes: at least one.

    Returns:
        uint8, 1-D, of that size.

    Raises:
        OSError, ValueError: there is no such memory.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        private = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            private.madvise(_WIPE_ON_FORK)
            with contextlib.suppress(OSError):  # a kernel without them
                private.madvise(mmap.MADV_HUGEPAGE)
            memory = torch.frombuffer(private, dtype=torch.uint8)
            begin = -memory.data_ptr() % LARGE_PAGE_BYTES
            return memory[begin : begin + num_bytes]
        private.close()
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def compare_memory(left: int, right: int, num_bytes: int) -> bool:
    """Whether two pieces of memory hold the same bytes; other threads run meanwhile.

    Args:
        left: address of one.
        right: address of the other.
        num_bytes: size of both.
    """
    return bool(_library.memcmp(left, right, num_bytes) == 0)
