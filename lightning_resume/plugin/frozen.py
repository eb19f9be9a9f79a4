"""`trainable_only`: frozen parameters are left out of a checkpoint, and vouched for by their digests.

A parameter may be left out while it has the value that the user's own code built it with: a resume builds it again, and
compares. One that was trained before it was frozen has another value, and is written like any other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_resume.errors import MissingStateError, StateMismatchError, UnsupportedSetupError, UnsupportedStateError
from lightning_resume.format.tensors import bytes_of
from lightning_resume.plugin.loops import callbacks

KEY = "frozen_parameters"
"""Key of a checkpoint: name → sha256 of each parameter that was left out."""


class FrozenParameters:
    """Which parameters may be left out, and what they were when training began."""

    def __init__(self) -> None:
        """Knows of none."""
        self._digests: dict[str, str] = {}
        self._parameters: list[torch.Tensor] = []

    @property
    def are_thawing(self) -> bool:
        """Whether a parameter that was left out of the last save is trained now."""
        return any(parameter.requires_grad for parameter in self._parameters)

    def begin(self, module: LightningModule) -> None:
        """Training begins: all that is frozen has the value it was built with. Takes a second for each GB."""
        self._digests = {name: digest_of(value) for name, value in _frozen(module).items()}

    def resume(self, module: LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """Before weights are restored: what is frozen and was built as it was saved may be left out again."""
        saved = checkpoint["state_dict"]
        self._digests = {
            name: digest_of(value)
            for name, value in _frozen(module).items()
            if isinstance(saved.get(name), torch.Tensor) and digest_of(saved[name]) == digest_of(value)
        }

    def leave_out(self, module: LightningModule, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """A new checkpoint without what may be left out, and with its digests instead."""
        frozen = _frozen(module)
        self._digests = {name: digest for name, digest in self._digests.items() if name in frozen}
        self._parameters = [frozen[name] for name in self._digests]
        kept = {name: value for name, value in checkpoint["state_dict"].items() if name not in self._digests}
        return {**checkpoint, "state_dict": kept, KEY: dict(self._digests)}

    def require_unchanged(self, module: LightningModule) -> None:
        """Looks at every byte of what was left out; any thread may call it.

        Raises:
            UnsupportedStateError: a frozen parameter has another value than when training began.
        """
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, digest in self._digests.items():
            if digest_of(parameters[name]) != digest:
                raise UnsupportedStateError(
                    f"state_dict.{name}",
                    "it is frozen, but was changed since training began, so that it cannot be left out",
                    "Set requires_grad while it changes, or pass trainable_only=False.",
                )


def complete(
    module: LightningModule,
    path: str | os.PathLike[str],
    checkpoint: dict[str, Any],
    *,
    cannot: str = "resume exactly",
    remedy: str = "build the model with the same frozen weights.",
) -> None:
    """Adds to a checkpoint what was left out of it, from a module that was built anew; changes nothing on a refusal.

    Args:
        module: as the user built it.
        path: of the checkpoint, for messages.
        checkpoint: as it was read.
        cannot: what is refused otherwise, for messages.
        remedy: what helps then, for messages.

    Raises:
        MissingStateError: the module has no such parameter.
        StateMismatchError: the module's parameter is another one.
    """
    digests = checkpoint.get(KEY, {})
    live = module.state_dict(keep_vars=True)
    for name, saved in digests.items():
        if name not in live:
            raise MissingStateError(
                f"value of the frozen parameter {name!r} in {os.fspath(path)!r}",
                f"It was saved with trainable_only=True: {remedy}",
                cannot=cannot,
            )
        current = digest_of(live[name])
        if current != saved:
            raise StateMismatchError(
                f"the frozen parameter {name!r}",
                f"sha256 {saved}",
                f"sha256 {current}",
                f"It was saved with trainable_only=True: {remedy}",
                cannot=cannot,
            )
    checkpoint["state_dict"].update((name, live[name].detach()) for name in digests)


def check_setup(trainer: Trainer) -> None:
    """Refuses what changes parameters behind `requires_grad`, or their dtype after they were built.

    Raises:
        UnsupportedSetupError: names it.
    """
    remedy = "Leave out trainable_only."
    for callback in callbacks(trainer):
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            what = f"trainable_only with {type(callback).__name__}"
            raise UnsupportedSetupError(what, "it keeps weights of its own, frozen ones among them", remedy)
    if trainer.precision not in ("32-true", "16-mixed", "bf16-mixed"):
        what = f"trainable_only with precision={trainer.precision!r}"
        raise UnsupportedSetupError(what, "frozen weights are converted after they were built", remedy)


def frozen_names(module: LightningModule) -> list[str]:
    """Names of the parameters that are not trained now."""
    return list(_frozen(module))


def digest_of(tensor: torch.Tensor) -> str:
    """sha256 over dtype, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _frozen(module: LightningModule) -> dict[str, torch.Tensor]:
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}
