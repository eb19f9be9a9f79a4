"""Taking a checkpoint at the cut: when, where to, and what happens if it fails."""

from __future__ import annotations

import functools
import math
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_resume.catalog import step_dirname
from lightning_resume.errors import BackgroundSaveError, CheckpointExistsError, ResumeError, UnsupportedStateError
from lightning_resume.format.claims import StaleCopyError
from lightning_resume.format.image import Image
from lightning_resume.format.links import KeptFile
from lightning_resume.format.plans import PlanCache
from lightning_resume.format.prepared import PreparedCheckpoint
from lightning_resume.plugin import loops
from lightning_resume.plugin.arguments import Settings
from lightning_resume.plugin.checkpoint_io import AtomicCheckpointIO
from lightning_resume.plugin.checks import check_dump
from lightning_resume.plugin.frozen import FrozenParameters, frozen_names
from lightning_resume.plugin.ranks import decide
from lightning_resume.plugin.retention import Retention
from lightning_resume.policy import DEFAULT_INTERVAL_SECONDS, Cadence, is_crossed, stretched_interval
from lightning_resume.writer import BackgroundWriter


class InFlight(NamedTuple):
    """A save that is being written.

    Attributes:
        path: of the checkpoint to be.
        global_step: to be saved by it; None where it is of the weights alone.
        stall_seconds: for which training has stopped.
    """

    path: str
    global_step: int | None
    stall_seconds: float


class Saver:
    """Saves by a cadence, in the background or at once, and prunes what is old.

    At most one save is in flight. What is written in the background is a copy that was taken at the cut.

    Attributes:
        last_path: the newest checkpoint of this run that is known to be durable; "" if there is none.
    """

    def __init__(self, settings: Settings) -> None:
        """Has saved nothing yet."""
        interval = DEFAULT_INTERVAL_SECONDS if settings.is_default_cadence else settings.interval_seconds
        self.last_path = ""
        self._settings = settings
        self._cadence = Cadence(settings.every_n_train_steps, interval)
        self._may_stretch = settings.is_default_cadence
        tiers = settings.archive_every_n_train_steps, settings.save_weights_only_every_n_train_steps
        self._tiers = [every for every in tiers if every is not None]
        self._writer = BackgroundWriter()
        self._image = Image()
        self._plans = PlanCache()
        self._kept: dict[str, KeptFile] = {}  # what the last save without an image has left, to be linked
        self._due_from = 0, 0.0  # step and time of the last save, also of one that failed
        self._saved_step = 0  # of the last full one that is known to be on disk: not of one in flight, which may fail
        self._seen_step = 0  # at the last cut
        self._in_flight: InFlight | None = None
        self._has_memory = False
        self._told_of_notice = False
        self._owed = ""  # kind of one that was given up, and is to be made again at once
        self._has_saved = False  # with what the first optimizer step adds to the state

    # -- when ---------------------------------------------------------------------------------------------------------

    def begin(self, trainer: Trainer, last_path: str, run_id: str | None) -> None:
        """Training begins, or goes on.

        Args:
            trainer: at the step from which it goes on.
            last_path: a good checkpoint of this run in the same folder; "" if there is none. What a process that was
                killed between a save and its pruning has left over is pruned.
            run_id: of this run.
        """
        self._due_from = trainer.global_step, time.monotonic()
        self._saved_step = self._seen_step = trainer.global_step
        self.last_path = last_path
        if last_path and trainer.is_global_zero:
            self._retention(os.path.dirname(last_path)).prune(run_id, last_path)

    def steps_since_save(self, trainer: Trainer) -> int:
        """Optimizer steps since the last full save that is known to be on disk; `settle` or `finish` come first."""
        return int(trainer.global_step - self._saved_step)

    def newest_in_words(self, trainer: Trainer) -> str:
        """Where this step is saved; or that it is not, and which checkpoint is the newest. Like `steps_since_save`."""
        if self.last_path and self.steps_since_save(trainer) == 0:
            return f"saved in {self.last_path!r}"
        return f"not saved: the newest checkpoint is {self.last_path!r}" if self.last_path else "no checkpoint is saved"

    def may_be_due(self, trainer: Trainer) -> bool:
        """Whether `due` has anything to decide: asked at every cut, where a save is possible and where it is not."""
        if trainer.world_size > 1 or self._tiers or self._owed:
            return True
        num_steps = trainer.global_step - self._due_from[0]
        return self._cadence.is_due(num_steps, time.monotonic() - self._due_from[1])

    def next_due(self) -> tuple[float, float]:
        """Moment of `time.monotonic` and `global_step` before which a cut has nothing to ask this object.

        Where there is a save in flight, or memory to be made ready, that is now.
        """
        if self._in_flight or self._owed or (self.may_wait and not self._has_memory):
            return 0.0, 0.0
        interval = self._cadence.interval_seconds
        step, seconds = self._due_from
        multiples = [(self._seen_step // every + 1) * every for every in self._tiers]
        return (
            math.inf if interval is None else seconds + interval,
            min([step + (self._cadence.every_n_train_steps or math.inf), *multiples]),
        )

    def due(self, trainer: Trainer) -> str | None:
        """The kind of save that is due: "full", "weights" or None. All ranks must call, and are given the same.

        With a time interval rank 0's clock decides. Where a full and a weights-only save fall on the same step, the
        full one is both.
        """
        step = trainer.global_step
        is_due = self._cadence.is_due(step - self._due_from[0], time.monotonic() - self._due_from[1])
        if self._cadence.interval_seconds is not None:
            is_due = decide(trainer, is_due)
        if is_due and self._settings.back_pressure == "skip" and self._in_flight:
            is_due = decide(trainer, not self._writer.is_busy)
            if not is_due:
                self._due_from = step, time.monotonic()
        is_archived = is_crossed(self._settings.archive_every_n_train_steps, self._seen_step, step)
        if is_due or is_archived:
            return "full"
        if is_crossed(self._settings.save_weights_only_every_n_train_steps, self._seen_step, step):
            return self._owed or "weights"
        return self._owed or None

    @property
    def is_owing(self) -> bool:
        """Whether a save was given up, and is to be made again where the next can be: at the end, if nowhere else."""
        return bool(self._owed)

    @property
    def may_wait(self) -> bool:
        """Whether a save may go on in the background: not the first, without which nothing would be on disk."""
        return self._settings.async_save and bool(self.last_path)

    def pass_by(self, trainer: Trainer) -> None:
        """Notes that a cut is left, with or without a save."""
        self._seen_step = trainer.global_step

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(
        self,
        trainer: Trainer,
        io: AtomicCheckpointIO,
        folder: str,
        frozen: FrozenParameters,
        *,
        kind: str = "full",
        in_background: bool = False,
        must_succeed: bool = False,
        amend: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Writes `folder/step-…` from all ranks' states, then prunes. All ranks must call.

        A save in flight is waited for. A failed save leaves the checkpoints before it as they are. It warns, and
        training goes on, unless `must_succeed`, or it is the first of this run in its folder (nothing would be there),
        or the first after an optimizer step finds state that has no encoding.

        Args:
            trainer: at the cut.
            io: writes.
            folder: of the checkpoints.
            frozen: what `trainable_only` leaves out.
            kind: "full" or "weights".
            in_background: return as soon as the state was copied.
            must_succeed: raise if it fails.
            amend: changes Lightning's checkpoint before it is written.

        Raises:
            ResumeError, OSError: it failed, and may not.
            BackgroundSaveError: the one before it failed in a way that no file system fails.
        """
        begun = time.monotonic()
        self.settle(trainer)
        path = os.path.join(folder, step_dirname(trainer.global_step))
        checkpoint = loops.dump(trainer, weights_only=kind == "weights")
        check_dump(trainer, checkpoint)
        if amend is not None:
            amend(checkpoint)
        module = trainer.lightning_module
        if self._settings.trainable_only:
            checkpoint = frozen.leave_out(module, checkpoint)
        check = functools.partial(frozen.require_unchanged, module)
        failure = decide(trainer, self._write(trainer, io, checkpoint, path, check, in_background))
        if kind == "full":
            self._due_from = trainer.global_step, time.monotonic()
        if failure is not None:
            self._fail(path, failure, must_succeed=must_succeed)
            return
        if kind in ("full", self._owed):
            self._owed = ""
        if kind == "full":
            self._has_saved |= trainer.global_step > 0
        seconds = time.monotonic() - begun
        save = InFlight(path, trainer.global_step if kind == "full" else None, seconds)
        if in_background:
            self._in_flight = save
        elif kind == "full":
            self._note_saved(save)
            self._compare_with_notice(trainer, seconds)
        if in_background == self._settings.async_save:
            self._stretch(seconds)

    def make_ready(self, trainer: Trainer) -> None:
        """Gets the memory for the copies, once there is optimizer state: behind the training, not in the first save."""
        if self._has_memory or not self.may_wait or not self._writer.is_idle:
            return
        if trainer.global_step == 0 and not any(optimizer.state for optimizer in trainer.optimizers):
            return  # there will be, if there ever is
        self._has_memory = True
        if trainer.is_global_zero:
            num_bytes = _state_bytes(trainer)
            self._writer.submit("memory", lambda: self._image.reserve(num_bytes))

    def settle(self, trainer: Trainer) -> None:
        """Waits for the save in flight, if there is one, and tells how it ended. All ranks must call.

        Raises:
            BackgroundSaveError: it failed in a way that no file system fails.
        """
        self._writer.wait()  # also for memory that is being made ready; an exception here leaves the save in flight
        save, self._in_flight = self._in_flight, None
        outcome = self._writer.collect()
        if save is None:
            return
        error = decide(trainer, outcome.error if outcome else None)
        if error is None:
            self._note_saved(save)
            self._compare_with_notice(trainer, save.stall_seconds + (outcome.seconds if outcome else 0.0))
            return
        if isinstance(error, StaleCopyError):
            self._owed = "weights" if save.global_step is None else "full"
            rank_zero_info(f"{error}: saving at the next step instead.")
            return
        if not isinstance(error, ResumeError | OSError):
            raise BackgroundSaveError(save.path, f"{type(error).__name__}: {error}") from error
        self._fail(save.path, error)

    def finish(self) -> None:
        """Waits for the save in flight when an exception ends training; asks no other rank."""
        self._writer.wait()
        save, self._in_flight = self._in_flight, None
        outcome = self._writer.collect()
        if save is None:
            return
        if outcome is None or outcome.error is None:
            self._note_saved(save)
            return
        warnings.warn(
            f"The save {save.path!r} FAILED; earlier checkpoints are untouched.\n{outcome.error}", stacklevel=2
        )

    def _note_saved(self, save: InFlight) -> None:
        if save.global_step is not None:
            self.last_path, self._saved_step = save.path, save.global_step

    def wait(self) -> None:
        """Waits for the save in flight; how it ended is told at the next cut."""
        self._writer.wait()

    def poll(self, trainer: Trainer) -> None:
        """Tells of a save in flight that is over; costs nothing otherwise."""
        if self._in_flight and trainer.world_size == 1 and not self._writer.is_busy:
            self.settle(trainer)

    def _write(
        self,
        trainer: Trainer,
        io: AtomicCheckpointIO,
        checkpoint: dict[str, Any],
        path: str,
        check: Callable[[], None],
        in_background: bool,
    ) -> Exception | None:
        """Writes on rank 0; returns the failure instead of raising it, so that the other ranks do not wait in vain."""
        if not trainer.is_global_zero:
            return None
        try:
            if os.path.lexists(path) and not os.path.isdir(path):
                raise CheckpointExistsError(path)
            prepared = io.prepare(checkpoint, path, frozen_names(trainer.lightning_module), self._plans)
            if in_background and self._is_copied(prepared, may_trust=trainer.world_size == 1):
                self._writer.submit(path, self._job(prepared, check, io.run_id, num_threads=1))
            else:
                self._job(prepared, check, io.run_id)()
        except (ResumeError, OSError) as error:
            return error
        return None

    def _job(
        self,
        prepared: PreparedCheckpoint,
        check: Callable[[], None],
        run_id: str | None,
        num_threads: int | None = None,
    ) -> Callable[[], None]:
        newest = self.last_path or None
        retention = self._retention(os.path.dirname(prepared.path))

        def job() -> None:
            check()
            retention.make_room(prepared.image_bytes, run_id, newest)  # a page is a block
            prepared.commit(num_threads, self._kept)
            retention.prune(run_id, prepared.path)  # only now: nothing is deleted before its successor is durable

        return job

    def _retention(self, folder: str) -> Retention:
        return Retention(folder, self._settings.keep_last_k, self._settings.archive_every_n_train_steps)

    def _is_copied(self, prepared: PreparedCheckpoint, may_trust: bool) -> bool:
        try:
            prepared.copy_into(self._image, compare_later=may_trust)
        except MemoryError as error:
            warnings.warn(f"the save {str(prepared.path)!r} is made at once: no {error}", stacklevel=2)
            return False
        return True

    def _fail(self, path: str, failure: BaseException, *, must_succeed: bool = False) -> None:
        is_first = not self.last_path or (isinstance(failure, UnsupportedStateError) and not self._has_saved)
        if must_succeed or is_first:
            raise failure
        rank_zero_warn(f"The save {path!r} FAILED; training goes on, earlier checkpoints are untouched.\n{failure}")

    def _compare_with_notice(self, trainer: Trainer, seconds: float) -> None:
        """Warns once where a save takes longer than the machine leaves after its signal."""
        notice = self._settings.preemption_notice_seconds
        if notice is None or seconds <= notice or self._told_of_notice or not trainer.is_global_zero:
            return
        self._told_of_notice = True
        warnings.warn(
            f"A save may not be whole before the machine is taken away: what was trained since the one before is lost "
            f"then.\n  a save takes:                {seconds:.2f} s\n  preemption_notice_seconds:   {notice:.2f} s\n"
            "Ask the scheduler for a longer notice (SLURM: --signal=USR1@SECONDS), save to a faster disk, or save more "
            "often.",
            stacklevel=2,
        )

    def _stretch(self, stall_seconds: float) -> None:
        interval = self._cadence.interval_seconds
        if not self._may_stretch or interval is None:
            return
        longer = stretched_interval(interval, stall_seconds)
        if longer > interval:
            self._may_stretch = False
            self._cadence = Cadence(self._cadence.every_n_train_steps, longer)
            rank_zero_info(
                f"A save stops training for {stall_seconds:.1f} s: saving every {longer:.0f} s "
                "to cost at most 5 % of the time."
            )


def _state_bytes(trainer: Trainer) -> int:
    """Size of the model's and the optimizers' state, with something for headers, and for what else there is."""
    values: list[Any] = list(trainer.lightning_module.state_dict().values())
    for optimizer in trainer.optimizers:
        values += (value for state in optimizer.state.values() for value in state.values())
    return 2**20 + sum(value.nbytes * 101 // 100 for value in values if isinstance(value, torch.Tensor))
