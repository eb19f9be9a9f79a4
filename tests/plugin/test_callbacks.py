"""Validation, the user's callbacks, metrics and loggers go on where they stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from toy import Job, Run, Toy, assert_same, die, digest, emit, run, saved_steps, step_dir

from lightning_resume import AtomicResumeCallback, read_checkpoint

VAL_METRIC = (0.9, 0.5, 0.7, 0.8)


@pytest.fixture(scope="module", name="validated")
def validated_fixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Run]:
    """An uninterrupted run that validates twice an epoch and saves every 2 steps."""
    plugin = {"every_n_train_steps": 2, "save_on_train_start": False}
    job = Job(max_epochs=3, num_val_items=20, trainer={"val_check_interval": 4}, plugin=plugin)
    return job, run(job, tmp_path_factory.mktemp("validated"))


@pytest.mark.parametrize("step", range(2, 18, 2))
def test_validation_after_a_resume_is_whole(tmp_path: Path, validated: tuple[Job, Run], step: int) -> None:
    """Every validation of a resumed run covers all batches, and is that of the uninterrupted run (CBK-01)."""
    job, baseline = validated

    resumed = run(job, tmp_path, resume=step_dir(baseline.folder, step))

    assert [row["batches"] for row in resumed.of("val")] == [5] * (6 - step // 4)
    assert_same(baseline, resumed, start=step)


class DieInValidation(Callback):
    """Kills the process in the third batch of the validation that follows step 4."""

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        if trainer.global_step == 4 and batch_idx == 2:
            die()


def test_a_validation_that_was_cut_short_is_run_again_whole(tmp_path: Path) -> None:
    """A kill during validation goes back to the save before it; nothing of the validation is left out (CBK-01)."""
    job = Job(num_val_items=20, trainer={"val_check_interval": 4})
    baseline = run(job, tmp_path / "base")
    killed = run(replace(job, callbacks=lambda: [DieInValidation()]), tmp_path / "work", dies=True)

    resumed = run(job, tmp_path / "work", resume=True)

    assert killed.of("val") == []
    assert [row["batches"] for row in resumed.of("val")] == [5] * 4
    assert_same(baseline, resumed, start=3)


def early_stopping_job() -> Job:
    """Validation is best in epoch 1; with a patience of 3 it is stopped in epoch 4."""

    def module() -> Toy:
        return Toy(metric=(1.0, 0.9, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0))

    def callbacks() -> list[Callback]:
        return [EarlyStopping("val_loss", patience=3)]

    return Job(num_items=16, max_epochs=8, num_val_items=8, module=module, callbacks=callbacks)


@pytest.mark.parametrize("num_batches", [16, 18])
def test_early_stopping_goes_on_counting(tmp_path: Path, num_batches: int) -> None:
    """A run that has waited 2 of 3 epochs stops one epoch later, not three (CBK-05)."""
    job = early_stopping_job()
    baseline = run(job, tmp_path / "base")
    killed = run(job, tmp_path / "work", kill_after=num_batches)

    resumed = run(job, tmp_path / "work", resume=True)

    saved = read_checkpoint(step_dir(killed.folder, num_batches), keys={"callbacks"})["callbacks"]
    [state] = [state for key, state in saved.items() if key.startswith("EarlyStopping")]
    assert state["wait_count"] == 2
    assert resumed.batches[-1]["epoch"] == baseline.batches[-1]["epoch"] == 4
    assert_same(baseline, resumed, start=num_batches)


def test_a_run_that_stopped_early_stays_stopped(tmp_path: Path) -> None:
    """A resume after early stopping trains no further epoch (CBK-05)."""
    job = early_stopping_job()
    stopped = run(job, tmp_path)

    again = run(job, tmp_path, resume=True)

    assert stopped.end["step"] == 20
    assert again.batches == []


@pytest.mark.parametrize("num_batches", [16, 19])
def test_the_best_checkpoint_stays_the_best(tmp_path: Path, num_batches: int) -> None:
    """A ModelCheckpoint knows its best score and its list after a resume; the next value is not the best (CBK-07)."""

    def job(workdir: Path) -> Job:
        def callbacks() -> list[Callback]:
            return [ModelCheckpoint(workdir / "best", monitor="val_loss", save_top_k=1, filename="{epoch}")]

        def best(trainer: Trainer, module: LightningModule) -> None:
            checkpoint = next(c for c in trainer.callbacks if type(c) is ModelCheckpoint)
            path, score = Path(checkpoint.best_model_path), float(checkpoint.best_model_score)
            emit("best", path=path.name, exists=path.is_dir(), score=score, top_k=len(checkpoint.best_k_models))

        module = lambda: Toy(metric=VAL_METRIC)  # noqa: E731
        return Job(max_epochs=4, num_val_items=8, module=module, callbacks=callbacks, after_fit=best)

    baseline = run(job(tmp_path / "base"), tmp_path / "base")
    run(job(tmp_path / "work"), tmp_path / "work", kill_after=num_batches)

    resumed = run(job(tmp_path / "work"), tmp_path / "work", resume=True)

    score = float(torch.tensor(0.5))
    assert resumed.of("best") == [{"kind": "best", "path": "epoch=1.ckpt", "exists": True, "score": score, "top_k": 1}]
    assert [path.name for path in (tmp_path / "work" / "best").iterdir()] == ["epoch=1.ckpt"]
    assert_same(baseline, resumed, start=num_batches)


class Counter(Callback):
    """Counts batches, each instance for itself."""

    def __init__(self, name: str, stride: int) -> None:
        self.name, self.stride, self.count = name, stride, 0

    @property
    def state_key(self) -> str:
        return f"Counter-{self.name}"

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]

    def on_train_batch_start(self, *args: Any) -> None:
        self.count += self.stride

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        emit("count", name=self.name, count=self.count)


def test_two_callbacks_of_one_class_get_their_own_states(tmp_path: Path) -> None:
    """States are told apart by `state_key` (CBK-08)."""
    job = Job(callbacks=lambda: [Counter("a", 1), Counter("b", 10)])
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=3)

    resumed = run(job, tmp_path / "work", resume=True)

    assert [(row["name"], row["count"]) for row in resumed.of("count")] == [("a", 16), ("b", 160)]
    assert_same(baseline, resumed, start=3)


class Renamed(AtomicResumeCallback):
    """Passes Lightning's own check, which refuses two callbacks of one `state_key`."""

    @property
    def state_key(self) -> str:
        return "Renamed"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (AtomicResumeCallback, "more than one stateful callback of type `AtomicResumeCallback`"),
        (Renamed, "cannot resume exactly with two AtomicResumeCallbacks: one run has one position"),
    ],
)
def test_two_of_our_callbacks_are_refused(tmp_path: Path, second: type[AtomicResumeCallback], message: str) -> None:
    """A second AtomicResumeCallback is refused before anything is trained or saved (CBK-08)."""
    job = Job(callbacks=lambda: [second(tmp_path / "second")])

    refused = run(job, tmp_path, fails=True)

    assert message in refused.error
    assert refused.batches == []
    assert saved_steps(refused.folder) == saved_steps(tmp_path / "second") == []


class MeanLoss(torch.nn.Module):
    """A metric that keeps its sum and count in buffers, as torchmetrics does with `persistent=True`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def update(self, loss: torch.Tensor) -> float:
        self.total += loss.detach()
        self.count += 1
        return float(self.total / self.count)


class ToyWithMetric(Toy):
    """Records its mean loss; `more` adds a second metric that is never updated."""

    def __init__(self, more: bool = False) -> None:
        super().__init__()
        self.mean_loss = MeanLoss()
        if more:
            self.another = MeanLoss()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.row["mean"] = self.mean_loss.update(loss).hex()
        return loss


def test_metrics_in_the_state_dict_go_on(tmp_path: Path) -> None:
    """A metric's persistent buffers are part of the model (CBK-13)."""
    job = Job(module=ToyWithMetric)
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=3)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=3)


class StateAtFailure(Callback):
    """Records the weights as they are made, and as an error leaves them."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        emit("weights", digest=digest(pl_module.state_dict()))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        emit("weights", digest=digest(pl_module.state_dict()))


def test_a_metric_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    """A module with more keys than the checkpoint is refused by name, before a weight is changed (CBK-13)."""
    job = Job(module=ToyWithMetric)
    run(job, tmp_path, kill_after=3)
    extended = replace(job, module=lambda: ToyWithMetric(more=True), callbacks=lambda: [StateAtFailure()])

    refused = run(extended, tmp_path, resume=True, fails=True)

    assert "ModelMismatchError" in refused.error
    assert "another.total" in refused.error
    assert "another.count" in refused.error
    before, after = refused.of("weights")
    assert before == after
