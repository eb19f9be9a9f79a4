"""The toy job that most resume tests train, and how a test runs it: in a forked process that can be killed.

Toy: item i is `tensor([float(i)])`; the net is Linear(1, 1) and Dropout(0.5); the loss is the mean of squares; Adam
with a learning rate of 0.01; 32 shuffled items in batches of 4, so 8 batches an epoch; two epochs.

A test describes a `Job`, calls `run` once for each process of its story, and compares with `assert_same`:

    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=3)
    assert_same(baseline, run(job, tmp_path / "work", resume=True), start=3)

What a process left behind is a list of records, dicts with a `kind`:

    batch    one trained batch: epoch, batch, step (`global_step` before it), items, loss, lr, weights, optimizer, and
             what the module put into `module.row`
    val      one validation: epoch, step, batches, losses
    epoch    the end of an epoch: epoch, step, metrics (`callback_metrics`)
    end      the end of training: step, weights, optimizer, schedulers, python, numpy, torch (the streams)
    history  the plugin's loss history: steps, losses
    …        whatever a test's own callback or module says with `emit`

Floats are written as hex, tensors and states as digests: equal means equal to the last bit.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset
from toy_net import Toy, ToyItems
from toy_records import Recorder, die, digest, emit, open_log, stream_digests

from lightning_resume import AtomicResumeCallback

__all__ = [
    "Job",
    "Run",
    "Toy",
    "ToyItems",
    "assert_records_equal",
    "assert_same",
    "die",
    "digest",
    "emit",
    "run",
    "saved_steps",
    "step_dir",
    "stream_digests",
]

CHECKPOINTS = "checkpoints"
TIME_LIMIT_SECONDS = 60
FIRST_SEED, RESUME_SEED = 1, 999


@dataclass(frozen=True)
class Job:
    """What is trained; `dataclasses.replace` makes variants.

    Attributes:
        num_items, batch_size, max_epochs: of the toy.
        num_val_items: items of the validation set; 0: no validation.
        loader: more `DataLoader` keywords (`shuffle=False`, `num_workers=2`, …).
        trainer: more `Trainer` keywords.
        module: makes the module.
        dataset: makes the data set from `num_items`.
        val_dataset: makes the validation set from `num_val_items`.
        callbacks: makes the user's callbacks.
        plugin: `AtomicResumeCallback` keywords besides `dirpath`; None: without the plugin. It saves after every
            optimizer step and keeps everything, unless told otherwise.
        before_fit: called with trainer and module in the training process.
        after_fit: likewise.
    """

    num_items: int = 32
    batch_size: int = 4
    max_epochs: int = 2
    num_val_items: int = 0
    loader: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    module: Callable[[], LightningModule] = Toy
    dataset: Callable[[int], Dataset[Any]] = ToyItems
    val_dataset: Callable[[int], Dataset[Any]] = ToyItems
    callbacks: Callable[[], list[Callback]] = list
    plugin: Mapping[str, Any] | None = field(default_factory=dict)
    before_fit: Callable[[Trainer, LightningModule], object] | None = None
    after_fit: Callable[[Trainer, LightningModule], object] | None = None


@dataclass(frozen=True)
class Run:
    """What one process left behind.

    Attributes:
        records: everything it recorded, in order.
        messages: its warnings and Lightning's log lines.
        error: the traceback of the error that ended it, or "".
        folder: its checkpoints.
    """

    records: list[dict[str, Any]]
    messages: list[str]
    error: str
    folder: Path

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def batches(self) -> list[dict[str, Any]]:
        """One record for each trained batch."""
        return self.of("batch")

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """(epoch, batch, step) of each trained batch."""
        return [(row["epoch"], row["batch"], row["step"]) for row in self.batches]

    @property
    def end(self) -> dict[str, Any]:
        """The record of the end of training."""
        return self.of("end")[-1]


def step_dir(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint directory."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def run(
    job: Job,
    workdir: Path,
    *,
    resume: bool | Path = False,
    kill_at: int | None = None,
    kill_after: int | None = None,
    seed: int | None = None,
    fails: bool = False,
    dies: bool = False,
) -> Run:
    """Trains the job in a forked process.

    Args:
        job: what to train.
        workdir: its folder; the checkpoints are in `workdir / "checkpoints"`. The processes of one story share it.
        resume: True: `ckpt_path="last"`; a path: that checkpoint.
        kill_at: SIGKILL at the end of this batch, counted from 1 and over epochs: before it is counted as done, before
            the validation that is due, before its save.
        kill_after: SIGKILL when all of this batch is over, its save too: at the start of the next one.
        seed: for `seed_everything`; by default 1, and 999 in a resumed process.
        fails: the process is expected to end with an error.
        dies: the process is expected to kill itself somewhere else, see `die`.

    Raises:
        AssertionError: it did not end as expected (killed, failed, or well).
    """
    workdir.mkdir(parents=True, exist_ok=True)
    log, errors = (workdir / f"{time.monotonic_ns()}.{suffix}" for suffix in ("jsonl", "err"))
    kill = ("at", kill_at) if kill_at is not None else ("after", kill_after) if kill_after is not None else None
    seed = seed if seed is not None else RESUME_SEED if resume else FIRST_SEED
    pid = os.fork()
    if pid == 0:
        _child(job, workdir, resume, kill, seed, log, errors)
    status = _wait(pid)
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    messages = [line["text"] for line in lines if line["kind"] == "message"]
    records = [line for line in lines if line["kind"] != "message"]
    error = errors.read_text(errors="replace") if errors.exists() else ""
    wanted = signal.SIGKILL if kill is not None or dies else 256 if fails else 0
    if status != wanted:
        raise AssertionError(f"the process ended with wait status {status}, not {int(wanted)}\n{error}")
    return Run(records, messages, error, workdir / CHECKPOINTS)


def _wait(pid: int) -> int:
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the training process did not end within {TIME_LIMIT_SECONDS} s")
        time.sleep(0.003)


def assert_same(baseline: Run, resumed: Run, start: int) -> None:
    """Checks that `resumed` is `baseline` from its batch number `start` (counted from 0) on, in every record.

    Validation and the end of an epoch that follow batch `start - 1` are the killed process's: they are over when the
    plugin saves.
    """
    places = [index for index, record in enumerate(baseline.records) if record["kind"] == "batch"]
    begin = places[start] if start < len(places) else [r["kind"] for r in baseline.records].index("end")
    assert_records_equal(baseline.records[begin:], resumed.records)


def assert_records_equal(expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> None:
    """Checks two lists of records; the message tells the first difference and which fields differ anywhere."""
    if not expected:
        raise AssertionError("nothing to compare")
    if list(expected) == list(found):
        return
    fields = {
        f"{old['kind']}.{name}"
        for old, new in zip(expected, found, strict=False)
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    }
    first = next((pair for pair in zip(expected, found, strict=False) if pair[0] != pair[1]), ("-", "-"))
    raise AssertionError(
        f"{len(expected)} records expected, {len(found)} found; fields that differ: {sorted(fields)}\n"
        f"first difference:\n  expected: {first[0]}\n  found:    {first[1]}"
    )


def _child(
    job: Job,
    workdir: Path,
    resume: bool | Path,
    kill: tuple[str, int] | None,
    seed: int,
    log: Path,
    errors: Path,
) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        os.environ["MASTER_PORT"] = str(10_000 + os.getpid() % 20_000)  # nobody else is given one from there
        gc.freeze()  # what the test runner holds is not looked through, and so not copied, here
        open_log(log, errors)
        _train(job, workdir, resume, kill, seed)
        status = 0
    except BaseException:
        with errors.open("a") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(status)


def _train(job: Job, workdir: Path, resume: bool | Path, kill: tuple[str, int] | None, seed: int) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    seed_everything(seed, workers=True, verbose=False)
    module = job.module()
    callbacks = [Recorder(kill), *job.callbacks()]
    if job.plugin is not None:
        keywords = {"every_n_train_steps": 1, "keep_last_k": 1000, "async_save": False, **job.plugin}
        callbacks.append(AtomicResumeCallback(workdir / CHECKPOINTS, **keywords))
    keywords = {
        "accelerator": "cpu",
        "max_epochs": job.max_epochs,
        "callbacks": callbacks,
        "logger": False,
        "enable_checkpointing": job.plugin is not None,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": workdir,
        **job.trainer,
    }
    trainer = Trainer(**keywords)
    loader = DataLoader(job.dataset(job.num_items), **{"batch_size": job.batch_size, "shuffle": True, **job.loader})
    val_loader = DataLoader(job.val_dataset(job.num_val_items), job.batch_size) if job.num_val_items else None
    if job.before_fit is not None:
        job.before_fit(trainer, module)
    path = "last" if resume is True else os.fspath(resume) if resume else None
    trainer.fit(module, loader, val_loader, ckpt_path=path)
    if job.after_fit is not None:
        job.after_fit(trainer, module)
