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


def compare_memory(left: int, right: int, num_bytes: int) -> bool:
    """Whether two pieces of memory hold the same bytes; other threads run meanwhile.

    Args:
        left: address of one.
        right: address of the other.
        num_bytes: size of both.
    """
    return bool(_library.memcmp(left, right, num_bytes) == 0)
