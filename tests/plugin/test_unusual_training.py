"""Modules that take parts of the training step into their own hands, and still resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chain import kill_in_turn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from toy import Job, Toy, emit, run


def gradients(module: LightningModule) -> list[str | None]:
    """The first element of each parameter's gradient."""
    return [None if p.grad is None else p.grad.flatten()[0].item().hex() for p in module.parameters()]


class Skips(Toy):
    """Every third batch has no loss."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class EndsEpochEarly(Toy):
    """Leaves its first epoch after five batches."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 5 else None


class KeepsGradients(Toy):
    """Clears its gradients before every third step only."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if batch_idx % 3 == 0:
            optimizer.zero_grad()


class LooksAtGradients(Toy):
    """Records its gradients just before they are cleared: those of the batch before."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        emit("gradients", values=gradients(self))


class LooksOn(Callback):
    """The same, as a callback."""

    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        emit("gradients", values=gradients(pl_module))


class StepsItself(Toy):
    """Applies its gradients at every second batch, and computes them at every one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class SchedulesItself(Toy):
    """Manual optimization that steps its scheduler every third batch."""

    def __init__(self) -> None:
        super().__init__(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if batch_idx % 3 == 2:
            self.lr_schedulers().step()
        return loss


class DrawsEverywhere(Toy):
    """Draws random numbers in every hook around the batches."""

    def on_fit_start(self) -> None:
        torch.rand(5)

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        torch.rand(2)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        torch.rand(1)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        torch.rand(1)

    def on_validation_epoch_start(self) -> None:
        torch.rand(2)

    def on_train_epoch_end(self) -> None:
        torch.rand(2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = torch.rand(1)


@pytest.mark.parametrize(("window", "kills"), [(1, {3: 3, 5: 5, 9: 9}), (2, {2: 2, 9: 8})])
def test_skipped_batches_stay_skipped(window: int, kills: dict[int, int], tmp_path: Path) -> None:
    """Batches for which `training_step` returns None count, and leave no row in the loss history."""
    job = Job(module=Skips, trainer={"accumulate_grad_batches": window})

    baseline, resumed = kill_in_turn(job, tmp_path, kills)

    assert resumed.of("history") == baseline.of("history")


@pytest.mark.parametrize(("kill_after", "kept"), [(3, 3), (8, 5), (10, 7)])
def test_an_epoch_that_the_user_ends_stays_ended(kill_after: int, kept: int, tmp_path: Path) -> None:
    """`on_train_batch_start` returned -1: killed before, right after and long after it, the epoch has five batches."""
    job = Job(module=EndsEpochEarly)
    baseline = run(job, tmp_path / "base")
    killed = run(job, tmp_path / "work", kill_after=kill_after)

    resumed = run(job, tmp_path / "work", resume=True)

    assert [row["epoch"] for row in baseline.batches] == [0] * 5 + [1] * 8
    assert killed.batches == baseline.batches[:kept]
    assert resumed.batches == baseline.batches[kept:]
    # The save is older than the end of the epoch, which was no step: that end is lived through again.
    assert resumed.of("epoch") == baseline.of("epoch")[1 if kept > 5 else 0 :]
    assert resumed.end == baseline.end


def test_gradients_that_are_kept_over_steps_are_saved(tmp_path: Path) -> None:
    """A module's own `optimizer_zero_grad` finds the gradients that it left."""
    kill_in_turn(Job(module=KeepsGradients), tmp_path, {2: 2, 4: 4, 10: 10})


@pytest.mark.parametrize(
    "job", [Job(module=LooksAtGradients), Job(callbacks=lambda: [LooksOn()])], ids=["module", "callback"]
)
def test_a_look_at_the_last_gradients_sees_them(job: Job, tmp_path: Path) -> None:
    """`on_before_zero_grad`, where gradients are logged, sees those of the batch before the kill."""
    baseline, resumed = kill_in_turn(job, tmp_path, {3: 3, 9: 9}, aside={"gradients"})

    assert None not in baseline.of("gradients")[1]["values"]
    assert resumed.of("gradients") == baseline.of("gradients")[9:]


def test_steps_of_ones_own_go_on(tmp_path: Path) -> None:
    """With `optimizer_step` overridden no batch is lost or trained twice; Lightning counts a step for each."""
    kill_in_turn(Job(module=StepsItself), tmp_path, {2: 2, 5: 5, 11: 11})


def test_a_scheduler_stepped_by_hand_goes_on(tmp_path: Path) -> None:
    """Its count and learning rate are those of the uninterrupted run."""
    baseline, _ = kill_in_turn(Job(module=SchedulesItself), tmp_path, {3: 3, 8: 8, 13: 13})

    assert len({tuple(row["lr"]) for row in baseline.batches}) == 3


def test_hooks_may_draw(tmp_path: Path) -> None:
    """Random numbers drawn in any hook, also while saving, are the baseline's, with and without the plugin."""
    job = Job(module=DrawsEverywhere, num_val_items=8, trainer={"val_check_interval": 3})

    baseline, _ = kill_in_turn(job, tmp_path, {3: 3, 8: 8, 13: 13})
    stock = run(Job(module=DrawsEverywhere, num_val_items=8, trainer=job.trainer, plugin=None), tmp_path / "stock")

    assert stock.records == [record for record in baseline.records if record["kind"] != "history"]
