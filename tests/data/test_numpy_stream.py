"""Numpy's global stream, put aside and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_resume.data import numpy_stream


def state() -> tuple[Any, ...]:
    whole = np.random.get_state(legacy=False)
    return whole["state"]["key"].tobytes(), whole["state"]["pos"], whole["has_gauss"], whole["gauss"]


@pytest.fixture(params=[True, False], ids=["as_memory", "by_numpy"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: the fast one, which is the one on this machine, and the one for an unknown layout."""
    assert numpy_stream._is_laid_out()
    if not request.param:
        monkeypatch.setattr(numpy_stream, "_is_laid_out", lambda: False)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("num_draws", [0, 1, 311, 623, 624, 625])
@pytest.mark.parametrize("num_normal", [0, 1, 2])
@pytest.mark.parametrize("num_normal_between", [0, 1])
def test_the_stream_stands_where_it_stood(num_draws: int, num_normal: int, num_normal_between: int) -> None:
    """Putting aside moves nothing; putting back undoes everything, each time, a normal number that is kept too."""
    np.random.seed(num_draws)
    np.random.randint(2**32, size=num_draws, dtype=np.uint32)
    np.random.randn(num_normal)
    before = state()

    put_back = numpy_stream.put_aside()
    aside = state()
    np.random.seed(5)
    np.random.randn(num_normal_between)
    put_back()
    first = state()
    np.random.rand(700)
    put_back()

    assert before == aside == first == state()
