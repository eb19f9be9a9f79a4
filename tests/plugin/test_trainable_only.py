"""`trainable_only`: frozen parameters are left out of the checkpoints, and never silently other ones at a resume."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import Stop, StopAfter, copies, loader, make_trainer, plugin, same_state
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor, nn
from toy import saved_steps, step_dir

from lightning_resume import (
    MissingStateError,
    ModelMismatchError,
    StateMismatchError,
    UnsupportedSetupError,
    UnsupportedStateError,
    load_module,
    read_checkpoint,
)
from lightning_resume.plugin.frozen import FrozenParameters


class Adapted(LightningModule):
    """A frozen layer whose value follows from a number, a trained pair beside it, dropout and batch norm."""

    def __init__(self, base: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.base = nn.Linear(1, 8)
        nn.init.constant_(self.base.weight, base)
        nn.init.constant_(self.base.bias, base)
        self.base.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.adapter = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Dropout(), nn.Linear(2, 1, bias=False))
        self.losses: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.adapter(self.norm(self.base(batch))).pow(2).mean()
        self.losses.append(loss.item().hex())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class ChangeBase(Callback):
    """Changes a frozen weight in a way that moves no version counter."""

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.at_step:
            pl_module.base.weight.data.numpy()[0] += 1


def fit(module: LightningModule, folder: Path, *callbacks: Callback, resume: bool = False, **keywords: Any) -> Trainer:
    trainer = make_trainer(folder, *callbacks, plugin(folder / "ck", **{"trainable_only": True, **keywords}))
    torch.manual_seed(999 if resume else 1)
    trainer.fit(module, loader(), ckpt_path="last" if resume else None)
    return trainer


def whole_and_resumed(folder: Path, **keywords: Any) -> tuple[Adapted, Adapted, Adapted]:
    """An uninterrupted run; one that stops after 5 batches; what goes on from there."""
    torch.manual_seed(0)
    whole, stopped = Adapted(), Adapted()
    stopped.load_state_dict(whole.state_dict())
    fit(whole, folder / "whole")
    with pytest.raises(Stop):
        fit(stopped, folder, StopAfter(5))
    resumed = Adapted()
    fit(resumed, folder, resume=True, **keywords)
    return whole, stopped, resumed


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_is_resumed_exactly_without_its_frozen_parameters(async_save: bool, tmp_path: Path) -> None:
    """PAR-01: trained weights, buffers and losses are those of the uninterrupted run; the base is not on disk."""
    whole, _, resumed = whole_and_resumed(tmp_path, async_save=async_save)

    assert same_state(copies(resumed), copies(whole))
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert 0 < len(resumed.losses) < len(whole.losses)
    saved = read_checkpoint(step_dir(tmp_path / "ck", 16))["state_dict"]
    assert [name for name in saved if name.startswith("base.")] == []
    assert {"norm.running_mean", "adapter.0.weight", "adapter.2.weight"} <= saved.keys()


@pytest.mark.parametrize("before", [True, False])
def test_the_setting_may_change_at_a_resume(before: bool, tmp_path: Path) -> None:
    """What was left out is written again, and the other way round; the run is the same."""
    torch.manual_seed(0)
    whole, stopped, resumed = Adapted(), Adapted(), Adapted()
    stopped.load_state_dict(whole.state_dict())
    fit(whole, tmp_path / "whole")
    with pytest.raises(Stop):
        fit(stopped, tmp_path, StopAfter(5), trainable_only=before)

    fit(resumed, tmp_path, resume=True, trainable_only=not before)

    saved = read_checkpoint(step_dir(tmp_path / "ck", 16))["state_dict"]
    assert same_state(copies(resumed), copies(whole))
    assert ("base.weight" in saved) == before


def test_another_frozen_weight_is_refused(tmp_path: Path) -> None:
    """A base that was built otherwise: refused by name with both digests, before anything is restored."""
    with pytest.raises(Stop):
        fit(Adapted(), tmp_path, StopAfter(5))
    other = Adapted(base=0.25)
    before = copies(other)

    with pytest.raises(StateMismatchError, match=r"base\.weight") as caught:
        fit(other, tmp_path, resume=True)

    assert caught.value.saved != caught.value.current
    assert same_state(copies(other), before)
    assert other.losses == []


def test_a_model_without_the_frozen_parameter_is_refused(tmp_path: Path) -> None:
    """What was left out has to be there."""
    with pytest.raises(Stop):
        fit(Adapted(), tmp_path, StopAfter(5))
    other = Adapted()
    other.base = nn.Linear(1, 8, bias=False).requires_grad_(False)
    nn.init.constant_(other.base.weight, 0.5)

    with pytest.raises(MissingStateError, match=r"base\.bias"):
        fit(other, tmp_path, resume=True)


def test_an_unknown_key_is_still_an_error(tmp_path: Path) -> None:
    """PAR-01: only frozen parameters may be absent."""
    with pytest.raises(Stop):
        fit(Adapted(), tmp_path, StopAfter(5))
    other = Adapted()
    other.head = nn.Linear(1, 1)

    with pytest.raises(ModelMismatchError) as caught:
        fit(other, tmp_path, resume=True)

    assert caught.value.missing == ("head.weight", "head.bias")


@pytest.mark.parametrize("async_save", [True, False])
def test_a_frozen_weight_that_is_changed_is_never_left_out(async_save: bool, tmp_path: Path) -> None:
    """A change that no version counter shows: no checkpoint pretends that the weight is as it was built."""
    with (
        pytest.warns(UserWarning, match=r"FAILED.*\n.*state_dict\.base\.weight"),
        pytest.raises(UnsupportedStateError, match="it is frozen, but was changed"),
    ):
        fit(Adapted(), tmp_path, ChangeBase(4), async_save=async_save)

    steps = sorted(int(path.name[5:]) for path in (tmp_path / "ck").glob("step-*"))
    assert steps[0] == 0
    assert steps[-1] <= 4


class Unfreeze(Callback):
    """Trains the base from the second epoch on, and freezes it again in the third."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.base.requires_grad_(trainer.current_epoch == 1)


class AllOptimized(Adapted):
    """Its optimizer knows the base as well, whose gradients no batch norm takes away."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_a_parameter_that_was_trained_is_written_from_then_on(tmp_path: Path) -> None:
    """Frozen, trained, frozen again: its value is no longer the one that it is built with."""
    trainer = make_trainer(tmp_path, Unfreeze(), plugin(tmp_path / "ck", trainable_only=True), max_epochs=3)

    trainer.fit(AllOptimized(), loader())

    has_base = ["base.weight" in read_checkpoint(step_dir(tmp_path / "ck", step))["state_dict"] for step in (7, 10, 24)]
    assert has_base == [False, True, True]


def test_a_parameter_that_is_trained_right_after_a_save_does_not_spoil_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that a save in flight has left out are not trained before it has looked at them."""
    real = FrozenParameters.require_unchanged

    def late(self: FrozenParameters, module: LightningModule) -> None:
        time.sleep(0.2)
        real(self, module)

    monkeypatch.setattr(FrozenParameters, "require_unchanged", late)
    saving = plugin(tmp_path / "ck", trainable_only=True, every_n_train_steps=7)
    trainer = make_trainer(tmp_path, Unfreeze(), saving, max_epochs=2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(AllOptimized(), loader())

    assert [str(warning.message) for warning in caught if "FAILED" in str(warning.message)] == []
    assert saved_steps(tmp_path / "ck") == [0, 7, 14, 16]


def test_validation_and_loading_put_the_frozen_parameters_in(tmp_path: Path) -> None:
    """ENV-07: `load_module` gives the whole model, and refuses one that is built otherwise."""
    module = Adapted(base=0.75)
    fit(module, tmp_path)
    path = step_dir(tmp_path / "ck", 16)

    loaded = load_module(Adapted, path)

    assert same_state(copies(loaded), copies(module))
    with pytest.raises(StateMismatchError, match=r"base\.weight"):
        load_module(Adapted, path, base=0.5)


class Pretrained(LightningModule):
    """A frozen layer that is built from random numbers; its user loads the pretrained weights afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(1, 1).requires_grad_(False)
        self.adapter = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.adapter(self.base(batch)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.adapter.parameters(), lr=1e-2)


def test_loading_a_module_whose_frozen_weights_it_cannot_build_says_how_to(tmp_path: Path) -> None:
    """It is `load_module` that builds the module: the error says what else to do, and that is enough."""
    module = Pretrained()
    fit(module, tmp_path)
    path = step_dir(tmp_path / "ck", 16)

    with pytest.raises(StateMismatchError, match=r"base\.weight") as caught:
        load_module(Pretrained, path)
    mine = Pretrained()
    mine.base.load_state_dict(module.base.state_dict())
    mine.load_state_dict(read_checkpoint(path)["state_dict"], strict=False)

    headline, *_, last = str(caught.value).splitlines()
    assert headline == f"cannot load Pretrained from {str(path)!r}: the frozen parameter 'base.weight' differs"
    assert "Let Pretrained.__init__ load them" in last
    assert f"module.load_state_dict(read_checkpoint({str(path)!r})['state_dict'], strict=False)" in last
    assert same_state(copies(mine), copies(module))


def test_what_keeps_weights_of_its_own_is_refused(tmp_path: Path) -> None:
    """Averaged weights and converted ones are not those that the model is built with."""
    with pytest.raises(UnsupportedSetupError, match="trainable_only with WeightAveraging"):
        fit(Adapted(), tmp_path, WeightAveraging())
    trainer = make_trainer(tmp_path, plugin(tmp_path / "ck", trainable_only=True), precision="64-true")
    with pytest.raises(UnsupportedSetupError, match="trainable_only with precision='64-true'"):
        trainer.fit(Adapted(), loader())
