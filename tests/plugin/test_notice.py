"""`preemption_notice_seconds`: a save that takes longer than the machine leaves is told before it is needed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from threading import Event

import pytest
from inprocess import NotedToy, loader, make_trainer, plugin


@pytest.mark.parametrize("is_async", [False, True], ids=["at_once", "in_background"])
def test_a_save_that_is_slower_than_the_notice_is_told_once(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both numbers and what to do, once, though every save is too slow."""
    real, slow = os.fsync, Event()

    def fsync(fd: int) -> None:
        slow.wait(0.002)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    callback = plugin(tmp_path / "ck", async_save=is_async, preemption_notice_seconds=0.001)

    with pytest.warns(UserWarning, match="preemption_notice_seconds: +0.00 s") as warned:
        make_trainer(tmp_path, callback, max_epochs=1).fit(NotedToy(), loader())

    texts = [str(w.message) for w in warned if "preemption_notice_seconds" in str(w.message)]
    assert len(texts) == 1
    assert "a save takes: " in texts[0]
    assert "--signal=USR1@SECONDS" in texts[0]


def test_a_save_that_is_fast_enough_is_not_told(tmp_path: Path) -> None:
    """Nothing is said while saves are shorter than the notice."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path, plugin(tmp_path / "ck", preemption_notice_seconds=600), max_epochs=1).fit(
            NotedToy(), loader()
        )

    assert [w for w in caught if "preemption_notice_seconds" in str(w.message)] == []
