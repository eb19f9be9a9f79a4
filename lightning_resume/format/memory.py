"""Memory by its address: what python has no call for."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

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


def gather_memory(to: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """Copies many small pieces to one place, one behind the other.

    Linux does it in one call for all of them, in which other threads run.

    Args:
        to: address of the place.
        addresses: of the pieces, at most `MAX_PIECES`; none overlaps the place.
        sizes: of each, in bytes.
    """
    total = sum(sizes)
    if _write_pieces is not None:
        pieces = np.empty((len(sizes), 2), np.uint64)
        pieces[:, 0], pieces[:, 1] = addresses, sizes
        place = np.array([to, total], np.uint64)
        if _write_pieces(os.getpid(), pieces.ctypes.data, len(sizes), place.ctypes.data, 1, 0) == total:
            return
    # A sandbox may forbid the call; and what it leaves in part is copied again.
    deque(map(copy_small, accumulate(sizes, initial=to), addresses, sizes), maxlen=0)


def compare_memory(left: int, right: int, num_bytes: int) -> bool:
    """Whether two pieces of memory hold the same bytes; other threads run meanwhile.

    Args:
        left: address of one.
        right: address of the other.
        num_bytes: size of both.
    """
    return bool(_library.memcmp(left, right, num_bytes) == 0)
