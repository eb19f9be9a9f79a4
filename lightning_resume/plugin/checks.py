"""Refusals: wrong arguments, setups that cannot be exact, checkpoints that are not this run's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_resume.errors import ModelMismatchError, UnsupportedSetupError, WeightsOnlyError, WorldSizeError
from lightning_resume.plugin.checkpoint_io import AtomicCheckpointIO
from lightning_resume.plugin.last import step_checkpoints

ALLOWED = (
    "data_changed",
    "batch_size_changed",
    "drop_last_changed",
    "sampler_changed",
)


def check_arguments(
    *, counts: Mapping[str, int | None], train_time_interval: timedelta | None, keep_last_k: int, max_shard_bytes: int,
    allow: tuple[str, ...],
) -> None:  # fmt: skip
    """Refuses constructor arguments that are wrong or contradict each other.

    Raises:
        TypeError: an argument of another type.
        ValueError: a value out of range, or an unknown word in `allow`.
    """
    for name, value in {**counts, "keep_last_k": keep_last_k, "max_shard_bytes": max_shard_bytes}.items():
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if train_time_interval is not None:
        if not isinstance(train_time_interval, timedelta):
            raise TypeError(f"train_time_interval must be a datetime.timedelta, got {train_time_interval!r}")
        if train_time_interval <= timedelta(0):
            raise ValueError(f"train_time_interval must be positive, got {train_time_interval}")
    for word in allow:
        if word not in ALLOWED:
            raise ValueError(f"allow knows no {word!r}; there are: {', '.join(ALLOWED)}")


def check_local(dirpath: str) -> None:
    """Refuses remote folders: rename and fsync mean nothing there."""
    if "://" in dirpath and not dirpath.startswith("file://"):
        raise UnsupportedSetupError(
            f"dirpath={dirpath!r}", "atomic renames and fsync need a local file system", "Pass a local dirpath."
        )


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


def check_unused(folder: str, run_id: str | None) -> None:
    """Refuses to start from scratch in a folder that holds another run's checkpoints.

    Raises:
        UnsupportedSetupError: names the folder and its newest checkpoint.
    """
    newest = step_checkpoints(folder)[-1:]
    if newest and newest[0].run_id != run_id:
        raise UnsupportedSetupError(
            f"dirpath={folder!r}",
            f"training would start from scratch, but the folder holds checkpoints of another run ({newest[0].path.name})",
            'Go on with that run by fit(ckpt_path="last"), or pass another dirpath.',
        )


def check_setup(trainer: Trainer) -> None:
    """Refuses strategies and plugins under which the state is not where this package looks for it.

    Raises:
        UnsupportedSetupError: names the strategy or plugin.
    """
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


def check_checkpoint(trainer: Trainer, path: str, checkpoint: Mapping[str, Any]) -> None:
    """Refuses, before anything is restored, a checkpoint that `fit` cannot go on from.

    Raises:
        WeightsOnlyError: it holds the model alone.
        ModelMismatchError: keys are missing, left over, or of another shape.
        WorldSizeError: another number of processes saved it.
    """
    if "optimizer_states" not in checkpoint:
        raise WeightsOnlyError(path)
    module = trainer.lightning_module
    saved = checkpoint.get("current_model_state", checkpoint["state_dict"])
    current = module.state_dict()
    shapes = {
        name: (tuple(saved[name].shape), tuple(value.shape))
        for name, value in current.items()
        if hasattr(value, "shape") and hasattr(saved.get(name), "shape") and saved[name].shape != value.shape
    }
    strict = module.strict_loading
    missing = [name for name in current if name not in saved] if strict else []
    unexpected = [name for name in saved if name not in current] if strict else []
    if missing or unexpected or shapes:
        raise ModelMismatchError(missing, unexpected, shapes)
    world_size = checkpoint.get("world_size")
    if world_size is not None and world_size != trainer.world_size:
        raise WorldSizeError(world_size, trainer.world_size)
