"""Memory by its address: many pieces are gathered by one call where the system has it, and as well without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_resume.format import memory


@pytest.mark.parametrize("answer", [None, -1, 3, "real"], ids=["no such call", "forbidden", "stops early", "as it is"])
def test_pieces_stand_one_behind_the_other(answer: Any, monkeypatch: Any) -> None:
    """Whatever the system's call does; nothing before or after the place is touched."""
    if answer is None:
        monkeypatch.setattr(memory, "_write_pieces", None)
    elif answer != "real":
        monkeypatch.setattr(memory, "_write_pieces", lambda *arguments: answer)
    generator = np.random.default_rng(0)
    pieces = [generator.integers(0, 256, size, np.uint8) for size in (1, 5000, 17, 4096, 100_003)]
    expected = np.concatenate(pieces)
    place = np.full(expected.size + 20, 7, np.uint8)

    listed = memory.list_pieces([piece.ctypes.data for piece in pieces], [piece.size for piece in pieces])
    memory.gather_memory(place.ctypes.data + 10, listed, expected.size)

    assert np.array_equal(place[10:-10], expected)
    assert set(place[:10]) == set(place[-10:]) == {7}


def test_as_many_pieces_as_the_system_takes_are_gathered() -> None:
    """At the limit of one call."""
    source = np.arange(memory.MAX_PIECES * 3, dtype=np.uint8)
    place = np.zeros_like(source)

    addresses = [source.ctypes.data + 3 * number for number in range(memory.MAX_PIECES)]
    memory.gather_memory(place.ctypes.data, memory.list_pieces(addresses, [3] * memory.MAX_PIECES), source.size)

    assert np.array_equal(place, source)
