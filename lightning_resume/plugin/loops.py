"""Every read and write of Lightning's private loop state, one function each.

Checked on lightning 2.6.6. The cut, the one moment at which a checkpoint is taken, is the start of
`_TrainingEpochLoop.advance`: all of the last batch is over (optimizer, schedulers, validation, loggers, counters),
nothing of the next has begun.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, Timer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.nn.parallel import DistributedDataParallel

from lightning_resume.data.loader import ResumableLoader


def callbacks(trainer: Trainer) -> list[Callback]:
    """The trainer's callbacks, in Lightning's order."""
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return found


def is_dry_run(trainer: Trainer) -> bool:
    """Whether this is a `fast_dev_run`, which saves nothing."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def note_path(trainer: Trainer, path: str) -> None:
    """Another checkpoint than the one that Lightning chose is loaded: what it says from now on is true of this one."""
    trainer._checkpoint_connector._ckpt_path = path


def last_of_others(trainer: Trainer, callback: Callback) -> set[str]:
    """What the other checkpoint callbacks answer to `ckpt_path="last"`."""
    others = [c for c in callbacks(trainer) if isinstance(c, ModelCheckpoint) and c is not callback]
    found = {c.ckpt_path for c in callbacks(trainer) if isinstance(c, OnExceptionCheckpoint)}
    found = found.union(*(other._find_last_checkpoints(trainer) for other in others))
    return {path for path in found if os.path.exists(path)}


def has_data(trainer: Trainer) -> bool:
    """Whether the training loaders are set up."""
    return trainer.fit_loop._data_fetcher is not None


def dump(trainer: Trainer, *, weights_only: bool = False) -> dict[str, Any]:
    """Lightning's checkpoint, as a dict; runs its save hooks. All ranks must call."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=weights_only)


def is_tuning(path: str) -> bool:
    """Whether a checkpoint is the temporary one with which Lightning's Tuner undoes its trials."""
    return os.path.basename(path).startswith((".lr_find_", ".scale_batch_size_"))


def reinstate(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Hands Lightning the checkpoint again if a Tuner's callback has made it forget that there is one to restore."""
    if not trainer._checkpoint_connector._loaded_checkpoint:
        trainer._checkpoint_connector._loaded_checkpoint = checkpoint


def requeue_signal(trainer: Trainer) -> int | None:
    """The signal at which Lightning has SLURM queue the job again; None where it does not."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def wrap_loaders(trainer: Trainer, wrap: Callable[[object], object]) -> None:
    """Passes every loader that Lightning processes through `wrap`, before worker seeding is added to it."""
    strategy = trainer.strategy
    process = type(strategy).process_dataloader
    strategy.process_dataloader = lambda dataloader: wrap(process(strategy, dataloader))  # type: ignore[method-assign]


def unwrap_loaders(trainer: Trainer) -> None:
    """Undoes `wrap_loaders`."""
    trainer.strategy.__dict__.pop("process_dataloader", None)


def return_checkpoint_io(trainer: Trainer) -> None:
    """Gives a forked or spawned process its stock CheckpointIO back, when training has ended.

    The launcher hands the final weights to the main process through a temporary file. This callback was never set up
    there, so what reads the file is the stock one.
    """
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        trainer.strategy.checkpoint_io = TorchCheckpointIO()


def train_loaders(trainer: Trainer) -> list[ResumableLoader]:
    """The wrapped training loaders, in Lightning's order."""
    return _wrapped(trainer.fit_loop._combined_loader)


def val_loaders(trainer: Trainer) -> list[ResumableLoader]:
    """The wrapped validation loaders, in Lightning's order."""
    return _wrapped(trainer.fit_loop.epoch_loop.val_loop._combined_loader)


def _wrapped(combined: CombinedLoader | None) -> list[ResumableLoader]:
    loaders = combined.flattened if combined is not None else []
    return [loader for loader in loaders if type(loader) is ResumableLoader]


def num_batches_ahead(trainer: Trainer) -> int:
    """Batches that the fetcher holds and the loop has not trained."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def is_saveable(trainer: Trainer) -> bool:
    """Whether every training loader knows where it stands."""
    ahead = num_batches_ahead(trainer)
    return all(loader.is_saveable(ahead) for loader in train_loaders(trainer))


def step_counter(trainer: Trainer) -> Callable[[], int]:
    """What `global_step` counts, without most of the properties on the way to it: they take longer than a cut may.

    Good while the same module is trained; it may change between automatic and manual optimization.
    """
    epoch_loop, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
    automatic = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    manual = epoch_loop.manual_optimization.optim_step_progress.total
    return lambda: (automatic if module.automatic_optimization else manual).completed


def sigterm_owner(trainer: Trainer) -> Any:
    """The object whose `received_sigterm` the trainer's is: the properties on the way to it take their time."""
    return trainer._signal_connector


def batch_in_epoch(trainer: Trainer) -> int:
    """Batches of the current epoch that were trained; 0 between epochs."""
    fit_loop = trainer.fit_loop
    if is_between_epochs({"fit_loop": {"epoch_progress": fit_loop.epoch_progress.state_dict()}}):
        return 0
    return int(fit_loop.epoch_loop.batch_progress.current.ready)


def is_between_epochs(loops_state: Mapping[str, Any]) -> bool:
    """Whether a saved loop state lies between two epochs: no epoch has begun that has not ended."""
    current = loops_state["fit_loop"]["epoch_progress"]["current"]
    return bool(current["ready"] == current["processed"])


def is_lazy(trainer: Trainer) -> bool:
    """Whether the module has parameters without a shape: there is nothing to save before the first forward pass."""
    return any(torch.nn.parameter.is_lazy(p) for p in trainer.lightning_module.parameters())


def is_inside_window(trainer: Trainer) -> bool:
    """Whether gradients are gathered that no optimizer step has used yet (automatic optimization)."""
    fit_loop = trainer.fit_loop
    started = fit_loop.epoch_loop.batch_progress.current.ready > 0
    return bool(
        trainer.lightning_module.automatic_optimization and started and fit_loop.epoch_loop._should_accumulate()
    )


def stops_inside_epoch(trainer: Trainer) -> bool:
    """Whether the epoch loop has ended short of the epoch's last batch: a step limit, or an early stop."""
    return not trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def drop_loader_state(checkpoint: Mapping[str, Any]) -> None:
    """Removes the loader states that Lightning put into its loop state: they are rank 0's; every rank keeps its own."""
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)


def stop_restarting(trainer: Trainer) -> None:
    """Lets the loops go on as if they had never stopped: at the cut nothing is half done.

    While `restarting` is set, Lightning skips validation that is due, counts a step twice and leaves plateau
    schedulers alone at the end of the epoch.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    for loop in (
        trainer.fit_loop,
        epoch_loop,
        epoch_loop.val_loop,
        epoch_loop.automatic_optimization,
        epoch_loop.manual_optimization,
    ):
        loop._restarting = False
        loop.reset_restart_stage()


def begin_pass(trainer: Trainer, combined_state: Mapping[str, Any] | None) -> None:
    """Makes the fetcher ask its (resumed) loaders for iterators again, and puts it where it stood."""
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None:
        raise RuntimeError("training has no data fetcher yet")
    iter(fetcher)
    fetcher.fetched += trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if combined_state is not None:
        iterator = fetcher.combined_loader._iterator
        iterator._idx = combined_state["index"] + num_batches_ahead(trainer)  # type: ignore[union-attr]
        if combined_state["consumed"] is not None:
            now = iterator._consumed  # type: ignore[union-attr]
            iterator._consumed = [a or b for a, b in zip(combined_state["consumed"], now, strict=True)]  # type: ignore[union-attr]


def combined_mode(trainer: Trainer) -> str | None:
    """How several training loaders take turns; None where there is one."""
    combined = trainer.fit_loop._combined_loader
    return combined._mode if combined is not None and len(combined.flattened) > 1 else None


def combined_state(trainer: Trainer) -> dict[str, Any]:
    """Where the combined loader stands in its round."""
    combined = trainer.fit_loop._combined_loader
    iterator = combined._iterator if combined is not None else None
    consumed = getattr(iterator, "_consumed", None)
    return {
        "index": getattr(iterator, "_idx", 0) - num_batches_ahead(trainer),
        "consumed": None if consumed is None else list(consumed),
    }


def follow_passes(trainer: Trainer) -> None:
    """Tells the wrapped loaders which of their passes are trained from: a callback may have looked into them since."""
    combined = trainer.fit_loop._combined_loader
    if combined is None or combined._iterator is None:
        return
    for loader, iterator in zip(combined.flattened, combined._iterator.iterators, strict=False):
        if type(loader) is ResumableLoader:
            loader.follow(iterator)


def is_fetched_ahead(trainer: Trainer) -> bool:
    """Whether each batch is fetched before the one before it is trained, as Lightning does without a length."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and fetcher.length is None and not isinstance(fetcher, _DataLoaderIterDataFetcher)


_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")  # distributed samplers and worker processes are seeded from these


def capture_seeds() -> dict[str, str]:
    """What `seed_everything` left in the environment."""
    return {name: os.environ[name] for name in _SEEDS if name in os.environ}


def restore_seeds(seeds: Mapping[str, str]) -> None:
    """Puts back what `capture_seeds` returned; has to come before Lightning sets loaders up."""
    for name in _SEEDS:
        os.environ.pop(name, None)
    os.environ.update({name: seeds[name] for name in _SEEDS if name in seeds})  # and nothing else


def capture_extras(trainer: Trainer) -> dict[str, Any]:
    """What the loops and the trainer forget, as plain values."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    return {
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "batches_that_stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "ddp_syncs_buffers": getattr(trainer.model, "require_forward_param_sync", None),
        "should_stop": trainer.should_stop and not _is_out_of_time(trainer),
        "last_train_dl_reload_epoch": trainer.fit_loop._last_train_dl_reload_epoch,
        "last_val_dl_reload_epoch": val_loop._last_val_dl_reload_epoch,
        "seen_val_batches": dict(val_loop._seen_batches_per_dataloader),
        "has_val_loaders": val_loop._combined_loader is not None,
    }


def _is_out_of_time(trainer: Trainer) -> bool:
    """Whether a Timer stopped training: it decides anew in each process, perhaps with more time."""
    remaining = [c.time_remaining() for c in callbacks(trainer) if isinstance(c, Timer)]
    return any(seconds is not None and seconds <= 0 for seconds in remaining)


def restore_extras(trainer: Trainer, extras: Mapping[str, Any]) -> None:
    """Puts back what `capture_extras` returned; sets validation up where it was set up."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    trainer.accumulate_grad_batches = extras["accumulate_grad_batches"]
    if isinstance(trainer.model, DistributedDataParallel) and extras["ddp_syncs_buffers"] is not None:
        # A new one would overwrite each rank's buffers by rank 0's in its first forward pass.
        trainer.model.require_forward_param_sync = extras["ddp_syncs_buffers"]
    trainer.fit_loop.epoch_loop._batches_that_stepped = extras["batches_that_stepped"]
    trainer.fit_loop._last_train_dl_reload_epoch = extras["last_train_dl_reload_epoch"]
    if extras["has_val_loaders"] and val_loop._combined_loader is None:
        trainer.validating = True
        val_loop.setup_data()
        trainer.training = True
    val_loop._last_val_dl_reload_epoch = extras["last_val_dl_reload_epoch"]
    val_loop._seen_batches_per_dataloader.clear()
    val_loop._seen_batches_per_dataloader.update(extras["seen_val_batches"])


_PROGRESS = ("epoch_loop.batch_progress", "epoch_loop.automatic_optimization.optim_progress")


def capture_progress(trainer: Trainer) -> list[dict[str, Any]]:
    """The counters that a step moves before its optimizer step, as they stand in Lightning's checkpoint."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return [epoch_loop.batch_progress.state_dict(), epoch_loop.automatic_optimization.optim_progress.state_dict()]


def put_progress(checkpoint: Mapping[str, Any], progress: list[dict[str, Any]]) -> None:
    """Puts what `capture_progress` returned into a checkpoint."""
    fit_loop = checkpoint["loops"]["fit_loop"]
    for name, state in zip(_PROGRESS, progress, strict=True):
        if fit_loop[name].keys() != state.keys():
            raise RuntimeError(f"the checkpoint's {name} is not what it was")
        fit_loop[name] = state
