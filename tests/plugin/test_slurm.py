"""A job under SLURM, whose scheduler asks it to have itself queued again: Lightning does so between two batches."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor
from toy import Job, ToyItems, assert_same, die, run, saved_steps

from lightning_resume import verify_checkpoint

SELDOM = {"every_n_train_steps": None, "train_time_interval": timedelta(hours=1)}


class Sends(Callback):
    """Sends signals to this process before the optimizer step of the fifth batch."""

    def __init__(self, *signums: int) -> None:
        self.signums = signums

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            for signum in self.signums:
                os.kill(os.getpid(), signum)


@pytest.fixture
def requeues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of one task; the file to which `scontrol` adds its arguments."""
    log = tmp_path / "scontrol.log"
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    job = {"JOB_ID": "12345678", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    return log


@pytest.mark.parametrize("requeue_signal", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_requeue_is_asked_for_between_two_batches(requeue_signal: int, requeues: Path, tmp_path: Path) -> None:
    """CRA-09: Lightning's checkpoint of the requeue and ours are of the same whole step; both go on exactly."""
    environment = {"plugins": [SLURMEnvironment(requeue_signal=requeue_signal)]}
    job = Job(plugin=SELDOM, trainer=environment if requeue_signal != signal.SIGUSR1 else {})
    baseline = run(job, tmp_path / "base")

    stopped = run(
        replace(job, callbacks=lambda: [Sends(requeue_signal, signal.SIGTERM)]), tmp_path / "work", fails=True
    )

    assert "SIGTERMException" in stopped.error
    assert requeues.read_text() == "requeue 12345678\n"
    assert saved_steps(stopped.folder) == [0, 5]
    assert verify_checkpoint(tmp_path / "work" / "hpc_ckpt_1.ckpt").global_step == 5
    as_lightning_does = run(job, tmp_path / "work", seed=999)  # without ckpt_path it takes its own
    assert_same(baseline, as_lightning_does, start=5)
    assert_same(baseline, run(job, tmp_path / "work", resume=stopped.folder / "step-00000005"), start=5)


def test_training_goes_on_until_the_job_is_taken_down(requeues: Path, tmp_path: Path) -> None:
    """The requeue alone ends nothing, and leaves no trace in the run."""
    job = Job(plugin=SELDOM)
    baseline = run(job, tmp_path / "base")

    ended = run(replace(job, callbacks=lambda: [Sends(signal.SIGUSR1)]), tmp_path / "work")

    assert requeues.read_text() == "requeue 12345678\n"
    assert ended.records == baseline.records
    assert saved_steps(ended.folder) == [0, 5, 16]


class AsksWholeGroup(ToyItems):
    """Reading item 17 sends the requeue signal to all processes of the job, once."""

    def __init__(self, num_items: int, marker: Path) -> None:
        super().__init__(num_items)
        self.marker = marker

    def __getitem__(self, index: int) -> Tensor:
        if index == 17 and not self.marker.exists():
            self.marker.touch()
            os.killpg(os.getpgrp(), signal.SIGUSR1)
        return super().__getitem__(index)


def test_workers_neither_requeue_nor_die(requeues: Path, tmp_path: Path) -> None:
    """SLURM signals every process of a step: the workers go on reading, and the job is queued once."""
    marker = tmp_path / "sent"
    marker.touch()
    job = Job(plugin=SELDOM, loader={"num_workers": 2}, dataset=lambda n: AsksWholeGroup(n, marker))
    baseline = run(job, tmp_path / "base")
    marker.unlink()

    ended = run(job, tmp_path / "work")

    assert marker.exists()
    assert requeues.read_text() == "requeue 12345678\n"
    assert ended.records == baseline.records


class DiesInRequeue(Callback):
    """Is killed while Lightning writes the checkpoint of the requeue."""

    def __init__(self) -> None:
        self.num_saves = 0

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        real = os.rename

        def rename(source: Any, target: Any) -> None:
            if "hpc_ckpt_2" in str(target):
                die()
            real(source, target)

        os.rename = rename


def test_a_kill_while_the_requeue_is_saved_leaves_the_one_before(requeues: Path, tmp_path: Path) -> None:
    """What was half written is not taken for the newest: Lightning finds the checkpoint of the requeue before."""
    job = Job(plugin=SELDOM)
    baseline = run(job, tmp_path / "base")
    run(replace(job, callbacks=lambda: [Sends(signal.SIGUSR1, signal.SIGTERM)]), tmp_path / "work", fails=True)
    killed = replace(job, callbacks=lambda: [DiesInRequeue(), SendsAt(8)])

    run(killed, tmp_path / "work", seed=999, dies=True)

    assert_same(baseline, run(job, tmp_path / "work", seed=998), start=5)


class SendsAt(Sends):
    """Asks for a requeue when a batch begins."""

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        self.num_batches = num_batches

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.num_batches:
            os.kill(os.getpid(), signal.SIGUSR1)


def test_without_auto_requeue_the_signal_is_left_alone(
    requeues: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SLURMEnvironment(auto_requeue=False)`: nobody handles SIGUSR1, and the job dies of it as it always did."""
    job = Job(
        plugin=SELDOM,
        trainer={"plugins": [SLURMEnvironment(auto_requeue=False)]},
        callbacks=lambda: [Sends(signal.SIGUSR1)],
    )

    with pytest.raises(AssertionError, match=f"wait status {int(signal.SIGUSR1)},"):
        run(job, tmp_path / "work")

    assert not requeues.exists()
