"""When to save: pure functions of plain values."""

from __future__ import annotations

from dataclasses import dataclass

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

    def is_due(self, *, steps_since_save: int, seconds_since_save: float) -> bool:
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


def to_prune(steps: list[int], keep_last_k: int, keep: frozenset[int] = frozenset()) -> list[int]:
    """Which of these checkpoints' steps to delete so that the newest `keep_last_k`, and those in `keep`, stay.

    Order is by number. At least the newest one always stays.
    """
    newest = sorted(set(steps))[-max(keep_last_k, 1) :]
    return [step for step in sorted(set(steps)) if step not in newest and step not in keep]
