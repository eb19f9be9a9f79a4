"""Which checkpoints stay: pure functions of timelines and steps."""

from __future__ import annotations

import random

import pytest

from lightning_resume.policy import archived, to_prune


def test_the_newest_k_stay_by_number() -> None:
    """Order is by number, whatever order they come in; none is counted twice."""
    assert to_prune([100, 20, 3, 100], 2) == [3]
    assert to_prune([100, 20, 3], 3) == []
    assert to_prune([], 1) == []


@pytest.mark.parametrize("keep_last_k", [1, 0, -5])
def test_the_newest_one_always_stays(keep_last_k: int) -> None:
    """Whatever a caller asks for."""
    assert to_prune([1, 2, 3], keep_last_k) == [1, 2]


def test_a_newer_timeline_is_newer_than_any_step_of_an_older_one() -> None:
    """A run that went back from step 8 to step 4 keeps what it has written since."""
    steps = [(0, 4), (0, 6), (0, 8), (1, 5), (1, 6)]

    assert to_prune(steps, 2) == [(0, 4), (0, 6), (0, 8)]


def test_what_is_to_be_kept_does_not_take_the_place_of_a_newer_one() -> None:
    """Archived ones stay besides the newest K, not in their stead."""
    assert to_prune([10, 20, 30, 31, 32], 2, {10, 20}) == [30]


def test_the_first_at_or_after_each_multiple_is_archived() -> None:
    """Exactly on it, or the first one behind it; step 0 is no multiple."""
    steps = [(0, step) for step in (0, 5, 10, 15, 21, 25, 30, 52)]

    assert archived(steps, 10) == {(0, 10), (0, 21), (0, 30), (0, 52)}
    assert archived(steps, None) == set()
    assert archived(steps, 100) == set()


def test_each_timeline_has_an_archive_of_its_own() -> None:
    """What was archived before a run went back stays for ever."""
    steps = [(0, 10), (0, 20), (1, 13), (1, 20), (1, 24)]

    assert archived(steps, 10) == {(0, 10), (0, 20), (1, 13), (1, 20)}


def test_what_is_archived_once_is_archived_after_every_pruning() -> None:
    """The rule looks only at what is there; pruning never makes it change its mind."""
    draw = random.Random(1)
    for _ in range(200):
        every, keep_last_k = draw.randint(1, 20), draw.randint(1, 4)
        there: list[tuple[int, int]] = []
        promised: set[tuple[int, int]] = set()
        timeline = step = 0
        for _ in range(60):
            if draw.random() < 0.05:
                timeline, step = timeline + 1, draw.randint(0, step)
            step += draw.randint(1, 7)
            there = [place for place in there if place[1] != step]  # the directory of that step is overwritten
            promised = {place for place in promised if place[1] != step}
            there.append((timeline, step))
            promised |= archived(there, every)
            gone = to_prune(there, keep_last_k, archived(there, every))
            there = [place for place in there if place not in gone]
            assert promised <= set(there)
            assert len(set(there) - promised) <= keep_last_k
