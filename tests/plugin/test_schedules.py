"""Learning rates after a resume are those of the uninterrupted run (CBK-11), whatever the schedule and the place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from toy import Job, Run, Toy, assert_same, run, step_dir

NUM_STEPS = 16
NO_SAVES = {"every_n_train_steps": 1000, "save_on_train_start": False, "save_on_train_end": False}


def by_step(make: Callable[[Optimizer], LRScheduler], optimizer: Optimizer) -> dict[str, Any]:
    """Lightning's description of a schedule that moves with each step."""
    return {"scheduler": make(optimizer), "interval": "step"}


def warm_up(step: int) -> float:
    """Rises over five steps."""
    return min(1.0, (step + 1) / 5)


def sequential(optimizer: Optimizer) -> SequentialLR:
    """A linear warm-up, then a decay."""
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=5), ExponentialLR(optimizer, 0.9)], [5])


def plateau(optimizer: Optimizer) -> dict[str, Any]:
    """Halves the rate after each epoch whose mean loss is not better."""
    return {"scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0), "monitor": "loss_epoch"}


def plateau_by_step(optimizer: Optimizer) -> dict[str, Any]:
    """Halves the rate after each pair of steps whose loss is not better."""
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    return {"scheduler": scheduler, "monitor": "loss_step", "interval": "step", "frequency": 2}


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step_by_epoch": lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
    "step_by_step": partial(by_step, lambda optimizer: StepLR(optimizer, 3, gamma=0.5)),
    "multistep": partial(by_step, lambda optimizer: MultiStepLR(optimizer, [2, 6, 9], gamma=0.5)),
    "one_cycle": partial(by_step, lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=NUM_STEPS)),
    "cosine": partial(by_step, lambda optimizer: CosineAnnealingLR(optimizer, NUM_STEPS)),
    "lambda_warm_up": partial(by_step, lambda optimizer: LambdaLR(optimizer, warm_up)),
    "sequential": partial(by_step, sequential),
    "plateau_by_epoch": plateau,
    "plateau_by_step": plateau_by_step,
}


def job_of(schedule: str) -> Job:
    """Two epochs of the toy under a schedule; checkpoints of the steps 1 to 16."""
    return Job(module=partial(Toy, scheduler=SCHEDULES[schedule]), plugin={"save_on_train_start": False})


@pytest.fixture(scope="module", name="baseline_of")
def baseline_of_fixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Trains each schedule's uninterrupted run once."""
    runs: dict[str, Run] = {}

    def baseline_of(schedule: str) -> Run:
        if schedule not in runs:
            runs[schedule] = run(job_of(schedule), tmp_path_factory.mktemp(schedule))
        return runs[schedule]

    return baseline_of


@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rates_go_on(tmp_path: Path, baseline_of: Callable[[str], Run], schedule: str, step: int) -> None:
    """From each save of the first epoch on, every rate is the uninterrupted run's, and so is the rest (CBK-11)."""
    baseline = baseline_of(schedule)
    job = replace(job_of(schedule), plugin=NO_SAVES)

    resumed = run(job, tmp_path, resume=step_dir(baseline.folder, step))

    rates = [row["lr"] for row in baseline.batches]
    assert len({rate for [rate] in rates}) > 1
    assert [row["lr"] for row in resumed.batches] == rates[step:]
    assert_same(baseline, resumed, start=step)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_undisturbed_by_the_callback(
    tmp_path: Path, baseline_of: Callable[[str], Run], schedule: str
) -> None:
    """An uninterrupted run with the callback has the rates, weights and streams of one without it (CBK-11)."""
    job = Job(module=partial(Toy, scheduler=SCHEDULES[schedule]), plugin=None)

    without = run(job, tmp_path)

    assert [record for record in baseline_of(schedule).records if record["kind"] != "history"] == without.records


def test_two_schedules_of_two_optimizers_go_on(tmp_path: Path) -> None:
    """With manual optimization each schedule keeps its own place (CBK-11)."""
    job = Job(module=TwoOptimizers)
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=5)

    resumed = run(job, tmp_path / "work", resume=True)

    assert len({tuple(row["lr"]) for row in baseline.batches}) > 4
    assert_same(baseline, resumed, start=5)


class TwoOptimizers(Toy):
    """Steps one optimizer and its schedule with each batch, the other ones with every third."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        turn = int(batch_idx % 3 == 0)
        optimizer, scheduler = self.optimizers()[turn], self.lr_schedulers()[turn]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        scheduler.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD([parameter], lr=1e-3) for parameter in self.parameters()]
        return optimizers, [StepLR(optimizers[0], 2, gamma=0.5), ExponentialLR(optimizers[1], 0.9)]
