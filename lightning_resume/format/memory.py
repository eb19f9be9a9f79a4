"""Comparing memory byte for byte."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any


def _find_memcmp() -> Callable[[int, int, int], int]:
    library: Any = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
    function: Callable[[int, int, int], int] = library.memcmp
    library.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    library.memcmp.restype = ctypes.c_int
    return function


_memcmp = _find_memcmp()


def compare_memory(left: int, right: int, num_bytes: int) -> bool:
    """Whether two pieces of memory hold the same bytes; other threads run meanwhile.

    Args:
        left: address of one.
        right: address of the other.
        num_bytes: size of both.
    """
    return _memcmp(left, right, num_bytes) == 0
