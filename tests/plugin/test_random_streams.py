"""Every random stream goes on where it stopped."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from toy import Job, Toy, assert_records_equal, assert_same, digest, emit, run, step_dir, stream_digests

from lightning_resume import read_checkpoint, verify_checkpoint, write_checkpoint


class DrawingToy(Toy):
    """Draws from each global stream in every training step and every validation step."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.row["draws"] = draws()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        draws()
        return super().validation_step(batch, batch_idx)


def draws() -> list[str]:
    """One number from each global stream."""
    return [value.hex() for value in (random.random(), float(np.random.rand()), float(torch.rand(())))]


@pytest.mark.parametrize("num_batches", [3, 8])
def test_all_three_global_streams_go_on(tmp_path: Path, num_batches: int) -> None:
    """A resumed run draws the numbers of the uninterrupted one, in mid-epoch and at its end (RNG-01, RNG-03)."""
    job = Job(module=DrawingToy)
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=num_batches)

    resumed = run(job, tmp_path / "work", resume=True)

    assert [row["draws"] for row in resumed.batches] == [row["draws"] for row in baseline.batches[num_batches:]]
    assert len({number for row in baseline.batches for number in row["draws"]}) == 48
    assert_same(baseline, resumed, start=num_batches)


@pytest.mark.parametrize("kill", [{"kill_after": 8}, {"kill_at": 9}, {"kill_at": 16}])
def test_a_save_at_an_epochs_end_has_the_streams(tmp_path: Path, kill: dict[str, int]) -> None:
    """Shuffle and dropout of the next epoch are the uninterrupted run's (RNG-02)."""
    job = Job(plugin={"every_n_train_steps": 8})
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", **kill)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=8)


@pytest.mark.parametrize("chain", [(1, 3), (1, 12), (3, 5), (3, 8), (3, 12), (8, 8), (8, 12), (1, 8, 9, 15)])
def test_the_streams_of_a_run_that_was_itself_resumed_go_on(tmp_path: Path, chain: tuple[int, ...]) -> None:
    """A first kill at the start, in mid-epoch or at an epoch's end does not matter to the next (RNG-03)."""
    job = Job(module=DrawingToy)
    baseline = run(job, tmp_path / "base")
    for number, num_batches in enumerate(chain):
        # The first process of a job that is killed at 1 leaves the save before the first batch alone.
        kill = {"kill_at": 1} if num_batches == 1 else {"kill_after": num_batches}
        run(job, tmp_path / "work", resume=number > 0, **kill)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=chain[-1])


class DrawAtEpochs(Callback):
    """Draws wherever an epoch begins or ends."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        draws()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        draws()


@pytest.mark.parametrize("num_batches", [1, 8, 9])
def test_hooks_that_draw_at_an_epochs_bounds_draw_once(tmp_path: Path, num_batches: int) -> None:
    """A resume in or between epochs neither repeats nor leaves out what their hooks drew (RNG-03)."""
    job = Job(module=DrawingToy, callbacks=lambda: [DrawAtEpochs()])
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=num_batches)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=num_batches)


def test_a_finished_run_goes_on_with_its_streams(tmp_path: Path) -> None:
    """Training one epoch, and later a second, draws what training two draws (RNG-02)."""
    job = Job(module=DrawingToy, callbacks=lambda: [DrawAtEpochs()])
    baseline = run(job, tmp_path / "base")
    run(replace(job, max_epochs=1), tmp_path / "work")

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=8)


def disturb(trainer: Trainer, module: LightningModule) -> None:
    """What a script may do between its start and `fit`: reseed, build a second model, draw."""
    seed_everything(999, workers=True, verbose=False)
    emit("draws", draws=draws(), other=digest(Toy().state_dict()))


def test_what_is_drawn_before_fit_does_not_matter(tmp_path: Path) -> None:
    """A script that reseeds and builds another model before it resumes is put right by the restore (RNG-04)."""
    job = Job(module=DrawingToy)
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=3)

    resumed = run(replace(job, before_fit=disturb), tmp_path / "work", resume=True)

    assert resumed.records[0]["kind"] == "draws"
    assert_same(baseline, replace(resumed, records=resumed.records[1:]), start=3)


class DrawInSetup(Callback):
    """Reseeds wherever a callback can before the first batch."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        seed_everything(999, workers=True, verbose=False)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seed_everything(999, workers=True, verbose=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seed_everything(999, workers=True, verbose=False)


def test_a_callback_that_reseeds_when_training_starts_does_not_matter(tmp_path: Path) -> None:
    """Hooks that run at every start are not part of the run that goes on (RNG-04)."""
    job = Job(module=DrawingToy, callbacks=lambda: [DrawInSetup()])
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=3)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=3)


@pytest.mark.parametrize("num_batches", [3, 8])
def test_the_sanity_check_does_not_move_the_streams(tmp_path: Path, num_batches: int) -> None:
    """Validation that draws before the first batch changes neither shuffle nor dropout after a resume (RNG-06)."""
    job = Job(module=DrawingToy, num_val_items=8, trainer={"num_sanity_val_steps": 2})
    baseline = run(job, tmp_path / "base")
    without = run(replace(job, plugin=None), tmp_path / "without")
    run(job, tmp_path / "work", kill_after=num_batches)

    resumed = run(job, tmp_path / "work", resume=True)

    assert without.records == [record for record in baseline.records if record["kind"] != "history"]
    assert_same(baseline, resumed, start=num_batches)


class DrawInSave(Callback):
    """Has a state that is drawn from the streams."""

    def state_dict(self) -> dict[str, Any]:
        return {"draws": draws()}


def test_a_save_moves_no_stream(tmp_path: Path) -> None:
    """Not even the user's own save hooks that draw make a run with saves differ from one without (RNG-03)."""
    job = Job(module=DrawingToy, callbacks=lambda: [DrawInSave()])

    saved = run(job, tmp_path / "saved")
    without = run(replace(job, plugin=None), tmp_path / "without")

    assert_records_equal(without.records, [record for record in saved.records if record["kind"] != "history"])


class StreamsAtFailure(Callback):
    """Records streams and weights before a resume, and as its failure leaves them."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        emit("state", weights=digest(pl_module.state_dict()), **stream_digests())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        emit("state", weights=digest(pl_module.state_dict()), **stream_digests())


def without_stream(checkpoint: Path, name: str) -> None:
    """Rewrites a checkpoint, digests and all, without one random stream."""
    counters = verify_checkpoint(checkpoint).counters
    state = read_checkpoint(checkpoint, rank=0)
    rank_state = state.pop("rank_state")
    del rank_state["rng"][name]
    write_checkpoint(checkpoint, state, rank_states=[rank_state], counters=counters, overwrite=True)


@pytest.mark.parametrize("name", ["python", "numpy", "torch", "cuda"])
def test_a_missing_stream_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """A sound checkpoint that lacks a stream is refused before any stream or weight is changed (RNG-11)."""
    job = Job()
    killed = run(job, tmp_path, kill_after=3)
    without_stream(step_dir(killed.folder, 3), name)

    refused = run(replace(job, callbacks=lambda: [StreamsAtFailure()]), tmp_path, resume=True, fails=True)

    assert f"MissingStateError: cannot resume exactly: the checkpoint has no random stream '{name}'" in refused.error
    assert refused.batches == []
    before, after = refused.of("state")
    assert before == after
