"""Checkpoints of another model, optimizer or scheduler: refused by name, before the first batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import NotedToy, loader, make_trainer, plugin, refused, save_some
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from toy import step_dir

from lightning_resume import ModelMismatchError, StateMismatchError, read_checkpoint


class Wide(NotedToy):
    """Two layers of equal shapes, so that their optimizer states could be swapped without an error."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Dropout(0.5))


class Extra(Wide):
    """One layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)


class Fewer(Wide):
    """One layer less."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Identity(), nn.Dropout(0.5))


class Broad(Wide):
    """A layer of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1), nn.Dropout(0.5))


class Double(Wide):
    """The same layers in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


class TwoOptimizers(Wide):
    """An optimizer more than `Wide` has."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.parameters(), lr=1e-2), torch.optim.SGD(self.parameters(), lr=1e-2)]


@pytest.mark.parametrize(
    ("module", "missing", "unexpected", "mismatched"),
    [
        (Extra, ("more.weight", "more.bias"), (), ()),
        (Fewer, (), ("net.1.weight", "net.1.bias"), ()),
        (Broad, (), (), ("net.0.weight", "net.0.bias", "net.1.weight")),
        (Double, (), (), ("net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias")),
    ],
)
def test_another_model_is_refused(
    module: Callable[[], LightningModule],
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
    mismatched: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """Missing, extra, differently shaped or typed keys are named, and no weight is changed."""
    save_some(tmp_path / "ck", Wide())

    error = refused(module(), step_dir(tmp_path / "ck", 4), tmp_path, ModelMismatchError)

    assert (error.missing, error.unexpected, tuple(error.mismatched)) == (missing, unexpected, mismatched)
    assert all(name in str(error) for name in (*missing, *unexpected, *mismatched))


OTHER_OPTIMIZERS: dict[str, tuple[Callable[[], LightningModule], str, Any, Any]] = {
    "another class": (lambda: Wide(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)), "class", "Adam", "AdamW"),
    "without its state": (lambda: Wide(optimizer=lambda p: torch.optim.SGD(p, lr=1e-2)), "class", "Adam", "SGD"),
    "fewer parameters": (
        lambda: Wide(optimizer=lambda p: torch.optim.Adam(list(p)[:-1], lr=1e-2)),
        "parameters",
        "net.1.bias at place 3",
        "none at place 3",
    ),
    "one optimizer more": (TwoOptimizers, "number of optimizers", 1, 2),
    "one scheduler more": (
        lambda: Wide(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)),
        "number of schedulers",
        0,
        1,
    ),
}


@pytest.mark.parametrize("case", OTHER_OPTIMIZERS)
def test_other_optimizers_are_refused(case: str, tmp_path: Path) -> None:
    """Optimizer state is matched by position: another optimizer would get it without a word. Nothing is trained."""
    make, field, saved, current = OTHER_OPTIMIZERS[case]
    save_some(tmp_path / "ck", Wide())
    module = make()

    with pytest.raises(StateMismatchError, match=field) as caught:
        make_trainer(tmp_path, plugin(tmp_path / "new")).fit(module, loader(), ckpt_path=step_dir(tmp_path / "ck", 4))

    assert (caught.value.saved, caught.value.current) == (saved, current)
    assert module.rows == []


@pytest.mark.parametrize(
    ("case", "remedy"), [("another class", "load_module()"), ("fewer parameters", "requires_grad")]
)
def test_the_refusal_of_another_optimizer_says_what_to_do(case: str, remedy: str, tmp_path: Path) -> None:
    """In a sentence: the last line is a remedy, also for a layer that was frozen since."""
    save_some(tmp_path / "ck", Wide())

    module = OTHER_OPTIMIZERS[case][0]()

    with pytest.raises(StateMismatchError) as caught:
        make_trainer(tmp_path, plugin(tmp_path / "new")).fit(module, loader(), ckpt_path=step_dir(tmp_path / "ck", 4))

    headline, *_, last = str(caught.value).splitlines()
    verb = {"another class": "class of optimizer 0 differs", "fewer parameters": "parameters of optimizer 0 differ"}
    assert headline == f"cannot resume exactly: {verb[case]}"
    assert remedy in last


def test_reordered_parameters_get_their_own_state_back(tmp_path: Path) -> None:
    """Handed over in another order, each parameter finds its moments by its name, and the verdict says so."""
    save_some(tmp_path / "ck", Wide())
    saved = read_checkpoint(step_dir(tmp_path / "ck", 4))["optimizer_states"][0]["state"]
    module = Wide(optimizer=lambda p: torch.optim.Adam(list(p)[::-1], lr=1e-2))
    states: dict[str, torch.Tensor] = {}

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            names = {id(p): name for name, p in pl_module.named_parameters()}
            states.update({names[id(p)]: s["exp_avg"].clone() for p, s in trainer.optimizers[0].state.items()})

    trainer = make_trainer(tmp_path, Look(), plugin(tmp_path / "new"))
    trainer.fit(module, loader(), ckpt_path=step_dir(tmp_path / "ck", 4))

    names = [name for name, _ in module.named_parameters()]
    assert sorted(states) == sorted(names)
    assert all(torch.equal(states[name], saved[place]["exp_avg"]) for place, name in enumerate(names))
    assert module.rows != []


def test_reordered_parameters_of_one_vector_are_refused(tmp_path: Path) -> None:
    """LBFGS keeps one vector over all parameters: it cannot be dealt out anew."""
    save_some(tmp_path / "ck", Wide(optimizer=lambda p: torch.optim.LBFGS(p, max_iter=2)))
    module = Wide(optimizer=lambda p: torch.optim.LBFGS(list(p)[::-1], max_iter=2))

    with pytest.raises(StateMismatchError, match="parameters of optimizer 0") as caught:
        make_trainer(tmp_path, plugin(tmp_path / "new")).fit(module, loader(), ckpt_path=step_dir(tmp_path / "ck", 4))

    assert (caught.value.saved, caught.value.current) == ("net.0.weight at place 0", "net.1.bias at place 0")


def test_another_scheduler_is_refused(tmp_path: Path) -> None:
    """A scheduler of another class would take the saved one's counters. Nothing is trained."""
    schedulers = torch.optim.lr_scheduler
    save_some(tmp_path / "ck", NotedToy(scheduler=lambda optimizer: schedulers.StepLR(optimizer, 1)))
    module = NotedToy(scheduler=lambda optimizer: schedulers.ExponentialLR(optimizer, 0.5))

    with pytest.raises(StateMismatchError, match="scheduler") as caught:
        make_trainer(tmp_path, plugin(tmp_path / "new")).fit(module, loader(), ckpt_path=step_dir(tmp_path / "ck", 4))

    assert (caught.value.saved, caught.value.current) == (["StepLR"], ["ExponentialLR"])
    assert module.rows == []
