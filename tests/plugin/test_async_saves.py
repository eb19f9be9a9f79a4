"""Saves in the background: what is written is the state at the cut, whatever training does meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from held_writer import DEADLINE_SECONDS, HeldWriter
from inprocess import NotedToy, Stop, StopAfter, loader, make_trainer, plugin
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from toy import Job, Run, Toy, assert_records_equal, assert_same, digest, emit, run, saved_steps, step_dir

from lightning_resume import (
    BackgroundSaveError,
    CheckpointWriteError,
    read_checkpoint,
    scan_checkpoints,
    verify_checkpoint,
)
from lightning_resume.format.prepared import PreparedCheckpoint

ASYNC = {"async_save": True, "every_n_train_steps": 3}


class Changing(Callback):
    """State of every kind that is not a tensor, changed in place after each batch; `state_dict` hands it out itself."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "array": np.zeros((3, 2), np.int64),
            "strings": np.array(["", "ab"]),
            "list": [0],
            "nested": {"numbers": [[0.5]], "seen": Counter()},
            "bytes": bytearray(b"\0"),
            "set": {0},
            "tensor": torch.zeros(3),
            "parameter": nn.Parameter(torch.zeros(2)),
            "strided": torch.zeros(4, 4).t()[1:, ::2],
            "count": 0,
        }

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        state = self.state
        state["array"] += 1
        state["strings"][0] = "xyz"[batch_idx % 3]
        state["list"].append(len(state["list"]))
        state["nested"]["numbers"][0][0] *= 1.5
        state["nested"]["seen"][batch_idx % 3] += 1
        state["bytes"][0] += 1
        state["set"].add(batch_idx)
        state["tensor"].add_(1.0)
        state["parameter"].data.mul_(0.5).add_(1.0)
        state["strided"].add_(batch_idx)
        state["count"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class TiedToy(Toy):
    """Two names of one weight, and a buffer that is a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1)
        self.other.weight = self.net[0].weight
        self.register_buffer("whole", torch.zeros(6))
        self.register_buffer("part", self.whole[2:4])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.whole.add_(1.0)
        return super().training_step(batch, batch_idx) + self.other(batch).mean()


class JoinAt(Callback):
    """Waits for the save in flight at the end of one batch, without the plugin's knowledge."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            for thread in threading.enumerate():
                if thread.name.startswith("lightning_resume"):
                    thread.join(DEADLINE_SECONDS)


def states(process: Run) -> dict[int, str]:
    """Digest of everything that each checkpoint of a run holds, but the notes on the callback that holds saves back."""
    found = {}
    for step in saved_steps(process.folder):
        state = read_checkpoint(step_dir(process.folder, step), rank=0)
        state["rank_state"]["circumstances"]["attributes"].pop("HeldWriter", None)
        found[step] = digest(state)
    return found


def steps_of(folder: Path) -> list[int | None]:
    """The steps of the whole checkpoints; there is nothing else in the folder."""
    found = scan_checkpoints(folder, verify=True)
    assert {info.status for info in found} == {"good"}
    return [info.global_step for info in found]


def failing(numbers: set[int], error: BaseException) -> Callable[[int], None]:
    """Raises at some commits in the background, counted from 1."""

    def fail(number: int) -> None:
        if number in numbers:
            raise error

    return fail


# -- the copy -------------------------------------------------------------------------------------------------------


def test_what_is_stored_is_the_state_at_the_cut(tmp_path: Path) -> None:
    """ASY-01: written two batches late, each checkpoint is still the one that a synchronous save writes."""
    job = Job(plugin=ASYNC, module=TiedToy, callbacks=lambda: [Changing()])
    at_once = run(replace(job, plugin={**ASYNC, "async_save": False}), tmp_path / "sync")

    late = run(
        replace(
            job,
            callbacks=lambda: [HeldWriter(num_batches=2), Changing()],
            after_fit=lambda trainer, module: emit("held", held=trainer.callbacks[1].held),
        ),
        tmp_path / "async",
    )

    held = late.of("held")[0]["held"]
    assert [begun for begun, _ in held] == [3, 6, 9, 12, 15]
    assert all(let_go >= begun + 2 for begun, let_go in held[:-1])
    assert states(late) == states(at_once)
    assert list(states(late)) == [0, 3, 6, 9, 12, 15, 16]
    assert late.batches == at_once.batches


def test_a_run_goes_on_exactly_from_each_checkpoint_that_was_written_late(tmp_path: Path) -> None:
    """The state at the cut, not at the writing: from every one of them the rest of the run is the same."""
    job = Job(plugin=ASYNC, module=TiedToy, callbacks=lambda: [Changing()])
    baseline = run(replace(job, plugin={**ASYNC, "async_save": False}), tmp_path / "base")
    late = run(replace(job, callbacks=lambda: [HeldWriter(num_batches=2), Changing()]), tmp_path / "late")

    for step in saved_steps(late.folder)[:-1]:
        resumed = run(job, tmp_path / f"from-{step}", resume=step_dir(late.folder, step))

        assert resumed.places[0][2] == step
        assert_same(baseline, resumed, start=step)


def test_tied_tensors_stay_tied_through_the_copy(tmp_path: Path) -> None:
    """Two names of one weight are one tensor again; overlapping buffers hold what they held at the cut."""
    late = run(Job(plugin=ASYNC, module=TiedToy, callbacks=lambda: [HeldWriter(num_batches=2)], max_epochs=1), tmp_path)

    state = read_checkpoint(step_dir(late.folder, 6))["state_dict"]

    assert state["other.weight"] is state["net.0.weight"]
    assert torch.equal(state["whole"], torch.full((6,), 6.0))
    assert torch.equal(state["part"], torch.full((2,), 6.0))


def test_saving_in_the_background_does_not_disturb_training(tmp_path: Path) -> None:
    """Law 3: the records of a run are those of the run without the callback."""
    job = Job(plugin={**ASYNC, "every_n_train_steps": 1}, loader={"num_workers": 1})
    without = run(replace(job, plugin=None), tmp_path / "without")

    saved = run(job, tmp_path / "with")

    assert_records_equal(without.records, [record for record in saved.records if record["kind"] != "history"])


# -- when it is over ------------------------------------------------------------------------------------------------


def test_fit_returns_when_the_last_save_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ASY-05: the newest checkpoint can be read as soon as fit has returned; nothing unfinished is left."""
    writer = HeldWriter(monkeypatch.setattr, num_batches=None)
    callback = plugin(tmp_path / "ck", every_n_train_steps=3, save_on_train_end=False)
    trainer = make_trainer(tmp_path, writer, callback, max_epochs=1)

    trainer.fit(NotedToy(), loader())

    assert [step for step, _ in writer.held] == [3, 6]
    assert steps_of(tmp_path / "ck") == [0, 3, 6]
    assert callback.best_model_path == str(step_dir(tmp_path / "ck", 6))


def test_at_most_one_save_is_in_flight_and_the_next_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`back_pressure="wait"`: no due save is left out, and training stands until the one before it is whole."""
    writer = HeldWriter(monkeypatch.setattr, num_batches=None)
    trainer = make_trainer(tmp_path, writer, plugin(tmp_path / "ck", every_n_train_steps=2), max_epochs=1)

    trainer.fit(NotedToy(), loader())

    assert writer.held == [(2, 4), (4, 6), (6, 8)]
    assert steps_of(tmp_path / "ck") == [0, 2, 4, 6, 8]


def test_a_due_save_is_skipped_while_one_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`back_pressure="skip"`: training never stands; a skipped save is due again after another interval."""
    writer = HeldWriter(monkeypatch.setattr, num_batches=5)
    callback = plugin(tmp_path / "ck", every_n_train_steps=2, back_pressure="skip")
    trainer = make_trainer(tmp_path, writer, JoinAt(7), callback, max_epochs=1)

    trainer.fit(NotedToy(), loader())

    assert writer.held[0] == (2, 7)
    assert steps_of(tmp_path / "ck")[:3] == [0, 2, 8]


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit(3), KeyboardInterrupt()], ids=type)
def test_an_error_in_training_waits_for_the_save_in_flight(error: BaseException, tmp_path: Path) -> None:
    """Training ends by its own error, and the save that was in flight is on disk, whole."""

    def job_ends(batch: Any, batch_idx: int) -> Any:
        raise error

    def before_fit(trainer: Trainer, module: LightningModule) -> None:
        step = module.training_step
        module.training_step = lambda batch, batch_idx: (job_ends if batch_idx == 4 else step)(batch, batch_idx)

    settings = {**ASYNC, "save_on_exception": False}
    job = Job(plugin=settings, callbacks=lambda: [HeldWriter()], before_fit=before_fit, max_epochs=1)

    process = run(job, tmp_path, fails=True)

    assert type(error).__name__ in process.error
    assert "BackgroundSaveError" not in process.error
    assert steps_of(process.folder) == [0, 3]


# -- failures -------------------------------------------------------------------------------------------------------


def no_space() -> OSError:
    """What a full disk says."""
    return CheckpointWriteError("x", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def test_a_disk_that_fails_in_the_background_is_told_at_the_next_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ASY-06: a warning before the next batch that follows; the save before is intact, the one after succeeds."""
    module, told = NotedToy(), []
    monkeypatch.setattr(
        "lightning_resume.plugin.saver.rank_zero_warn", lambda text: told.append((len(module.rows), text))
    )
    writer = HeldWriter(monkeypatch.setattr, 1, failing({2}, no_space()))
    trainer = make_trainer(tmp_path, writer, plugin(tmp_path / "ck", every_n_train_steps=2), max_epochs=1)

    trainer.fit(module, loader())

    assert len(told) == 1
    assert told[0][0] in (5, 6)
    assert "step-00000004" in told[0][1]
    assert "FAILED; training goes on" in told[0][1]
    assert "No space left on device" in told[0][1]
    assert len(module.rows) == 8
    assert steps_of(tmp_path / "ck") == [0, 2, 6, 8]


def test_a_fault_that_no_disk_has_stops_training_at_the_next_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ASY-06: it is a mistake in the program; the error names the checkpoint and has it as its cause."""
    module, mistake = NotedToy(), ZeroDivisionError("a mistake")
    writer = HeldWriter(monkeypatch.setattr, 1, failing({2}, mistake))
    trainer = make_trainer(tmp_path, writer, plugin(tmp_path / "ck", every_n_train_steps=2), max_epochs=1)

    with pytest.raises(BackgroundSaveError, match="ZeroDivisionError: a mistake") as caught:
        trainer.fit(module, loader())

    assert caught.value.path == str(step_dir(tmp_path / "ck", 4))
    assert caught.value.__cause__ is mistake
    assert len(module.rows) in (5, 6)
    assert steps_of(tmp_path / "ck") == [0, 2]


def test_the_end_is_saved_again_where_its_save_failed_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save is in flight when training ends, and fails: the end is written once more."""
    writer = HeldWriter(monkeypatch.setattr, None, failing({4}, no_space()))
    trainer = make_trainer(tmp_path, writer, plugin(tmp_path / "ck", every_n_train_steps=2), max_epochs=1)

    with pytest.warns(UserWarning, match="No space left on device"):
        trainer.fit(NotedToy(), loader(36))

    assert [step for step, _ in writer.held] == [2, 4, 6, 8]
    assert steps_of(tmp_path / "ck") == [0, 2, 4, 6, 9]


def test_fit_raises_where_the_end_is_not_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full from some step on: training is done to its end, and then told as an error."""
    module, commit = NotedToy(), PreparedCheckpoint.commit

    def failing_commit(prepared: PreparedCheckpoint, *arguments: Any, **keywords: Any) -> object:
        if int(prepared.path.name.removeprefix("step-")) >= 6:
            raise no_space()
        return commit(prepared, *arguments, **keywords)

    monkeypatch.setattr(PreparedCheckpoint, "commit", failing_commit)
    trainer = make_trainer(tmp_path, plugin(tmp_path / "ck", every_n_train_steps=2, keep_last_k=1), max_epochs=1)

    with (
        pytest.warns(UserWarning, match="FAILED; training goes on"),
        pytest.raises(CheckpointWriteError, match="No space left on device") as caught,
    ):
        trainer.fit(module, loader())

    assert caught.value.errno == errno.ENOSPC
    assert len(module.rows) == 8
    assert steps_of(tmp_path / "ck") == [4]


def test_a_failed_save_does_not_hide_the_error_that_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user sees the error of the training step; the save's own is a warning."""
    writer = HeldWriter(monkeypatch.setattr, None, failing({1}, ZeroDivisionError("a mistake")))
    trainer = make_trainer(tmp_path, writer, StopAfter(4), plugin(tmp_path / "ck", every_n_train_steps=3), max_epochs=1)

    with pytest.warns(UserWarning, match="FAILED; earlier checkpoints are untouched"), pytest.raises(Stop):
        trainer.fit(NotedToy(), loader())

    assert steps_of(tmp_path / "ck") == [0]


# -- kills, and several processes -------------------------------------------------------------------------------------


def test_a_kill_during_a_save_goes_back_to_the_save_before(tmp_path: Path) -> None:
    """At most the steps since the save before the one in flight are trained again: two intervals."""
    job = Job(plugin={**ASYNC, "keep_last_k": 1}, callbacks=lambda: [HeldWriter(num_batches=3)])
    baseline = run(replace(job, callbacks=list), tmp_path / "base")

    killed = run(job, tmp_path / "work", kill_at=8)  # the save of step 6 is held until step 9
    before = saved_steps(killed.folder)
    resumed = run(replace(job, callbacks=list), tmp_path / "work", resume=True)

    assert before == [3]
    assert_same(baseline, resumed, start=3)
    assert steps_of(resumed.folder) == [16]


@pytest.mark.parametrize("kill", [5, 8, 11])
def test_two_processes_save_in_the_background(kill: int, tmp_path: Path) -> None:
    """DDP: rank 0 writes behind the training of both; the resumed run is exact on each rank."""
    job = Job(
        plugin={"async_save": True, "every_n_train_steps": 2, "keep_last_k": 2},
        trainer={"strategy": "ddp_fork", "devices": 2},
        num_items=48,
    )
    baseline = run(job, tmp_path / "base")

    run(job, tmp_path / "work", kill_at=kill)
    resumed = run(job, tmp_path / "work", resume=True)

    first = min(row["step"] for row in resumed.batches)
    assert kill - 4 <= first <= kill
    expected = [row for row in baseline.records if row["kind"] != "batch" or row["step"] >= first]
    order = lambda records: sorted(map(repr, (r for r in records if r["kind"] in ("batch", "end"))))  # noqa: E731
    assert order(expected) == order(resumed.records)
    assert verify_checkpoint(step_dir(resumed.folder, 12)).global_step == 12
