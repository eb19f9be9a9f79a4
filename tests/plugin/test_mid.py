"""Where the run stands: epoch, batch and step go on where they stopped."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from toy import Job, Run, Toy, assert_same, emit, run, saved_steps, step_dir

from lightning_resume import verify_checkpoint

PERIODIC_ONLY = {"save_on_train_start": False, "save_on_train_end": False}


def every(num_steps: int, **keywords: Any) -> dict[str, Any]:
    """Plugin keywords: save after so many optimizer steps, and at no other time."""
    return {"every_n_train_steps": num_steps, **PERIODIC_ONLY, **keywords}


def emit_step(trainer: Any, module: Any) -> None:
    """An `after_fit` that records where the trainer stands, also where nothing was trained."""
    emit("after", step=trainer.global_step, epoch=trainer.current_epoch)


def batch_in_epoch(folder: Path, step: int) -> int | None:
    """What the index of a step's checkpoint says."""
    return verify_checkpoint(step_dir(folder, step)).batch_in_epoch


def kept_batches(processes: list[Run]) -> list[dict[str, Any]]:
    """The batches of a job that was killed again and again, without those that a later process trained again."""
    kept: list[dict[str, Any]] = []
    for process in processes:
        first = process.places[0]
        kept = [row for row in kept if (row["epoch"], row["batch"], row["step"]) < first] + process.batches
    return kept


def test_a_resume_begins_with_the_batch_after_the_save(tmp_path: Path) -> None:
    """The batch that was trained before the save is not trained again (MID-01)."""
    job = Job(plugin=every(3))
    baseline = run(job, tmp_path / "base")
    killed = run(job, tmp_path / "work", kill_after=3)

    resumed = run(job, tmp_path / "work", resume=True)

    assert saved_steps(killed.folder)[0] == 3
    assert batch_in_epoch(killed.folder, 3) == 3
    assert resumed.places[0] == (0, 3, 3)
    assert resumed.batches[0]["items"] == baseline.batches[3]["items"]
    assert len(resumed.batches) == 13
    assert_same(baseline, resumed, start=3)


def test_batches_trained_after_the_save_are_trained_again_from_it(tmp_path: Path) -> None:
    """A kill at the end of a batch, before its own save, goes back to the last save and no further (MID-01)."""
    job = Job(plugin=every(3))
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_at=6)

    resumed = run(job, tmp_path / "work", resume=True)

    assert resumed.places[0] == (0, 3, 3)
    assert_same(baseline, resumed, start=3)


def test_a_job_killed_before_its_first_periodic_save_starts_over_exactly(tmp_path: Path) -> None:
    """The save before the first batch brings a job back that dies in its first steps (MID-01)."""
    job = Job(plugin={"every_n_train_steps": 3})
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_at=1)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=0)


def test_a_resumed_run_saves_under_the_steps_of_the_uninterrupted_one(tmp_path: Path) -> None:
    """Batch, step and the names of later checkpoints stay in step after a resume (MID-02)."""
    job = Job(plugin=every(3))
    killed = run(job, tmp_path / "work", kill_after=3)
    before = saved_steps(killed.folder)

    resumed = run(job, tmp_path / "work", resume=True)

    assert before == [3]
    assert saved_steps(resumed.folder) == [3, 6, 9, 12, 15]
    assert [row["batch"] for row in resumed.batches] == [row["step"] % 8 for row in resumed.batches]
    assert [batch_in_epoch(resumed.folder, step) for step in (3, 6, 9, 12, 15)] == [3, 6, 1, 4, 7]


def test_a_resume_after_mid_epoch_validation_begins_with_the_next_batch(tmp_path: Path) -> None:
    """Validation that is due at the save step is over: it is neither repeated nor skipped (MID-03)."""
    job = Job(num_items=40, num_val_items=8, trainer={"val_check_interval": 5}, plugin=every(5))
    baseline = run(job, tmp_path / "base")
    killed = run(job, tmp_path / "work", kill_after=5)

    resumed = run(job, tmp_path / "work", resume=True)

    assert [row["step"] for row in killed.of("val")] == [5]
    assert resumed.places[0] == (0, 5, 5)
    assert [row["step"] for row in resumed.of("val")] == [10, 15, 20]
    assert_same(baseline, resumed, start=5)


def test_a_checkpoint_saved_during_validation_resumes_at_the_next_batch(tmp_path: Path) -> None:
    """What a user's ModelCheckpoint saves when validation ends leads on to the batch after it (MID-03)."""

    def job(workdir: Path) -> Job:
        best = ModelCheckpoint(workdir / "best", monitor="val_loss", save_top_k=-1, filename="{step}")
        trainer = {"val_check_interval": 5}
        return Job(num_items=40, num_val_items=8, trainer=trainer, callbacks=lambda: [best], plugin=every(1000))

    run(job(tmp_path), tmp_path, kill_after=6)
    [saved] = (tmp_path / "best").iterdir()

    resumed = run(job(tmp_path), tmp_path, resume=saved)

    assert resumed.places[0] == (0, 5, 5)
    assert len(resumed.batches) == 15


def test_resuming_at_epoch_ends_adds_no_step(tmp_path: Path) -> None:
    """Training to the end of epoch 1, then 2, then 3 is training to the end of epoch 3 (MID-04)."""
    job = Job(num_items=12)
    whole = run(replace(job, max_epochs=3), tmp_path / "base")

    parts = [
        run(replace(job, max_epochs=1), tmp_path / "work"),
        run(replace(job, max_epochs=2), tmp_path / "work", resume=True),
        run(replace(job, max_epochs=3), tmp_path / "work", resume=True),
    ]

    assert [place for part in parts for place in part.places] == [(step // 3, step % 3, step) for step in range(9)]
    assert [row for part in parts for row in part.batches] == whole.batches
    assert [row for part in parts for row in part.of("epoch")] == whole.of("epoch")
    assert parts[-1].end == whole.end


@pytest.mark.parametrize("kill", [{"kill_after": 5}, {"kill_at": 5}])
def test_an_epoch_that_was_cut_reads_every_item_once(tmp_path: Path, kill: dict[str, int]) -> None:
    """The epoch is neither left nor started over (MID-06)."""
    job = Job()
    killed = run(job, tmp_path, **kill)

    resumed = run(job, tmp_path, resume=True)

    before = [row for row in killed.batches if (0, row["batch"], row["step"]) < resumed.places[0]]
    rest = [row for row in resumed.batches if row["epoch"] == 0]
    assert sorted(item for row in before + rest for item in row["items"]) == list(range(32))


def test_a_resume_at_max_epochs_trains_nothing_and_a_raised_limit_goes_on(tmp_path: Path) -> None:
    """The limit counts epochs of the whole run (MID-08)."""
    job = Job(after_fit=emit_step)
    whole = run(replace(job, max_epochs=3), tmp_path / "base")
    run(job, tmp_path / "work")

    again = run(job, tmp_path / "work", resume=True)
    further = run(replace(job, max_epochs=3), tmp_path / "work", resume=True)

    assert (len(again.batches), again.of("after")[0]["step"]) == (0, 16)
    assert (len(further.batches), further.of("after")[0]["step"]) == (8, 24)
    assert_same(whole, further, start=16)


def test_a_resume_at_max_steps_trains_nothing_and_a_raised_limit_goes_on(tmp_path: Path) -> None:
    """The limit counts steps of the whole run, also where it falls into an epoch (MID-08)."""
    job = Job(max_epochs=-1, trainer={"max_steps": 10}, after_fit=emit_step)
    longer = replace(job, trainer={"max_steps": 14})
    whole = run(longer, tmp_path / "base")
    run(job, tmp_path / "work")

    again = run(job, tmp_path / "work", resume=True)
    further = run(longer, tmp_path / "work", resume=True)

    assert (len(again.batches), again.of("after")[0]["step"]) == (0, 10)
    assert further.places == [(1, batch, 8 + batch) for batch in range(2, 6)]
    assert further.batches == whole.batches[10:]
    assert further.end == whole.end


class OneCycleToy(Toy):
    """Its schedule has as many steps as the trainer says that training will have."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        total_steps = int(self.trainer.estimated_stepping_batches)
        emit("estimate", steps=total_steps)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("step", [24, 29])
def test_a_resumed_run_takes_as_many_steps_as_the_uninterrupted_one(tmp_path: Path, step: int) -> None:
    """A one-cycle run of 48 steps is 48 steps long and ends with the same rate, wherever it was cut (MID-10)."""
    job = Job(num_items=48, max_epochs=4, module=OneCycleToy)
    baseline = run(job, tmp_path / "base")
    killed = run(job, tmp_path / "work", kill_after=step)

    resumed = run(job, tmp_path / "work", resume=True)

    assert resumed.of("estimate") == [{"kind": "estimate", "steps": 48}]
    assert len(killed.batches) + len(resumed.batches) == len(baseline.batches) == 48
    assert resumed.batches[-1]["lr"] == baseline.batches[-1]["lr"]
    assert_same(baseline, replace(resumed, records=[r for r in resumed.records if r["kind"] != "estimate"]), step)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_job_killed_six_times_reads_every_item_once_in_each_epoch(tmp_path: Path, seed: int) -> None:
    """However often a job is requeued, it is the uninterrupted run, batch for batch (MID-12)."""
    job = Job(plugin={"every_n_train_steps": 2})
    numbers = random.Random(seed)
    baseline = run(job, tmp_path / "base")

    processes = []
    for number in sorted(numbers.sample(range(1, 16), 6)):
        kill = {numbers.choice(["kill_at", "kill_after"]): number}
        processes.append(run(job, tmp_path / "work", resume=bool(processes), **kill))
    processes.append(run(job, tmp_path / "work", resume=True))

    kept = kept_batches(processes)
    assert [row for row in kept if row["epoch"] == 0] == baseline.batches[:8]
    assert [row for row in kept if row["epoch"] == 1] == baseline.batches[8:]
    for epoch in (0, 1):
        assert sorted(item for row in kept if row["epoch"] == epoch for item in row["items"]) == list(range(32))
    assert processes[-1].end == baseline.end


def test_saves_are_counted_in_optimizer_steps(tmp_path: Path) -> None:
    """With accumulation, "every 2 steps" is every 2 optimizer steps, and the position is in batches (MID-13)."""
    trainer = {"accumulate_grad_batches": 8}
    job = Job(num_items=64, batch_size=1, trainer=trainer, plugin=every(2, save_on_train_end=True))

    whole = run(job, tmp_path)

    steps = saved_steps(whole.folder)
    assert steps == [2, 4, 6, 8, 10, 12, 14, 16]
    positions = [batch_in_epoch(whole.folder, step) for step in steps]
    assert positions[:3] == positions[4:7] == [16, 32, 48]
    assert positions[3] in (64, 0)
    assert positions[7] in (64, 0)


@pytest.mark.parametrize("num_batches", [32, 37, 64])
def test_a_kill_in_an_accumulation_window_goes_back_to_a_step(tmp_path: Path, num_batches: int) -> None:
    """A resume begins at the batch after the last saved optimizer step (MID-13)."""
    job = Job(num_items=64, batch_size=1, trainer={"accumulate_grad_batches": 8}, plugin=every(2))
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=num_batches)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=num_batches // 16 * 16)


def test_a_cadence_longer_than_an_epoch_saves(tmp_path: Path) -> None:
    """Steps are counted over epochs (MID-14)."""
    job = Job(max_epochs=3, plugin=every(12, save_on_train_end=True))

    whole = run(job, tmp_path)

    assert saved_steps(whole.folder) == [12, 24]


def test_later_saves_leave_earlier_checkpoints_alone(tmp_path: Path) -> None:
    """Numbers go on after a resume; what was saved before is not written again (MID-15)."""
    job = Job(plugin=every(2))
    killed = run(job, tmp_path, kill_after=4)
    before = {path: (path.stat().st_mtime_ns, contents(path)) for path in files_of(killed.folder)}

    resumed = run(job, tmp_path, resume=True)

    after = {path: (path.stat().st_mtime_ns, contents(path)) for path in before}
    assert len(before) > 4
    assert after == before
    assert saved_steps(resumed.folder) == [2, 4, 6, 8, 10, 12, 14]


def files_of(folder: Path) -> list[Path]:
    """The step directories and everything in them."""
    return [path for path in folder.rglob("step-*") if path != folder] + [*folder.rglob("step-*/*")]


def contents(path: Path) -> str:
    """Digest of a file, or the names in a directory."""
    data = path.read_bytes() if path.is_file() else "".join(sorted(p.name for p in path.iterdir())).encode()
    return hashlib.sha256(data).hexdigest()
