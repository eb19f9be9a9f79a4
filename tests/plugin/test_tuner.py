"""Lightning's Tuner: it saves and restores a checkpoint of its own, in the middle of a `fit`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import NotedToy, copies, loader, make_trainer, plugin, same_state, val_loader
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader
from toy import Job, emit, run, saved_steps


class Tunable(NotedToy):
    """The toy with a learning rate and a batch size that can be tuned."""

    def __init__(self, lr: float = 1e-2, batch_size: int = 4) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=self.lr))
        self.lr, self.batch_size = lr, batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        return loader(64, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return val_loader()


class LateRateFinder(LearningRateFinder):
    """Looks for a learning rate again before epoch 1."""

    def on_fit_start(self, *args: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


FINDERS: dict[str, Callable[[], Callback]] = {
    "LearningRateFinder": lambda: LearningRateFinder(num_training_steps=12, early_stop_threshold=None),
    "LateRateFinder": lambda: LateRateFinder(num_training_steps=12, early_stop_threshold=None),
    "BatchSizeFinder": lambda: BatchSizeFinder(max_trials=2, steps_per_trial=2),
}


def tune_lr(trainer: Trainer, module: LightningModule) -> int:
    finder = Tuner(trainer).lr_find(module, num_training=12, early_stop_threshold=None, update_attr=False)
    return len(finder.results["lr"])


def tune_batch_size(trainer: Trainer, module: LightningModule) -> int:
    return Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=2)


@pytest.mark.parametrize(("tune", "expected"), [(tune_lr, 12), (tune_batch_size, 4)])
def test_the_tuner_leaves_nothing_behind(
    tune: Callable[[Trainer, LightningModule], int], expected: int, tmp_path: Path
) -> None:
    """OBJ-06: `lr_find` and `scale_batch_size` finish, put the weights back, and save no step of theirs."""
    module = Tunable()
    before = copies(module)
    trainer = make_trainer(tmp_path, plugin(tmp_path / "ck"), limit_val_batches=0)

    result = tune(trainer, module)

    assert result == expected
    assert same_state(copies(module), before)
    assert [path.name for path in tmp_path.iterdir() if path.name != "ck"] == []
    assert saved_steps(tmp_path / "ck") == []


@pytest.mark.parametrize("tune", [tune_lr, tune_batch_size])
def test_a_tuned_run_resumes_exactly(tune: Callable[[Trainer, LightningModule], int], tmp_path: Path) -> None:
    """OBJ-06: after tuning, `fit` of the same Trainer trains, is killed and goes on as ever."""
    job = Job(
        module=Tunable,
        before_fit=lambda trainer, module: emit("tuned", result=tune(trainer, module)),
        trainer={"limit_val_batches": 0},
    )
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=5)

    resumed = run(job, tmp_path / "work", resume=True)

    assert baseline.places[0] == (0, 0, 0)
    assert len(baseline.of("tuned")) == 1
    assert resumed.batches == baseline.batches[5:]
    assert resumed.end == baseline.end


@pytest.mark.parametrize("name", FINDERS)
def test_a_finder_in_the_callback_list_works(name: str, tmp_path: Path) -> None:
    """The finder runs inside `fit`; the steps that are saved are those of the training around it."""
    module = Tunable()
    trainer = make_trainer(tmp_path, FINDERS[name](), plugin(tmp_path / "ck"), limit_val_batches=0)

    trainer.fit(module, loader() if name != "BatchSizeFinder" else None)

    num_steps = 16 if name != "BatchSizeFinder" else 2 * 64 // module.batch_size
    assert trainer.global_step == num_steps
    assert saved_steps(tmp_path / "ck") == list(range(num_steps + 1))
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


@pytest.mark.parametrize("kill_after", [5, 11])
@pytest.mark.parametrize("name", ["LearningRateFinder", "LateRateFinder"])
def test_a_run_with_a_finder_resumes_exactly(name: str, kill_after: int, tmp_path: Path) -> None:
    """Whether the finder has run before the kill, or comes after it: learning rates and batches are the baseline's."""
    job = Job(module=Tunable, callbacks=lambda: [FINDERS[name]()], trainer={"limit_val_batches": 0})
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=kill_after)

    resumed = run(job, tmp_path / "work", resume=True)

    assert resumed.batches == baseline.batches[kill_after:]
    assert resumed.end == baseline.end
