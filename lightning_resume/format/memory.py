"""Memory by its address: what python has no call for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

_library: Any = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
_library.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_library.memcmp.restype = ctypes.c_int
_held: Any = ctypes.PyDLL("msvcrt" if os.name == "nt" else None)

# To an address, from an address, so many bytes. No other thread runs meanwhile: of a few KB, letting others run takes
# longer than copying.
copy_small: Callable[[int, int, int], None] = _held.memcpy
_held.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_held.memcpy.restype = None


def compare_memory(left: int, right: int, num_bytes: int) -> bool:
    """Whether two pieces of memory hold the same bytes; other threads run meanwhile.

    Args:
        left: address of one.
        right: address of the other.
        num_bytes: size of both.
    """
    return bool(_library.memcmp(left, right, num_bytes) == 0)
