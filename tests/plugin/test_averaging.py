"""Weight averaging: live and averaged weights are two things, and a resume needs both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chain import kill_in_turn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn
from toy import Job, Toy, digest, emit, step_dir

from lightning_resume import read_checkpoint


class Normed(Toy):
    """A toy whose batch norm has buffers, which an average may or may not cover."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))


class EmitsAverage(Callback):
    """Records the averaged weights before each batch."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        averaging = next(c for c in trainer.callbacks if isinstance(c, WeightAveraging))
        emit("average", digest=digest(averaging._average_model.state_dict()))


AVERAGES = {
    "every step": {},
    "every third step": {"update_every_n_steps": 3},
    "late": {"decay": 0.9, "update_starting_at_step": 5},
    "buffers too": {"decay": 0.9, "use_buffers": True},
}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_exponential_average_goes_on(name: str, tmp_path: Path) -> None:
    """Live weights, averaged weights and the number of updates are those of the uninterrupted run."""
    job = Job(
        module=Normed,
        num_val_items=8,
        trainer={"val_check_interval": 4},
        callbacks=lambda: [EMAWeightAveraging(**AVERAGES[name]), EmitsAverage()],
    )

    baseline, resumed = kill_in_turn(job, tmp_path, {3: 3, 4: 4, 10: 10}, aside={"average"})

    averages = baseline.of("average")
    assert len(averages) == 16
    assert resumed.of("average") == averages[10:]


def test_the_model_file_holds_the_average(tmp_path: Path) -> None:
    """As Lightning has it: `state_dict` is what to use the model with, the live weights stand beside it."""
    job = Job(callbacks=lambda: [EMAWeightAveraging(decay=0.5)], max_epochs=1)

    _, resumed = kill_in_turn(job, tmp_path, {4: 4})

    checkpoint = read_checkpoint(step_dir(resumed.folder, 4))
    averaged, live = checkpoint["state_dict"], checkpoint["current_model_state"]
    assert list(averaged) == list(live) == ["net.0.weight", "net.0.bias"]
    assert not any(torch.equal(averaged[key], live[key]) for key in live)


@pytest.mark.parametrize("kills", [{5: 5, 12: 12}, {20: 20, 26: 26}, {8: 8, 16: 16, 31: 31}])
def test_stochastic_weight_averaging_goes_on(kills: dict[int, int], tmp_path: Path) -> None:
    """Killed before, while and at the seams of where StochasticWeightAveraging averages and takes over the schedule."""
    job = Job(
        max_epochs=4, callbacks=lambda: [StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=2, annealing_epochs=2)]
    )

    baseline, _ = kill_in_turn(job, tmp_path, kills)

    assert len({tuple(row["lr"]) for row in baseline.batches}) > 1


def test_stochastic_weight_averaging_of_batch_norm_goes_on(tmp_path: Path) -> None:
    """With batch norm an epoch more is run to fit the averaged model's statistics; it is entered again after a kill."""
    job = Job(
        module=Normed, max_epochs=3, callbacks=lambda: [StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1)]
    )

    kill_in_turn(job, tmp_path, {4: 4, 13: 13, 20: 20})
