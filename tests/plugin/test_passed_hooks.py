"""Hooks of a step that Lightning passes over: only those in which nothing would be done, and only while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inprocess import NotedToy, loader, make_trainer, plugin
from lightning.pytorch.callbacks import Callback
from toy import saved_steps

from lightning_resume import AtomicResumeCallback

HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward")


def test_hooks_of_the_users_own_are_called(tmp_path: Path) -> None:
    """On the object, or in a subclass."""
    called: list[str] = []

    class Own(AtomicResumeCallback):
        def on_train_batch_start(self, *args: Any) -> None:
            super().on_train_batch_start(*args)
            called.append("in the class")

    callback = Own(tmp_path / "ck", every_n_train_steps=1)
    callback.on_after_backward = lambda *args: called.append("on the object")  # type: ignore[method-assign]
    make_trainer(tmp_path, callback, max_epochs=1).fit(NotedToy(), loader())

    assert called == ["in the class", "on the object"] * 8


def test_hooks_can_be_called_when_training_is_over(tmp_path: Path) -> None:
    """A callback is left as it was found."""
    callback = plugin(tmp_path / "ck")

    make_trainer(tmp_path, callback, max_epochs=1).fit(NotedToy(), loader())

    assert all(callable(getattr(callback, name)) for name in HOOKS)


class Outside(torch.optim.Optimizer):
    """Changes parameters in a way that neither autograd nor a look at its code tells, as an extension in C may."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            weights = parameter.detach().numpy()
            np.subtract(weights, 0.1 * parameter.grad.numpy(), out=weights)
        return loss


class Fails(Callback):
    """Between an optimizer step and the next cut."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            raise RuntimeError("no space left")


class Counting(AtomicResumeCallback):
    """A subclass with an end of a batch of its own."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)


@pytest.mark.parametrize("callback_class", [AtomicResumeCallback, Counting])
def test_a_remembered_cut_is_dropped_when_the_optimizer_steps(callback_class: Any, tmp_path: Path) -> None:
    """Also for a subclass: its weights would be of one step, and all else of the step before."""

    class Module(NotedToy):
        def configure_optimizers(self) -> Any:
            return Outside(self.parameters())

    callback = callback_class(tmp_path / "ck", every_n_train_steps=10**9)

    with pytest.raises(RuntimeError, match="no space left"):
        make_trainer(tmp_path, Fails(), callback, max_epochs=1).fit(Module(), loader())

    assert saved_steps(tmp_path / "ck") == [0]
