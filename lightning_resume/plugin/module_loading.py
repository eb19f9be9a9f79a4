"""`load_module`: what `LightningModule.load_from_checkpoint` does, for checkpoint directories."""

from __future__ import annotations

import os
import warnings
from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.saving import _load_state

from lightning_resume.format.checkpoint import read_checkpoint
from lightning_resume.plugin import frozen

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
        StateMismatchError: it was saved with `trainable_only`, and the module was built with other frozen weights.
    """
    checkpoint = read_checkpoint(path, exclude={"optimizer_states"})
    checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(kwargs)
    if not issubclass(cls, LightningModule):
        return _build(cls, checkpoint, kwargs)
    if not checkpoint.get(frozen.KEY):
        return _build(cls, checkpoint, {"strict": strict, **kwargs})
    with warnings.catch_warnings():  # of missing keys, which are added below
        warnings.simplefilter("ignore")
        module = _build(cls, checkpoint, {"strict": False, **kwargs})
    name, where = type(module).__name__, os.fspath(path)
    remedy = (
        f"frozen weights are not in the checkpoint. Let {name}.__init__ load them, which load_module() calls; or build "
        f"the module yourself, with its frozen weights, and then call "
        f"module.load_state_dict(read_checkpoint({where!r})['state_dict'], strict=False)."
    )
    frozen.complete(module, path, checkpoint, cannot=f"load {name} from {where!r}", remedy=remedy)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading if strict is None else strict)
    return module


def _build(cls: type[M], checkpoint: dict[str, Any], options: dict[str, Any]) -> M:
    module: Any = _load_state(cls, checkpoint, **options)
    return module  # type: ignore[no-any-return]
