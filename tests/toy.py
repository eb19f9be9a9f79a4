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
    val      one validation: epoch, step, batches, loss
    epoch    the end of an epoch: epoch, step, metrics (`callback_metrics`)
    end      the end of training: step, weights, optimizer, schedulers, python, numpy, torch (the streams)
    history  the plugin's loss history: steps, losses
    …        whatever a test's own callback or module says with `emit`

Floats are written as hex, tensors and states as digests: equal means equal to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_resume import AtomicResumeCallback

CHECKPOINTS = "checkpoints"
TIME_LIMIT_SECONDS = 60
FIRST_SEED, RESUME_SEED = 1, 999


class ToyItems(Dataset[Tensor]):
    """Item i is `tensor([float(i)])`."""

    def __init__(self, num_items: int = 32) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Toy(LightningModule):
    """The toy net.

    Args:
        optimizer: parameters → optimizer.
        scheduler: optimizer → scheduler (stepped once an epoch), or Lightning's `lr_scheduler` dict.
        metric: what validation logs as `val_loss` in epoch 0, 1, …, instead of the loss.
    """

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        scheduler: Callable[[Any], Any] | None = None,
        metric: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
        self.make_optimizer, self.make_scheduler, self.metric = optimizer, scheduler, metric
        self.row: dict[str, Any] = {}

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.row = {
            "epoch": self.current_epoch,
            "batch": batch_idx,
            "step": self.global_step,
            "items": [int(item) for item in batch.reshape(-1)],
            "loss": float(loss.detach()).hex(),
            "lr": [float(group["lr"]).hex() for opt in self.trainer.optimizers for group in opt.param_groups],
        }
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.metric is not None:
            loss = torch.tensor(self.metric[self.current_epoch])
        self.log("val_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}


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


# -- in the training process ------------------------------------------------------------------------------------------

_log_fd = -1


def emit(kind: str, **values: Any) -> None:
    """Adds a record, whole even if the process is killed next. For a test's own callbacks and modules."""
    os.write(_log_fd, (json.dumps({"kind": kind, **values}) + "\n").encode())


def die() -> NoReturn:
    """Ends this process, and the worker processes that it started, by SIGKILL."""
    os.killpg(os.getpgrp(), signal.SIGKILL)
    raise RuntimeError("still alive")


def digest(value: Any) -> str:
    """Digest of nested containers, tensors and arrays: equal bits, equal digest. Functions are left out."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()[:16]


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        sha.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            sha.update(repr(key).encode())
            _feed(sha, item)
    elif isinstance(value, (list, tuple)):
        sha.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            _feed(sha, item)
    elif not callable(value):
        sha.update(repr(value).encode())


def stream_digests() -> dict[str, str]:
    """Digests of the global random streams."""
    return {
        "python": digest(random.getstate()),
        "numpy": digest(np.random.get_state()),
        "torch": digest(torch.get_rng_state()),
    }


class Recorder(Callback):
    """Records what each batch left behind, and kills the process where it is to die."""

    def __init__(self, kill: tuple[str, int] | None) -> None:
        self.kill = kill
        self.val_losses: list[float] = []

    def _die_if(self, moment: str, num_trained: float) -> None:
        if self.kill == (moment, num_trained):
            die()

    @staticmethod
    def _num_before(trainer: Trainer, batch_idx: int) -> float:
        # An epoch of unknown length is trained once only, in the tests that have one.
        before = trainer.current_epoch * trainer.num_training_batches if trainer.current_epoch else 0
        return before + batch_idx

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._die_if("after", self._num_before(trainer, batch_idx))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        emit("batch", **pl_module.row, weights=digest(pl_module.state_dict()), optimizer=digest(optimizers))
        self._die_if("at", self._num_before(trainer, batch_idx) + 1)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.val_losses = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.val_losses.append(float(outputs))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            losses = [loss.hex() for loss in self.val_losses]
            emit("val", epoch=trainer.current_epoch, step=trainer.global_step, batches=len(losses), losses=losses)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())}
        emit("epoch", epoch=trainer.current_epoch, step=trainer.global_step, metrics=metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        emit(
            "end",
            step=trainer.global_step,
            weights=digest(pl_module.state_dict()),
            optimizer=digest([optimizer.state_dict() for optimizer in trainer.optimizers]),
            schedulers=digest([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
            **stream_digests(),
        )
        for callback in trainer.callbacks:
            if isinstance(callback, AtomicResumeCallback):
                history = callback.history
                emit("history", steps=history.steps.tolist(), losses=[x.hex() for x in history.losses.tolist()])


class _MessageHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        emit("message", text=record.getMessage())


def _child(
    job: Job,
    workdir: Path,
    resume: bool | Path,
    kill: tuple[str, int] | None,
    seed: int,
    log: Path,
    errors: Path,
) -> NoReturn:
    global _log_fd
    status = 1
    try:
        os.setpgid(0, 0)
        _log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        _redirect_output(errors)
        _train(job, workdir, resume, kill, seed)
        status = 0
    except BaseException:
        with errors.open("a") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(status)


def _redirect_output(errors: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    # The test runner has put its own objects here.
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    warnings.resetwarnings()
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *rest, **named: emit("message", text=str(message))
    logger = logging.getLogger("lightning.pytorch")
    logger.handlers, logger.propagate = [_MessageHandler()], False
    logger.setLevel(logging.INFO)


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
    val_loader = DataLoader(ToyItems(job.num_val_items), job.batch_size) if job.num_val_items else None
    if job.before_fit is not None:
        job.before_fit(trainer, module)
    path = "last" if resume is True else os.fspath(resume) if resume else None
    trainer.fit(module, loader, val_loader, ckpt_path=path)
    if job.after_fit is not None:
        job.after_fit(trainer, module)
