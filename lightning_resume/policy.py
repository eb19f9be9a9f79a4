"""When to save, and what to keep: pure functions of plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

Place = TypeVar("Place", int, tuple[int, int])
"""A checkpoint's step, or its timeline and step."""

DEFAULT_INTERVAL_SECONDS = 60.0
MAX_STALL_SHARE = 0.05
"""With the default cadence, saving may cost this share of training time; beyond it the interval is stretched."""


@dataclass(frozen=True)
class Cadence:
    """Save after so many optimizer steps or so many seconds, whichever comes first; each save restarts both counts.

    Attributes:
        every_n_train_steps: optimizer steps; None: never by steps.
        interval_seconds: wall-clock seconds; None: never by time.
    """

    every_n_train_steps: int | None = None
    interval_seconds: float | None = None

    def is_due(self, steps_since_save: int, seconds_since_save: float) -> bool:
        """Whether a save is due. A step that was saved already is never due again."""
        if steps_since_save < 1:
            return False
        by_steps = self.every_n_train_steps is not None and steps_since_save >= self.every_n_train_steps
        by_time = self.interval_seconds is not None and seconds_since_save >= self.interval_seconds
        return by_steps or by_time


def is_crossed(every_n_train_steps: int | None, last_step: int, global_step: int) -> bool:
    """Whether a multiple of `every_n_train_steps` lies behind `last_step`, and not behind `global_step`.

    A batch may take more than one optimizer step, so that no cut falls on the multiple itself. None: never.
    """
    if every_n_train_steps is None:
        return False
    return global_step // every_n_train_steps > last_step // every_n_train_steps


def stretched_interval(interval_seconds: float, stall_seconds: float) -> float:
    """The interval at which saves of `stall_seconds` cost at most `MAX_STALL_SHARE` of the time."""
    return max(interval_seconds, stall_seconds / MAX_STALL_SHARE)


def to_prune(steps: Iterable[Place], keep_last_k: int, keep: Collection[Place] = ()) -> list[Place]:
    """Which of these checkpoints to delete so that the newest `keep_last_k`, and those in `keep`, stay.

    Order is by number. At least the newest one always stays.

    Args:
        steps: of the checkpoints; or timeline and step of each.
        keep_last_k: so many stay.
        keep: these stay too; they count among the newest if they are.

    Returns:
        Those to delete, oldest first.
    """
    ordered = sorted(set(steps))
    return [step for step in ordered[: -max(keep_last_k, 1)] if step not in keep]


def archived(steps: Iterable[tuple[int, int]], every_n_train_steps: int | None) -> set[tuple[int, int]]:
    """Which of these checkpoints stay for ever: the first one at or after each multiple of `every_n_train_steps`.

    The first at or after 1000, say, is that of step 1000, or of step 1001 where no save fell on 1000; one of step 2000
    or later is not. Step 0 is no multiple. A timeline has an archive of its own, so what was archived before a run went
    back stays.

    Args:
        steps: timeline and step of each checkpoint.
        every_n_train_steps: optimizer steps; None: nothing is archived.
    """
    if every_n_train_steps is None:
        return set()
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for timeline, step in sorted(set(steps)):
        if step >= every_n_train_steps:
            first.setdefault((timeline, step // every_n_train_steps), (timeline, step))
    return set(first.values())
