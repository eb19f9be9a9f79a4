"""Runs a scenario in a forked process, kills it where it is to die, and collects what it recorded."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lightning_resume import AtomicResumeCallback

from .parts import Scenario

Record = dict[str, Any]
Place = tuple[int, int]
"""(epoch, batch): a process dies at the end of this batch, before it is counted as trained and before its save."""

TIME_LIMIT_SECONDS = 90
FIRST_SEED, RESUME_SEED = 11, 999


def run(
    scenario: Scenario,
    folder: Path,
    *,
    with_callback: bool = True,
    resume: bool = False,
    kill_at: Place | None = None,
) -> list[Record]:
    """Trains in a forked process until its end, or until it is killed at `kill_at`; returns what it recorded.

    Raises:
        AssertionError: it did not end so.
    """
    folder.mkdir(exist_ok=True)
    log, errors = (folder / f"{time.monotonic_ns()}.{suffix}" for suffix in ("jsonl", "err"))
    pid = os.fork()
    if pid == 0:
        _child(scenario, folder, log, errors, with_callback, resume, kill_at)
    status, wanted = _wait(pid), signal.SIGKILL if kill_at is not None else 0
    if status != wanted:
        text = errors.read_text(errors="replace")[-4000:] if errors.exists() else ""
        raise AssertionError(f"resume={resume}, kill_at={kill_at}: wait status {status}, not {int(wanted)}\n{text}")
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _wait(pid: int) -> int:
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.003)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the training process did not end within {TIME_LIMIT_SECONDS} s")


def _child(
    scenario: Scenario,
    folder: Path,
    log: Path,
    errors: Path,
    with_callback: bool,
    resume: bool,
    kill_at: Place | None,
) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        os.environ["MASTER_PORT"] = str(10_000 + os.getpid() % 20_000)  # nobody else is given one from there
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        # The test runner has put its own objects here.
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        _train(scenario, folder, Log(log), with_callback, resume, kill_at)
        status = 0
    except BaseException:
        with errors.open("a") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(status)


def _train(
    scenario: Scenario, folder: Path, log: Log, with_callback: bool, resume: bool, kill_at: Place | None
) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    seed_everything(RESUME_SEED if resume else FIRST_SEED, workers=True, verbose=False)
    module = scenario["module_class"](**scenario.get("module", {}))
    callbacks = [Recorder(log, kill_at), *scenario.get("callbacks", list)()]
    if with_callback:
        keywords = {"every_n_train_steps": 1, "async_save": False, **scenario.get("plugin", {})}
        callbacks.append(AtomicResumeCallback(folder / "checkpoints", **keywords))
    num_processes = scenario.get("ddp", 1)
    keywords = {
        "accelerator": "cpu",
        "devices": num_processes,
        "strategy": "ddp_fork" if num_processes > 1 else "auto",
        "logger": RowLogger(log),
        "log_every_n_steps": 1,
        "callbacks": callbacks,
        "enable_checkpointing": with_callback,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        **scenario["trainer"],
    }
    data = scenario["data"](scenario)
    source = {"datamodule" if isinstance(data, LightningDataModule) else "train_dataloaders": data}
    Trainer(**keywords).fit(module, **source, ckpt_path="last" if resume else None)
    log.write("fit", 0, weights=state_digest(module))


# -- what is recorded --------------------------------------------------------------------------------------------------


class Log:
    """Appends one JSON line with one write, so that a killed process leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, kind: str, rank: int, **values: Any) -> None:
        os.write(self.fd, (json.dumps({"kind": kind, "rank": rank, **values}) + "\n").encode())


class Recorder(Callback):
    """Records what each batch left behind, and kills the whole job where it is to die."""

    def __init__(self, records: Log, kill_at: Place | None) -> None:
        self.records, self.kill_at = records, kill_at

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.records.write(
            "batch",
            trainer.global_rank,
            epoch=trainer.current_epoch,
            batch=batch_idx,
            step=trainer.global_step,
            data=pl_module.data_digest,
            loss=pl_module.loss_hex,
            lr=[float(group["lr"]).hex() for opt in trainer.optimizers for group in opt.param_groups],
            weights=state_digest(pl_module),
            optimizer=digest([opt.state_dict() for opt in trainer.optimizers]),
            logged=_values(trainer.callback_metrics),
        )
        if (trainer.current_epoch, batch_idx) == self.kill_at and trainer.is_global_zero:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.records.write(
                "val", trainer.global_rank, step=trainer.global_step, logged=_values(trainer.callback_metrics)
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logged = _values(trainer.callback_metrics)
        self.records.write("epoch", trainer.global_rank, epoch=trainer.current_epoch, logged=logged)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.records.write(
            "end",
            trainer.global_rank,
            step=trainer.global_step,
            python=digest(random.getstate()),
            numpy=digest(np.random.get_state()),
            torch=digest(torch.get_rng_state()),
            schedulers=[digest(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        )


class RowLogger(Logger):
    """Records the rows that Lightning logs."""

    name, version = "rows", 0

    def __init__(self, records: Log) -> None:
        super().__init__()
        self.records = records

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """There are none."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.records.write("row", rank_zero_only.rank, step=step, values=_values(metrics))


def _values(metrics: Mapping[str, Any]) -> dict[str, str]:
    return {name: float(value).hex() for name, value in sorted(metrics.items())}


def state_digest(module: LightningModule) -> str:
    """Digest of weights, of all buffers, and of who is in training mode and who is frozen."""
    modes = [child.training for child in module.modules()]
    flags = [parameter.requires_grad for parameter in module.parameters()]
    return digest([dict(module.state_dict()), dict(module.named_buffers()), modes, flags])


def digest(value: Any) -> str:
    """Digest of nested containers, tensors, arrays and plain values: equal bits, equal digest."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()[:16]


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        sha.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
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
    elif hasattr(value, "__dict__"):  # a scheduler inside a scheduler
        _feed(sha, {name: item for name, item in vars(value).items() if isinstance(item, (int, float, list, dict))})
    elif not callable(value):
        sha.update(repr(value).encode())
