"""`AtomicResumeCallback`: hooks only; what they do stands in the modules beside this one."""

from __future__ import annotations

import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_resume.catalog import clean_incomplete
from lightning_resume.data.loader import ResumableLoader
from lightning_resume.errors import CheckpointError, UnsupportedSetupError
from lightning_resume.format.checkpoint import read_index
from lightning_resume.format.collector import paused_collection
from lightning_resume.lock import REFRESH_SECONDS, FolderLock
from lightning_resume.plugin import arguments, checks, frozen, hooks, loops, positional, resuming
from lightning_resume.plugin.averaging import is_collecting_batch_norm
from lightning_resume.plugin.checkpoint_io import RANK_STATES, STATE_KEY, AtomicCheckpointIO, Fitting
from lightning_resume.plugin.circumstances import capture_circumstances, look_at_beginning
from lightning_resume.plugin.history import LossHistory
from lightning_resume.plugin.identity import look_at_data, trainer_identity
from lightning_resume.plugin.last import Last, find_last, instead, path_to_load, timeline_after, warn_of_bad
from lightning_resume.plugin.optimizers import describe_optimizers
from lightning_resume.plugin.quiet import Quiet
from lightning_resume.plugin.rank_state import (
    capture_rank_state,
    enter_epoch,
)
from lightning_resume.plugin.ranks import decide, gather
from lightning_resume.plugin.recall import Recall
from lightning_resume.plugin.rescue import save_last_cut
from lightning_resume.plugin.saver import Saver
from lightning_resume.plugin.signals import Signals
from lightning_resume.rng import RNGState


class AtomicResumeCallback(ModelCheckpoint):
    """Makes a killed and resumed run the uninterrupted run, bit for bit.

    Add it to the Trainer and pass `ckpt_path="last"` to `fit`: the first start trains from scratch, every later one
    goes on at the very next batch. It saves between two batches, brings its own `CheckpointIO`, and wraps the training
    and validation loaders; an uninterrupted run is the run without it.

    Args:
        dirpath: folder of the checkpoints, on a local file system; default `<default_root_dir>/checkpoints`, which is
            the same in the next process (a logger's versioned folder would not be).
        every_n_train_steps: save after so many optimizer steps (`global_step`).
        train_time_interval: save after so much time; together with the above whichever comes first, and each save
            restarts both counts. With neither: every 60 seconds, stretched where saving would cost more than 5 % of the
            time.
        keep_last_k: this many newest checkpoints stay; at least 1.
        archive_every_n_train_steps: save at each multiple of so many optimizer steps, and keep these for ever.
        save_weights_only_every_n_train_steps: save the weights alone at each multiple of so many optimizer steps,
            unless a full save falls on it, and keep these for ever. One cannot resume training from them.
        trainable_only: leave frozen parameters out of the checkpoints (LoRA and other adapters). A resume needs a model
            that is built with the same frozen weights, and compares their digests.
        async_save: copy the state between two batches, and write it behind the training. The first save and the last
            are written at once. A kill costs the steps since the last save, and those since the one before it if that
            was still being written: at most twice the cadence.
        back_pressure: what a save does that falls due while another is being written. "wait": it waits for that one.
            "skip": it is left out, and the next is due a whole interval later.
        save_on_train_start: save before the first batch: a job that is killed early comes back exactly, and state that
            cannot be saved stops the run at once. Also after a resume from another than the newest one.
        save_on_train_end: save when training ends.
        save_on_exception: save the last whole step when an exception ends the next one before its optimizer step, and
            all of it can be put back; else a warning says what is lost. In a single process only.
        save_on_signal: at SIGTERM, SIGINT, or the signal at which Lightning has SLURM requeue the job, finish the
            batch and save; only then what would have happened without this callback happens. A second SIGINT stops at
            once, without a save. In the main thread only.
        preemption_notice_seconds: how long the machine leaves after its signal; you are warned once where a save takes
            longer.
        max_shard_bytes: size of a safetensors file at which the next one is begun.
        data_version: your own name for the data; a resume with another one is refused.
        item_rng: "stock": items draw as PyTorch lets them. "positional": order and items follow from (seed, epoch,
            position) alone, so that a resume may have another number of workers, or of processes with the same global
            batches; an uninterrupted run draws otherwise than without this callback.
        allow: differences that a resume may accept; each refusal names its word.

    A save never interrupts an accumulation window: it waits for the optimizer step. A crash at any point leaves the
    newest committed checkpoint whole. In a distributed run all ranks call every hook; rank 0 writes.
    While `fit` runs, the folder is this run's alone: another one there is refused with `FolderLockedError`.

    Raises:
        TypeError, ValueError: wrong arguments.
    """

    state_key: str = STATE_KEY  # read at every hook: a property would be a call more

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        keep_last_k: int = 3,
        archive_every_n_train_steps: int | None = None,
        save_weights_only_every_n_train_steps: int | None = None,
        trainable_only: bool = False,
        async_save: bool = True,
        back_pressure: Literal["wait", "skip"] = "wait",
        save_on_train_start: bool = True,
        save_on_train_end: bool = True,
        save_on_exception: bool = True,
        save_on_signal: bool = True,
        preemption_notice_seconds: float | None = None,
        max_shard_bytes: int = 2**30,
        data_version: str | None = None,
        item_rng: Literal["stock", "positional"] = "stock",
        allow: Sequence[str] = (),
    ) -> None:
        self._model_checkpoints: list[ModelCheckpoint] = []
        super().__init__(save_top_k=0)
        self.dirpath = arguments.folder(dirpath)
        self.allow = arguments.allowed(allow)
        self.settings = settings = arguments.Settings(
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            keep_last_k=keep_last_k,
            archive_every_n_train_steps=archive_every_n_train_steps,
            save_weights_only_every_n_train_steps=save_weights_only_every_n_train_steps,
            trainable_only=trainable_only,
            async_save=async_save,
            back_pressure=back_pressure,
            save_on_train_start=save_on_train_start,
            save_on_train_end=save_on_train_end,
            save_on_exception=save_on_exception,
            save_on_signal=save_on_signal,
            preemption_notice_seconds=preemption_notice_seconds,
            max_shard_bytes=max_shard_bytes,
            data_version=data_version,
            item_rng=item_rng,
        )
        self._item_seed: int | None = None
        self.history = LossHistory()
        self._io = AtomicCheckpointIO(max_shard_bytes)
        self._saver = Saver(settings)
        self._frozen = frozen.FrozenParameters()
        self._count_steps: Callable[[], int] = int
        self._quiet = Quiet()
        self._signals = Signals(self._quiet.end)
        self._recall = Recall()
        self._moment = "hook"
        self._last: Last | None = None  # since Lightning has asked for it, until training begins
        self._resume: dict[str, Any] | None = None
        self._resumed_from: str | None = None
        self._has_begun = False
        self._has_gone_back = False  # to a checkpoint that is not the run's newest in the folder
        self._streams: RNGState | None = None
        self._trainer: weakref.ref[Trainer] | None = None
        self._lock: FolderLock | None = None
        self._optimizers: dict[str, Any] = {}
        self._configured: dict[str, Any] = {}
        self._beginning: dict[str, Any] = {}
        self._told: set[str] = set()

    # -- finding and reading ----------------------------------------------------------------------------------------

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        self._last = None
        if loops.is_dry_run(trainer):
            rank_zero_info("fast_dev_run neither saves nor resumes.")
            return set()
        # One process, which will read all of it: that is to be done once.
        trust_newest = trainer.state.fn == TrainerFn.FITTING and trainer.world_size == 1
        others = loops.last_of_others(trainer, self)
        self._last = find_last(self._folder(trainer), others, trust_newest=trust_newest)
        return {self._last.path} if self._last is not None else set()

    def _folder(self, trainer: Trainer) -> str:
        if self.dirpath is None:
            self.dirpath = arguments.folder(os.path.join(trainer.default_root_dir, "checkpoints"))
        return str(self.dirpath)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Installs the CheckpointIO and, for `fit`, the hooks into the loop and around the loaders."""
        others = [c for c in loops.callbacks(trainer) if isinstance(c, AtomicResumeCallback) and c is not self]
        if others:
            raise UnsupportedSetupError("two AtomicResumeCallbacks", "one run has one position", "Remove one of them.")
        self._model_checkpoints = [c for c in loops.callbacks(trainer) if type(c) is ModelCheckpoint]
        checks.check_setup(trainer)
        if isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO):
            self._io = trainer.strategy.checkpoint_io
        trainer.strategy.checkpoint_io = self._io
        self._io.fitting = None
        self._io.complete = lambda path, checkpoint: frozen.complete(pl_module, path, checkpoint)
        if stage != "fit" or loops.is_dry_run(trainer):
            return
        checks.check_folder(self._folder(trainer))
        self._leave_folder()  # of a fit that ended in a way that told nobody
        self._lock = checks.take_folder(trainer, self._folder(trainer))
        if self.settings.trainable_only:
            frozen.check_setup(trainer)
        if self._trainer is None or self._trainer() is not trainer:  # the same one goes on with its own run
            self._trainer, self._io.run_id, self._io.timeline = weakref.ref(trainer), uuid.uuid4().hex, 0
        self._item_seed = positional.fresh_seed(trainer, self.settings.item_rng)
        self._io.fitting = Fitting(
            trainer.global_rank,
            trainer.world_size,
            lambda path, state: self._before_restore(trainer, path, state),
            agree=lambda path: path_to_load(trainer, self._folder(trainer), path, self._last),
            instead=lambda path, error: self._load_instead(trainer, path, error),
            may_change_world_size=self._item_seed is not None,
        )
        self._resume, self._resumed_from, self._has_begun, self._has_gone_back = None, None, False, False
        self._configured, self._beginning = trainer_identity(trainer), {}
        hooks.install_hooks(
            trainer,
            lambda: self._before_epoch(trainer),
            self._quiet.lasts,
            lambda: self._before_batch(trainer),
            lambda: self._before_epoch_end(trainer),
            lambda: self._listen(trainer),
            lambda: self._after_run(trainer),
        )
        if self.settings.save_on_signal:
            hooks.take_over_sigterm(trainer)
        loops.wrap_loaders(trainer, lambda loader: self._wrap(trainer, loader))

    def _wrap(self, trainer: Trainer, loader: object) -> object:
        if type(loader) is ResumableLoader:  # by the user, or by an earlier fit
            loader.tell(self._quiet.end)
            return loader
        wrapped = positional.wrap(trainer, loader, self._item_seed)
        wrapped.tell(self._quiet.end)
        if trainer.training and self in loops.callbacks(trainer):
            checks.check_loader(loader)
            look_at_data(wrapped, self._told)
            if self._resume is not None:
                wrapped.hold()
        return wrapped

    def _load_instead(self, trainer: Trainer, path: str, error: CheckpointError) -> str:
        if trainer.world_size > 1:  # the others may have read it
            raise error
        self._last = instead(self._folder(trainer), self._last, path, error)
        loops.note_path(trainer, self._last.path)
        return self._last.path

    def _before_restore(self, trainer: Trainer, path: str, checkpoint: Mapping[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING or loops.is_tuning(path):
            return
        resuming.check_checkpoint(trainer, path, checkpoint, self.settings, self.allow)
        if self.settings.trainable_only:
            self._frozen.resume(trainer.lightning_module, checkpoint)
        self._resumed_from = os.path.abspath(path)
        index = read_index(path)
        self._io.run_id = index.run_id or self._io.run_id
        self._io.timeline = decide(trainer, timeline_after(self._folder(trainer), index))
        self._has_gone_back = self._io.timeline != index.timeline

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps what has to be put back later, when the loop stands where the save was."""
        if trainer.state.fn == TrainerFn.FITTING and "rank_state" in checkpoint and not self._has_begun:
            loops.restore_seeds(checkpoint["rank_state"]["seeds"])
            self._item_seed = checkpoint["rank_state"]["item_rng"]["seed"]
            self._resume = resuming.keep_state(trainer, checkpoint, self._configured)

    # -- training ---------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module has its precision now, and there are optimizers; their state is not restored yet."""
        self._optimizers, self._beginning = describe_optimizers(trainer), look_at_beginning(trainer)
        if trainer.is_global_zero and not loops.is_dry_run(trainer):
            clean_incomplete(self._folder(trainer))
            warn_of_bad(self._folder(trainer), self._last.told if self._last is not None else ())
        self._last = None
        if self._resume is not None:
            resuming.restore_early(trainer, self._resume, self._optimizers)
        if trainer.is_global_zero and not loops.is_dry_run(trainer):
            checks.check_unused(self._folder(trainer), self._io.run_id)
        if self._lock is not None:
            self._lock.note_run(self._io.run_id)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training begins, or goes on."""
        if self.settings.trainable_only and self._resume is None:
            self._frozen.begin(pl_module)
        is_same_folder = self._resumed_from is not None and os.path.dirname(self._resumed_from) == self.dirpath
        self._saver.begin(trainer, (self._resumed_from or "") if is_same_folder else "", self._io.run_id)
        if self._resume is not None and self._resume["between_epochs"] and self._resume["moment"] != "hook":
            loops.stop_restarting(trainer)
        self._recall.begin(trainer)
        self._count_steps = loops.step_counter(trainer)
        self._quiet.end()
        self._pass_over_hooks()
        self._listen(trainer)

    def _pass_over_hooks(self) -> None:
        """Spares Lightning the hooks that have nothing to do until the next cut."""
        empty: list[object] = []
        if not (self.settings.save_on_exception and self._recall.needs_gradients):
            empty.append(AtomicResumeCallback.on_train_batch_start)
        if not (self._recall.is_held or self.settings.trainable_only):
            empty.append(AtomicResumeCallback.on_before_optimizer_step)
        hooks.pass_over_hooks(self, empty)

    def _before_epoch(self, trainer: Trainer) -> None:
        self._quiet.end()  # loaders may have been made anew
        if self._resume is not None and self._resume["between_epochs"]:
            enter_epoch(trainer, self._resume)

    def _before_batch(self, trainer: Trainer) -> None:
        if self not in loops.callbacks(trainer):  # a tuner is running its own loop
            return
        self._look_at_cut(trainer)
        self._begin_quiet(trainer)

    def _begin_quiet(self, trainer: Trainer) -> None:
        if trainer.world_size > 1:  # the ranks ask each other at each cut, and nothing is held
            return
        self._pass_over_hooks()
        if getattr(self.on_train_batch_end, "__func__", None) is not AtomicResumeCallback.on_train_batch_end:
            return  # a subclass's own, which may not count the steps
        if self._recall.is_held:  # the next cut is to drop it
            return
        until_seconds, until_step = self._saver.next_due()
        until_seconds = min(until_seconds, time.monotonic() + REFRESH_SECONDS)
        if self.settings.save_on_exception:
            until_seconds = min(until_seconds, self._recall.may_note_from)
        self._quiet.begin(trainer, until_seconds, until_step)
        if self._signals.are_noted:  # perhaps since it was looked at
            self._quiet.end()

    def _look_at_cut(self, trainer: Trainer) -> None:
        if self._lock is not None:
            self._lock.refresh()
        loops.follow_passes(trainer)
        if loops.is_fetched_ahead(trainer):
            for loader in loops.train_loaders(trainer):
                loader.expect_ahead()
        if self._resume is not None:
            state, self._resume = self._resume, None
            how = self.settings, self.allow, self._configured, self._beginning
            resuming.enter(trainer, state, str(self._resumed_from), *how)
        if not self._has_begun:
            self._has_begun = True
            # Where the run has gone back, "last" is to be this place from now on, and not the one that it left.
            is_wanted = not self._saver.last_path or (self._has_gone_back and not loops.is_inside_window(trainer))
            if self.settings.save_on_train_start and is_wanted and not loops.is_lazy(trainer):
                self._save(trainer, "cut", must_succeed=not self._saver.last_path)
        else:
            self._saver.poll(trainer)
            self._saver.make_ready(trainer)
            if self._saver.may_be_due(trainer):
                if not _is_between_steps(trainer):
                    return
                self._save_if_due(trainer)
        if self.settings.save_on_signal and self._signals.may_be_noted(trainer) and _is_saveable(trainer):
            self._heed_signals(trainer)
        if self.settings.save_on_exception and self._recall.may_note() and _is_saveable(trainer):
            self._recall.note(trainer)

    def _save_if_due(self, trainer: Trainer) -> None:
        kind = self._saver.due(trainer)
        if kind is None:
            self._saver.pass_by(trainer)
        elif loops.is_saveable(trainer):
            self._save(trainer, "cut", kind=kind, in_background=self._saver.may_wait)
            self._saver.pass_by(trainer)

    def _listen(self, trainer: Trainer) -> None:
        if self.settings.save_on_signal and self in loops.callbacks(trainer):
            self._signals.install(trainer)

    def _heed_signals(self, trainer: Trainer) -> None:
        def save() -> str:
            self._save_if_new(trainer, "cut")
            return self._saver.newest_in_words(trainer)

        self._signals.heed(trainer, save, lambda: self._at("cut"))

    def _after_run(self, trainer: Trainer) -> None:
        """Training has ended, and what it was to save is saved: a signal that came since the last cut is heeded."""
        if self not in loops.callbacks(trainer):
            return
        if self.settings.save_on_signal and (self._signals.may_be_noted(trainer) or trainer.world_size > 1):
            self._signals.heed(trainer, lambda: self._saver.newest_in_words(trainer), lambda: self._at("end"))
        self._signals.remove()

    def _before_epoch_end(self, trainer: Trainer) -> None:
        """Training that stops inside an epoch is saved before Lightning takes the epoch for complete."""
        if self in loops.callbacks(trainer) and loops.stops_inside_epoch(trainer) and self._is_end_wanted(trainer):
            self._save_if_new(trainer, "cut")

    def _is_end_wanted(self, trainer: Trainer) -> bool:
        self._saver.settle(trainer)
        return self.settings.save_on_train_end or self._saver.is_owing

    def _save_if_new(self, trainer: Trainer, moment: str, *, must_succeed: bool = False) -> None:
        self._saver.settle(trainer)
        if self._has_begun and self._saver.steps_since_save(trainer) > 0 and not loops.is_inside_window(trainer):
            self._save(trainer, moment, must_succeed=must_succeed)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """What follows may change gradients that are part of the state."""
        if self._recall.needs_gradients:
            self._recall.drop("gradients of the step before are part of its state")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """From here on the weights are no longer those of the last cut."""
        self._recall.drop("the optimizer step had begun")
        if self._frozen.are_thawing:
            self._saver.wait()  # it looks at weights that were left out, to see that they are as they were

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the loss of the batch that completed an optimizer step."""
        if self._recall.was_held:
            self._recall.end_step()
        global_step = self._count_steps()
        self.history.note(global_step, outputs)
        if global_step >= self._quiet.until_step:
            self._quiet.end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the end."""
        if self._is_end_wanted(trainer):
            for loader in loops.train_loaders(trainer):
                loader.finish_pass()
            self._save_if_new(trainer, "end", must_succeed=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Waits for the save in flight, and saves the last whole step. One rank alone may be here: none is asked."""
        try:
            self._saver.finish()
            is_wanted = self.settings.save_on_exception or (self.settings.save_on_signal and self._signals.are_noted)
            if is_wanted and self._has_begun and not isinstance(exception, SIGTERMException):
                save_last_cut(
                    trainer,
                    exception,
                    recall=self._recall,
                    saver=self._saver,
                    save=lambda amend: self._save(trainer, "cut", amend=amend, must_succeed=True),
                    own=self,
                    refusal="it was interrupted twice" if self._signals.is_impatient else "",
                )
        finally:
            self._last = None
            self._signals.leave(trainer)
            self._leave_folder()  # Lightning does not call teardown now

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: the epoch's end is saved at the first batch of the next one, or when training ends."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: the step is not over."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the hooks out again."""
        self._signals.remove()
        hooks.remove_hooks(trainer)
        loops.unwrap_loaders(trainer)
        loops.return_checkpoint_io(trainer)
        hooks.heed_hooks(self)
        self._count_steps = int
        self._quiet.forget()
        self._leave_folder()

    def _leave_folder(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- saving -----------------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, moment: str, **how: Any) -> None:
        with self._at(moment):
            self._saver.save(trainer, self._io, self._folder(trainer), self._frozen, **how)

    @contextmanager
    def _at(self, moment: str) -> Iterator[None]:
        """What is saved in this context is saved at `moment`, whoever saves it."""
        self._streams = streams = RNGState.capture()
        self._moment = moment
        try:
            yield
        finally:
            self._moment, self._streams = "hook", None
            streams.restore()  # a user's own save hooks may have drawn

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds every rank's own state; runs for every full save of this Trainer, on all ranks."""
        if trainer.state.fn != TrainerFn.FITTING or not loops.has_data(trainer):
            return
        loops.drop_loader_state(checkpoint)
        loops.follow_passes(trainer)
        with paused_collection():
            state = capture_rank_state(
                trainer,
                moment=self._moment,
                data_version=self.settings.data_version,
                schedulers=self._optimizers.get("schedulers", []),
                streams=self._streams,
                item_rng={"kind": self.settings.item_rng, "seed": self._item_seed},
                configured=self._configured,
            )
            state["circumstances"] = capture_circumstances(trainer, self._beginning)
        checkpoint[RANK_STATES] = gather(trainer, state)
        checkpoint["world_size"] = trainer.world_size

    def state_dict(self) -> dict[str, Any]:
        """Loss history."""
        return {"history": self.history.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the loss history."""
        self.history.load_state_dict(state_dict["history"])

    @property
    def best_model_path(self) -> str:
        """For `ckpt_path="best"`: that of the user's own ModelCheckpoint; without one, this callback's last save."""
        for callback in self._model_checkpoints:
            return callback.best_model_path
        return self._saver.last_path or self._best_model_path

    @best_model_path.setter
    def best_model_path(self, value: str) -> None:
        self._best_model_path = value


def _is_between_steps(trainer: Trainer) -> bool:
    return not loops.is_inside_window(trainer) and not is_collecting_batch_norm(trainer)


def _is_saveable(trainer: Trainer) -> bool:
    return _is_between_steps(trainer) and loops.is_saveable(trainer)
