"""`load_module`: what `LightningModule.load_from_checkpoint` does, for checkpoint directories."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.saving import _load_state

from lightning_resume.format.checkpoint import read_checkpoint

M = TypeVar("M", LightningModule, LightningDataModule)


def load_module(cls: type[M], path: str | os.PathLike[str], *, strict: bool | None = None, **kwargs: Any) -> M:
    """Builds a module from a checkpoint directory: its saved hyper-parameters, then its weights.

    Lightning's own `load_from_checkpoint` opens its path as one file, and unpickles it. The optimizer's files are not
    read. Weights are on the CPU.

    Args:
        cls: the class of the module or data module.
        path: a checkpoint directory, full or model-only.
        strict: whether the keys have to match; default: the module's `strict_loading`.
        **kwargs: constructor arguments; they win over saved hyper-parameters.

    Raises:
        CheckpointError: nothing whole is there; the subclass tells what is wrong.
    """
    checkpoint = read_checkpoint(path, exclude={"optimizer_states"})
    checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(kwargs)
    options: dict[str, Any] = {"strict": strict} if issubclass(cls, LightningModule) else {}
    module: Any = _load_state(cls, checkpoint, **options, **kwargs)
    return module  # type: ignore[no-any-return]
