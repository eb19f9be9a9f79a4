"""Refusals: setups that cannot be exact, and checkpoints that are not this run's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_resume.catalog import step_checkpoints
from lightning_resume.errors import FolderLockedError, ModelMismatchError, UnsupportedSetupError, WeightsOnlyError
from lightning_resume.lock import FolderLock
from lightning_resume.plugin import loops
from lightning_resume.plugin.checkpoint_io import AtomicCheckpointIO
from lightning_resume.plugin.ranks import decide


def check_folder(dirpath: str) -> None:
    """Makes the folder, and refuses one that is a file or cannot be written.

    Raises:
        UnsupportedSetupError: names the folder and the reason.
    """
    try:
        os.makedirs(dirpath, exist_ok=True)
    except OSError as error:
        raise UnsupportedSetupError(f"dirpath={dirpath!r}", str(error), "Pass a folder that can be made.") from error
    if not os.access(dirpath, os.W_OK | os.X_OK):
        raise UnsupportedSetupError(
            f"dirpath={dirpath!r}", "the folder cannot be written", "Pass a folder that this user may write to."
        )


def take_folder(trainer: Trainer, dirpath: str) -> FolderLock | None:
    """Makes this run the folder's only writer. All ranks must call.

    Returns:
        The lock, on rank 0; None elsewhere.

    Raises:
        FolderLockedError: another process, or another Trainer of this one, writes there; on every rank.
    """
    lock, refusal = None, None
    if trainer.is_global_zero:
        lock = FolderLock(dirpath)
        try:
            lock.acquire()
        except FolderLockedError as error:
            refusal = error
    refusal = decide(trainer, refusal)
    if refusal is not None:
        raise refusal
    return lock


def check_unused(folder: str, run_id: str | None) -> None:
    """Refuses to start from scratch in a folder that holds another run's checkpoints.

    Raises:
        UnsupportedSetupError: names the folder and its newest checkpoint.
    """
    newest = step_checkpoints(folder)[-1:]
    if newest and newest[0].run_id != run_id:
        raise UnsupportedSetupError(
            f"dirpath={folder!r}",
            f"training would start from scratch, but it holds checkpoints of another run ({newest[0].path.name})",
            'Go on with that run by fit(ckpt_path="last"), or pass another dirpath.',
        )


def check_loader(loader: object) -> None:
    """Refuses a training loader that cannot be entered again: in no fixed order, or used up by one pass.

    Raises:
        UnsupportedSetupError: names the loader or its setting.
    """
    if isinstance(loader, Iterator):
        raise UnsupportedSetupError(
            f"the training loader {loader!r}",
            "an iterator can be read once, from where it stands; there is no way back to a position",
            "Pass an object whose __iter__ begins anew each time: a DataLoader, a list, a class of your own.",
        )
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise UnsupportedSetupError(
            "DataLoader(in_order=False)", "which batch comes next depends on how fast its workers are", "Leave it out."
        )


def check_setup(trainer: Trainer) -> None:
    """Refuses strategies, plugins and callbacks under which the state is not where this package looks for it.

    Raises:
        UnsupportedSetupError: names the strategy, plugin or callback.
    """
    if any(isinstance(callback, ModelPruning) for callback in loops.callbacks(trainer)):
        raise UnsupportedSetupError(
            "the callback ModelPruning", "its masks are in no checkpoint: pruned weights would grow again", "Remove it."
        )
    strategy = trainer.strategy
    if type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise UnsupportedSetupError(
            f"strategy {type(strategy).__name__}",
            "its state is sharded or lives elsewhere",
            "Use a single device or strategy='ddp'.",
        )
    if type(strategy.checkpoint_io) not in (TorchCheckpointIO, AtomicCheckpointIO):
        raise UnsupportedSetupError(
            f"the plugin {type(strategy.checkpoint_io).__name__}",
            "AtomicResumeCallback brings a CheckpointIO of its own",
            "Remove it from Trainer(plugins=...).",
        )


def check_full(path: str, checkpoint: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that holds the model alone.

    Raises:
        WeightsOnlyError: names the path.
    """
    if "optimizer_states" not in checkpoint:
        raise WeightsOnlyError(path)


def check_model(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Refuses, before anything is restored, a checkpoint that `fit` cannot go on from.

    Raises:
        ModelMismatchError: keys are missing, left over, or of another shape or dtype.
    """
    module = trainer.lightning_module
    saved = checkpoint.get("current_model_state", checkpoint["state_dict"])
    current = module.state_dict()
    # Under these the module has its own dtype only later. A changed precision is refused, or allowed, as such.
    saved_precision = checkpoint.get("rank_state", {}).get("identity", {}).get("precision", trainer.precision)
    is_same_precision = saved_precision == trainer.precision
    is_converted = not is_same_precision or trainer.precision not in ("32-true", "16-mixed", "bf16-mixed")
    differing: dict[str, tuple[object, object]] = {}
    for name, value in current.items():
        sides = _describe(saved.get(name), is_converted), _describe(value, is_converted)
        if name in saved and not name.endswith("_extra_state") and sides[0] != sides[1]:
            differing[name] = sides
    strict = module.strict_loading
    missing = [name for name in current if name not in saved] if strict else []
    unexpected = [name for name in saved if name not in current] if strict else []
    if missing or unexpected or differing:
        raise ModelMismatchError(missing, unexpected, differing)


def _describe(value: Any, without_dtype: bool) -> object:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return tuple(value.shape) if without_dtype else f"{tuple(value.shape)} {value.dtype}"


def check_dump(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose weights a save hook has replaced: a resume would train others (ModelPruning does so).

    A module with `strict_loading=False` may leave keys out.

    Raises:
        UnsupportedSetupError: names the first key.
    """
    module = trainer.lightning_module
    saved = checkpoint.get("current_model_state", checkpoint["state_dict"])
    for name, value in module.state_dict().items():
        if not module.strict_loading and name not in saved:
            continue
        kept = saved.get(name)
        is_kept = kept.data_ptr() == value.data_ptr() if isinstance(value, torch.Tensor) and kept is not None else True
        if name not in saved or not is_kept:
            raise UnsupportedSetupError(
                "a save hook that replaces weights",
                f"{name!r} in the checkpoint is not the module's own",
                "Leave checkpoint['state_dict'] alone in on_save_checkpoint; ModelPruning does not.",
            )
