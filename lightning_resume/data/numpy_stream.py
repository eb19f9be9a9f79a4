"""Numpy's global stream, put aside and put back in a few microseconds.

`get_state` and `set_state` copy the 624 words of the Mersenne Twister one by one, in 25 µs each (numpy 2.4, measured);
around every batch that is too much. Here they are copied as memory, whose layout is checked once against `get_state`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

NUM_BYTES = 624 * 4 + 4
"""The words, and the position in them."""


def put_aside() -> Callable[[], None]:
    """Remembers the stream as it stands, and leaves it so.

    Returns:
        What sets it to this state again.
    """
    generator = np.random.mtrand._rand
    if not isinstance(generator._bit_generator, np.random.MT19937) or not _is_laid_out():
        return functools.partial(generator.set_state, generator.get_state(legacy=False))
    address = generator._bit_generator.ctypes.state_address
    words = ctypes.string_at(address, NUM_BYTES)
    # Whether a normal number is kept for the next call shows nowhere but in the full state, and in that call: it then
    # draws nothing.
    kept = generator.randn()
    if ctypes.string_at(address, NUM_BYTES) == words:
        put_back = functools.partial(generator.set_state, _full_state(words, kept))
    else:
        put_back = functools.partial(_put_back, address, words)
    put_back()
    return put_back


def _put_back(address: int, words: bytes) -> None:
    np.random.mtrand._rand.seed(0)  # forgets a normal number that is kept
    ctypes.memmove(address, words, NUM_BYTES)


def _full_state(words: bytes, kept: float) -> dict[str, Any]:
    key = np.frombuffer(words[:-4], dtype=np.uint32).copy()
    state = {"key": key, "pos": int.from_bytes(words[-4:], sys.byteorder)}
    return {"bit_generator": "MT19937", "state": state, "has_gauss": 1, "gauss": kept}


@functools.cache
def _is_laid_out() -> bool:
    """Whether the memory of the global stream is what this module takes it for."""
    generator = np.random.mtrand._rand
    state: Any = generator.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return False
    words = ctypes.string_at(generator._bit_generator.ctypes.state_address, NUM_BYTES)
    return bool(words == state["state"]["key"].tobytes() + int(state["state"]["pos"]).to_bytes(4, sys.byteorder))
