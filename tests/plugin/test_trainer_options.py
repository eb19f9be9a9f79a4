"""Trainer options that touch the data or the loop, and values that the user logs: a resumed run is the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from chain import kill_in_turn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, Timer, TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader
from toy import Job, Toy, emit

# name → batches of an epoch, Trainer keywords
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "overfit_batches": (3, {"overfit_batches": 3, "max_epochs": 3}),
    "overfit_batches as a share": (4, {"overfit_batches": 0.5}),
    "limit_train_batches": (5, {"limit_train_batches": 5}),
    "limit_train_batches as a share": (6, {"limit_train_batches": 0.75}),
    "reload_dataloaders_every_n_epochs": (8, {"reload_dataloaders_every_n_epochs": 1}),
    "reload and limit": (6, {"reload_dataloaders_every_n_epochs": 2, "limit_train_batches": 6, "max_epochs": 3}),
    "max_steps in mid-epoch": (8, {"max_epochs": -1, "max_steps": 13}),
    "min_steps": (8, {"min_steps": 20}),
    "clipping": (8, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}),
    "watching": (
        8,
        {"enable_model_summary": True, "profiler": "simple", "detect_anomaly": True, "inference_mode": False},
    ),
    "bf16-true": (8, {"precision": "bf16-true"}),
    "16-true": (8, {"precision": "16-true"}),
    "64-true": (8, {"precision": "64-true"}),
}
VALIDATIONS: dict[str, dict[str, Any]] = {
    "a share of the epoch": {"val_check_interval": 0.25},
    "across epochs": {"check_val_every_n_epoch": None, "val_check_interval": 5},
    "every second epoch": {"check_val_every_n_epoch": 2},
    "limited": {"limit_val_batches": 1, "val_check_interval": 3},
    "without sanity check": {"num_sanity_val_steps": 0, "val_check_interval": 3},
    "with a whole sanity check": {"num_sanity_val_steps": -1, "val_check_interval": 8},
}


class Reloading(Toy):
    """Makes its own loaders and says when: each is over other items than the last.

    Args:
        every: epochs after which it is asked for another.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def train_dataloader(self) -> DataLoader[Tensor]:
        emit("loader", epoch=self.current_epoch)
        items = [torch.tensor([100.0 * (self.current_epoch // self.every) + item]) for item in range(32)]
        return DataLoader(items, batch_size=4, shuffle=True)


def without_loaders(trainer: Trainer, module: LightningModule) -> None:
    """Makes the harness's `fit` leave the loaders to the module."""
    trainer.fit = lambda module, *loaders, ckpt_path: Trainer.fit(trainer, module, ckpt_path=ckpt_path)


class Measuring(Toy):
    """Logs torchmetrics objects by step and by epoch, with and without `compute` in between."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.largest, self.all = (
            torchmetrics.MeanMetric(),
            torchmetrics.MaxMetric(),
            torchmetrics.CatMetric(),
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.largest.update(loss.detach())
        self.all.update(batch.mean())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.log("smallest", loss, on_epoch=True, on_step=False, reduce_fx="min")
        self.log_dict({"half": loss / 2, "sum": loss}, on_epoch=True, reduce_fx="sum")
        return loss

    def on_train_epoch_end(self) -> None:
        emit("all", values=[value.hex() for value in self.all.compute().tolist()])
        self.all.reset()


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_nothing_about_the_resume(name: str, tmp_path: Path) -> None:
    """Killed in mid-epoch and at the end of an epoch, a run with this option goes on exactly."""
    num_batches, keywords = OPTIONS[name]

    kill_in_turn(Job(trainer=keywords), tmp_path, {2: 2, num_batches: num_batches})


@pytest.mark.parametrize("name", VALIDATIONS)
def test_validation_is_where_it_was(name: str, tmp_path: Path) -> None:
    """Killed before and after validations, the resumed run validates at the same steps, with the same losses."""
    job = Job(num_val_items=8, trainer=VALIDATIONS[name])

    baseline, _ = kill_in_turn(job, tmp_path, {3: 3, 8: 8})

    assert len(baseline.of("val")) >= 1


def test_overfitting_without_shuffling_goes_on(tmp_path: Path) -> None:
    """`overfit_batches` replaces a shuffling sampler; a sequential one it leaves alone."""
    job = Job(max_epochs=3, loader={"shuffle": False}, trainer={"overfit_batches": 3})

    kill_in_turn(job, tmp_path, {2: 2, 4: 4})


@pytest.mark.parametrize("every", [1, 2])
def test_reloaded_loaders_are_those_of_the_epoch(every: int, tmp_path: Path) -> None:
    """`train_dataloader` is asked again when it would have been, and never for an epoch that has begun."""
    job = Job(
        max_epochs=4,
        module=lambda: Reloading(every),
        trainer={"reload_dataloaders_every_n_epochs": every, "limit_val_batches": 0},
        before_fit=without_loaders,
    )

    baseline, resumed = kill_in_turn(job, tmp_path, {3: 3, 8: 8, 12: 12}, aside={"loader"})

    assert [row["epoch"] for row in baseline.of("loader")] == list(range(0, 4, every))
    assert [row["epoch"] for row in resumed.of("loader")] == [1, *{1: [2, 3], 2: [2]}[every]]


def test_metrics_objects_go_on(tmp_path: Path) -> None:
    """Means, extremes and sums of an epoch that was cut cover all of its batches."""
    job = Job(module=Measuring)

    baseline, resumed = kill_in_turn(job, tmp_path, {3: 3, 8: 8, 13: 13})

    assert {"mean_epoch", "largest", "smallest", "half_epoch", "sum_epoch"} <= set(baseline.of("epoch")[0]["metrics"])
    assert [len(row["values"]) for row in baseline.of("all")] == [8, 8]
    assert resumed.of("all") == baseline.of("all")[1:]


@pytest.mark.parametrize("make", [TQDMProgressBar, RichProgressBar])
def test_a_progress_bar_works_on_resume(make: type[Any], tmp_path: Path) -> None:
    """With the bar shown a resumed run is the same run."""
    kill_in_turn(Job(callbacks=lambda: [make()], trainer={"enable_progress_bar": True}), tmp_path, {3: 3, 11: 11})


def test_a_timer_goes_on(tmp_path: Path) -> None:
    """A Timer's state is part of the checkpoint; one that has time left does not end the resumed run early."""
    kill_in_turn(Job(callbacks=lambda: [Timer(duration={"hours": 1})]), tmp_path, {3: 3, 11: 11})
