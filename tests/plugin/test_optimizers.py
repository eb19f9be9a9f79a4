"""Optimizers and gradient accumulation: a resumed run makes the steps that the killed one would have made."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from chain import kill_in_turn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, GradientAccumulationScheduler
from torch import Tensor, nn
from toy import Job, Toy, assert_same, emit, run, saved_steps, step_dir

from lightning_resume.format.verify import read_index

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=2, history_size=3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD without state": lambda p: torch.optim.SGD(p, lr=1e-2),
}


class EmitsOptimizerState(Callback):
    """Records the first parameter's optimizer state as it stands before each batch."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        state = trainer.optimizers[0].state.get(next(pl_module.parameters()), {})
        step = state.get("step", torch.tensor(0.0))
        emit(
            "state",
            step=float(step),
            dtype=str(step.dtype),
            dim=step.dim(),
            device=str(step.device),
            moments=[value.item().hex() for name, value in state.items() if name != "step"],
        )


class ManualToy(Toy):
    """Manual optimization: subclasses decide in `step` when to apply and when to clear gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.shift = nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters(), 1e-2), torch.optim.SGD(self.shift.parameters(), 1e-2, 0.9)]

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(self.shift(batch))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.apply_gradients(batch_idx)
        gradients = [None if p.grad is None else p.grad.flatten().tolist() for p in self.parameters()]
        self.row["gradients"] = [g and [value.hex() for value in g] for g in gradients]
        return loss

    def apply_gradients(self, batch_idx: int) -> None:
        raise NotImplementedError


class UnequalWindows(ManualToy):
    """The first optimizer steps after every batch, the second gathers the gradients of three."""

    def apply_gradients(self, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.step()
        first.zero_grad()
        if batch_idx % 3 == 2:
            second.step()
            second.zero_grad()


class ClearsLate(ManualToy):
    """Steps after every third batch, and clears the gradients of the window one batch later: they count twice."""

    def apply_gradients(self, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            for optimizer in self.optimizers():
                optimizer.step()
        elif batch_idx % 3 == 0:
            for optimizer in self.optimizers():
                optimizer.zero_grad()


class TwoSteps(ManualToy):
    """Both optimizers step after every batch: `global_step` grows by two."""

    def apply_gradients(self, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class Freezes(Toy):
    """Freezes its bias by hand in mid-training, and goes on in eval mode."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 4:
            self.net[0].bias.requires_grad_(False)
            self.net[1].eval()
        loss = super().training_step(batch, batch_idx)
        self.row["bias"] = "trained" if self.net[0].bias.requires_grad else "frozen"
        return loss


class Backboned(Toy):
    """A toy with a `backbone`, which `BackboneFinetuning` freezes at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(self.backbone(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 1e-2)


def index_of(folder: Path, step: int) -> tuple[int, int, int]:
    """(global_step, current_epoch, batch_in_epoch) as the index of a step's checkpoint has them."""
    index = read_index(step_dir(folder, step))
    return index.global_step, index.current_epoch, index.batch_in_epoch


def test_moments_and_step_count_come_back(tmp_path: Path) -> None:
    """OPT-01: before the first resumed batch Adam's step is 3 and its moments are those of the uninterrupted run."""
    job = Job(callbacks=lambda: [EmitsOptimizerState()], plugin={"every_n_train_steps": 3})
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=3)

    resumed = run(job, tmp_path / "work", resume=True)

    assert resumed.of("state")[0]["step"] == 3.0
    assert len(resumed.of("state")[0]["moments"]) == 2
    assert resumed.of("state") == baseline.of("state")[3:]
    assert resumed.batches == baseline.batches[3:]
    assert resumed.end == baseline.end


def test_a_fused_optimizer_keeps_its_kind_of_step(tmp_path: Path) -> None:
    """OPT-06, CPU part: fused AdamW's step stays a float32 scalar on its device (a GPU's step needs a GPU to test)."""
    job = Job(
        module=lambda: Toy(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)),
        callbacks=lambda: [EmitsOptimizerState()],
        plugin={"every_n_train_steps": 3},
    )
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=3)

    resumed = run(job, tmp_path / "work", resume=True)

    first = resumed.of("state")[0]
    assert (first["step"], first["dtype"], first["dim"], first["device"]) == (3.0, "torch.float32", 0, "cpu")
    assert resumed.of("state") == baseline.of("state")[3:]
    assert resumed.batches == baseline.batches[3:]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_goes_on_exactly(name: str, tmp_path: Path) -> None:
    """The state of each of PyTorch's optimizers, whatever it is made of, survives the kill."""
    job = Job(max_epochs=1, module=lambda: Toy(OPTIMIZERS[name]), plugin={"every_n_train_steps": 5})
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=5)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=5)


def test_position_counts_batches_and_not_optimizer_steps(tmp_path: Path) -> None:
    """OPT-09: with windows of two, the checkpoint of optimizer step 3 stands at batch 6."""
    job = Job(trainer={"accumulate_grad_batches": 2})

    _, resumed = kill_in_turn(job, tmp_path, {6: 6})

    assert index_of(resumed.folder, 3) == (3, 0, 6)
    assert resumed.places[0] == (0, 6, 3)


def test_a_short_last_window_ends_the_epoch(tmp_path: Path) -> None:
    """OPT-10: 8 batches in windows of three make steps at 3, 6 and 8; after the third the next epoch begins."""
    job = Job(trainer={"accumulate_grad_batches": 3})

    _, resumed = kill_in_turn(job, tmp_path, {8: 8})

    assert resumed.places[0] == (1, 0, 3)
    assert resumed.end["step"] == 6


def test_a_schedule_of_windows_goes_on(tmp_path: Path) -> None:
    """OPT-11: the window that a GradientAccumulationScheduler has set, and will set, is that of the epoch."""
    job = Job(max_epochs=4, callbacks=lambda: [GradientAccumulationScheduler({0: 1, 2: 4})])

    baseline, resumed = kill_in_turn(job, tmp_path, {4: 4, 12: 12, 17: 16, 20: 20, 25: 24})

    assert [row["step"] for row in baseline.of("epoch")] == [8, 16, 18, 20]
    assert resumed.of("epoch") == baseline.of("epoch")[3:]


def test_no_gradient_of_a_broken_window_is_lost(tmp_path: Path) -> None:
    """A kill at any place of an accumulation window goes back to the window's start and gathers all of it again."""
    job = Job(trainer={"accumulate_grad_batches": 3})

    # The save of a step is made when the next batch is asked for: a kill at the end of batch 3 comes before it.
    kept = {1: 0, 2: 0, 3: 0, 4: 3, 5: 3, 6: 3, 7: 6, 8: 6, 9: 8}
    _, resumed = kill_in_turn(job, tmp_path, kept, after_save=False)

    assert resumed.places[0] == (1, 0, 3)


def test_a_save_that_falls_due_in_a_window_waits_for_its_end(tmp_path: Path) -> None:
    """With a time interval that is always over, checkpoints still lie between windows only."""
    job = Job(
        trainer={"accumulate_grad_batches": 3},
        plugin={"every_n_train_steps": None, "train_time_interval": timedelta(microseconds=1)},
    )

    done = run(job, tmp_path / "work")

    assert saved_steps(done.folder) == [0, 1, 2, 3, 4, 5, 6]
    assert [index_of(done.folder, step)[2] for step in range(7)] == [0, 3, 6, 0, 3, 6, 0]


@pytest.mark.parametrize(
    ("module", "kills"),
    [(UnequalWindows, {1: 1, 2: 2, 4: 4, 6: 6, 11: 11}), (ClearsLate, {4: 3, 6: 6, 7: 6, 10: 6, 12: 11})],
)
def test_gathered_gradients_cross_a_save(module: type[ManualToy], kills: dict[int, int], tmp_path: Path) -> None:
    """With manual optimization gradients that are not cleared at the save are part of the checkpoint."""
    baseline, _ = kill_in_turn(Job(module=module), tmp_path, kills)

    kept = [baseline.batches[start - 1]["gradients"] for start in kills.values()]
    assert all(any(gradients) for gradients in kept[:2])


def test_saves_are_not_missed_when_a_batch_makes_two_steps(tmp_path: Path) -> None:
    """`every_n_train_steps=3` with two optimizer steps a batch saves at the first step that is at least three on."""
    job = Job(module=TwoSteps, max_epochs=1, plugin={"every_n_train_steps": 3})

    baseline, _ = kill_in_turn(job, tmp_path, {5: 4})

    assert saved_steps(baseline.folder) == [0, 4, 8, 12, 16]


def test_what_was_frozen_by_hand_stays_frozen(tmp_path: Path) -> None:
    """`requires_grad` and eval mode, which no state dict holds, are those of the save."""
    baseline, _ = kill_in_turn(Job(module=Freezes), tmp_path, {3: 3, 5: 5, 11: 11})

    assert [row["bias"] for row in baseline.batches].count("frozen") == 12


def test_parameters_that_joined_the_optimizer_later_are_there(tmp_path: Path) -> None:
    """BackboneFinetuning adds a parameter group in epoch 1; before, at and after that moment the run goes on."""
    job = Job(
        module=Backboned,
        max_epochs=3,
        callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)],
    )

    baseline, _ = kill_in_turn(job, tmp_path, {4: 4, 8: 8, 12: 12, 20: 20})

    assert [len(baseline.batches[i]["lr"]) for i in (7, 8, 16)] == [1, 2, 2]
