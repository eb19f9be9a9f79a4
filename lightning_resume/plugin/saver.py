"""Taking a checkpoint at the cut: when, where to, and what happens if it fails."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_resume.catalog import prune_checkpoints, step_dirname
from lightning_resume.errors import CheckpointExistsError, ResumeError, UnsupportedStateError
from lightning_resume.plugin import loops
from lightning_resume.plugin.checks import check_dump
from lightning_resume.plugin.last import step_checkpoints
from lightning_resume.plugin.ranks import decide
from lightning_resume.policy import Cadence, stretched_interval, to_prune


class Saver:
    """Saves by a cadence and prunes what is old.

    Args:
        cadence: when a save is due.
        keep_last_k: this many newest checkpoints stay.
        may_stretch: the interval may grow where saving costs too much.
    """

    def __init__(self, cadence: Cadence, *, keep_last_k: int, may_stretch: bool) -> None:
        self.cadence, self.keep_last_k, self.may_stretch = cadence, keep_last_k, may_stretch
        self._last_step = 0
        self._last_time = 0.0
        self.last_path = ""
        self._has_saved = False  # with what the first optimizer step adds to the state

    def begin(self, global_step: int, now: float, last_path: str | None = None) -> None:
        """Counts from here.

        Args:
            global_step: optimizer steps taken.
            now: monotonic clock, in seconds.
            last_path: a good checkpoint of this run in the same folder; "" if there is none; None: as before.
        """
        self._last_step, self._last_time = global_step, now
        if last_path is not None:
            self.last_path = last_path

    def steps_since_save(self, trainer: Trainer) -> int:
        """Optimizer steps since the last save."""
        return int(trainer.global_step - self._last_step)

    def is_due(self, trainer: Trainer) -> bool:
        """Whether to save now; with a time interval rank 0's clock decides for all ranks."""
        due = self.cadence.is_due(
            steps_since_save=self.steps_since_save(trainer), seconds_since_save=time.monotonic() - self._last_time
        )
        return due if self.cadence.interval_seconds is None else decide(trainer, due)

    def save(self, trainer: Trainer, folder: str, *, must_succeed: bool = False) -> str:
        """Writes `folder/step-…` from all ranks' states, then prunes.

        A failed save leaves the checkpoints before it as they are. It warns, and training goes on, unless
        `must_succeed`, or it is the first of this run in its folder (nothing would be there), or the first after an
        optimizer step finds state that has no encoding.

        Returns:
            The newest checkpoint's path: this one, or the one before it if this one failed.
        """
        begun = time.monotonic()
        path = os.path.join(folder, step_dirname(trainer.global_step))
        checkpoint = loops.dump(trainer)
        check_dump(trainer, checkpoint)
        failure = decide(trainer, _write(trainer, checkpoint, path))
        self.begin(trainer.global_step, time.monotonic())
        if failure is not None:
            is_first = not self.last_path or (isinstance(failure, UnsupportedStateError) and not self._has_saved)
            if must_succeed or is_first:
                raise failure
            rank_zero_warn(f"The save {path!r} FAILED; training goes on, earlier checkpoints are untouched.\n{failure}")
            return self.last_path
        self.last_path = path
        self._has_saved |= trainer.global_step > 0
        if trainer.is_global_zero:
            self._prune(folder)
        self._stretch(time.monotonic() - begun)
        return path

    def _prune(self, folder: str) -> None:
        # Newer ones are of another timeline, which a run that was resumed from an older step has yet to pass.
        paths = {info.global_step or 0: info.path for info in step_checkpoints(folder)}
        steps = [step for step in paths if step <= self._last_step]
        try:
            prune_checkpoints([paths[step] for step in to_prune(steps, self.keep_last_k)])
        except (ResumeError, OSError) as error:
            warnings.warn(f"could not delete old checkpoints in {folder!r}: {error}", stacklevel=2)

    def _stretch(self, stall_seconds: float) -> None:
        interval = self.cadence.interval_seconds
        if not self.may_stretch or interval is None:
            return
        longer = stretched_interval(interval, stall_seconds)
        if longer > interval:
            self.may_stretch = False
            self.cadence = Cadence(self.cadence.every_n_train_steps, longer)
            rank_zero_info(
                f"A save takes {stall_seconds:.1f} s: saving every {longer:.0f} s to cost at most 5 % of the time."
            )


def _write(trainer: Trainer, checkpoint: dict[str, Any], path: str) -> Exception | None:
    """Writes on rank 0; returns the failure instead of raising it, so that the other ranks do not wait in vain."""
    try:
        if os.path.lexists(path) and not os.path.isdir(path):
            raise CheckpointExistsError(path)
        trainer.strategy.save_checkpoint(checkpoint, path)
    except (ResumeError, OSError) as error:
        return error
    return None
