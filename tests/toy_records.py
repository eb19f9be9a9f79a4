"""What a training process of the tests records, and how it says it: whole lines that a kill cannot cut."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_resume import AtomicResumeCallback

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


def open_log(log: Path, errors: Path) -> None:
    """Sends records and messages of this process to `log`, everything else that it prints to `errors`."""
    global _log_fd
    _log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
