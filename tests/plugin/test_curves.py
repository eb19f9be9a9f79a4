"""What is logged and kept of a job that was killed is one curve, without a gap and without a double."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import NotedToy, loader, make_trainer, plugin
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from toy import Job, run, saved_steps, step_dir

from lightning_resume import read_checkpoint
from lightning_resume.plugin.history import LossHistory


def logged_rows(folder: Path) -> list[dict[str, str]]:
    """The rows of the newest CSV log."""
    version = max(folder.glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))
    with (version / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def csv_job(workdir: Path) -> Job:
    """One epoch, logged to CSV at every step."""
    trainer = {"logger": CSVLogger(workdir, name="logs"), "log_every_n_steps": 1}
    return Job(max_epochs=1, trainer=trainer)


def test_logged_steps_go_on(tmp_path: Path) -> None:
    """The rows of a resumed run have the steps and values of the uninterrupted run's, and none twice (CBK-14)."""
    run(csv_job(tmp_path / "base"), tmp_path / "base")
    run(csv_job(tmp_path / "work"), tmp_path / "work", kill_after=3)

    run(csv_job(tmp_path / "work"), tmp_path / "work", resume=True)

    whole, resumed = logged_rows(tmp_path / "base" / "logs"), logged_rows(tmp_path / "work" / "logs")
    steps = [int(row["step"]) for row in resumed if row["loss_step"]]
    assert steps == [3, 4, 5, 6, 7]
    assert resumed == whole[3:]


def history_on_disk(folder: Path, step: int) -> dict[str, list[Any]]:
    """The loss history in a step's checkpoint."""
    callbacks = read_checkpoint(step_dir(folder, step), keys={"callbacks"})["callbacks"]
    history = callbacks["AtomicResumeCallback"]["history"]
    return {"steps": history["steps"].tolist(), "losses": [loss.hex() for loss in history["losses"].tolist()]}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_history_of_a_job_killed_three_times_is_one_curve(tmp_path: Path, accumulate: int) -> None:
    """It has every step once, in order, with the losses of the uninterrupted run (CBK-15)."""
    job = Job(trainer={"accumulate_grad_batches": accumulate}, plugin={"every_n_train_steps": 2})
    baseline = run(job, tmp_path / "base")
    for number, kill in enumerate([{"kill_at": 6}, {"kill_after": 9}, {"kill_at": 13}]):
        run(job, tmp_path / "work", resume=number > 0, **kill)

    resumed = run(job, tmp_path / "work", resume=True)

    num_steps = 16 // accumulate
    [history] = resumed.of("history")
    assert resumed.end["step"] == num_steps
    assert history["steps"] == list(range(1, num_steps + 1))
    assert history == baseline.of("history")[0]
    assert accumulate > 1 or history["losses"] == [row["loss"] for row in baseline.batches]
    for step in saved_steps(resumed.folder):
        saved = history_on_disk(resumed.folder, step)
        assert saved == {"steps": history["steps"][:step], "losses": history["losses"][:step]}


def test_losses_are_kept_on_the_cpu_whatever_the_default_device() -> None:
    """A history that is made, or written out, where tensors are made elsewhere by default."""
    with torch.device("meta"):
        history = LossHistory()
    history.note(1, torch.tensor(0.5))

    assert history.losses.tolist() == [0.5]


def test_losses_are_those_that_lightning_hands_out(tmp_path: Path) -> None:
    """A callback that adds the next losses to the first in place, as a sum, does not change what is kept."""

    class Sum(Callback):
        total: Any = None

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            if self.total is None:
                self.total = outputs["loss"]
            else:
                self.total += outputs["loss"]

    module, callback = NotedToy(), plugin(tmp_path / "ck", every_n_train_steps=3)
    make_trainer(tmp_path, Sum(), callback, max_epochs=1).fit(module, loader())

    assert callback.history.losses.tolist() == [float.fromhex(row["loss"]) for row in module.rows]


def test_a_loss_that_is_returned_in_the_same_memory_each_time_is_kept_each_time() -> None:
    """Manual optimization hands out the very tensor that the step has returned."""
    history, memory = LossHistory(), torch.zeros(())

    for step in range(1, 4):
        history.note(step, {"loss": memory.fill_(step)})

    assert history.losses.tolist() == [1.0, 2.0, 3.0]


def test_losses_of_all_kinds_are_kept_in_order() -> None:
    """Numbers of other types and shapes in between, more than are read at once; what is no loss is left out."""
    history = LossHistory()
    outputs: list[Any] = [
        torch.tensor(number, dtype=dtype).reshape(shape)
        for number in range(100)
        for dtype, shape in ((torch.float32, ()), (torch.float64, (1,)), (torch.bfloat16, (1, 1)), (torch.int64, ()))
    ]
    for step, output in enumerate(outputs, 1):
        history.note(2 * step, {"loss": output} if step % 3 else output)
        history.note(2 * step, torch.tensor(-1.0))
        history.note(2 * step + 1, torch.ones(2))

    assert history.steps.tolist() == [2 * step for step in range(1, 401)]
    assert history.losses.tolist() == [float(number) for number in range(100) for _ in range(4)]
    assert len(history) == 400
