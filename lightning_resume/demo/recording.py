"""Writes down what each batch left behind, so that two runs can be compared bit by bit."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import save_file
from torch import Tensor

from lightning_resume.demo.settings import FINAL_FILE, RECORD_FILE


class Recorder(Callback):
    """Appends a line of JSON for each thing that happens; numbers are written as hex, so that no bit is lost.

    A line is written with a single call: a kill leaves whole lines. Draws no random number.

    Args:
        run_dir: The record and, at the end of training, the final state are written here.
        last_batch: After this batch, counted from 0 at the start of training, wait to be killed.
    """

    def __init__(self, run_dir: Path, last_batch: int | None = None) -> None:
        self.run_dir, self.last_batch = run_dir, last_batch
        self.file = os.open(run_dir / RECORD_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one line."""
        os.write(self.file, (json.dumps({"kind": kind, "pid": os.getpid(), **fields}) + "\n").encode())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes where this process goes on."""
        self.write("start", global_step=trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notes that a batch has begun: the driver waits for this line to kill the process."""
        self.write("begin", epoch=trainer.current_epoch, batch=batch_idx, global_step=trainer.global_step)
        index = trainer.current_epoch * int(trainer.num_training_batches) + batch_idx
        if self.last_batch is not None and index > self.last_batch:
            time.sleep(600)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the batch's items, its loss, and the learning rate."""
        # Lightning hands out the loss divided by the number of gathered batches, a power of two here.
        loss = float(outputs["loss"] * trainer.accumulate_grad_batches)
        self.write(
            "batch",
            epoch=trainer.current_epoch,
            batch=batch_idx,
            global_step=trainer.global_step,
            items=digest(*batch),
            loss=loss.hex(),
            learning_rate=float(trainer.optimizers[0].param_groups[0]["lr"]).hex(),
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes what validation found, except for the sanity check's."""
        if not trainer.sanity_checking:
            self.write("validation", global_step=trainer.global_step, metrics=_metrics(trainer, "val_"))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the means of the whole epoch."""
        self.write("epoch", epoch=trainer.current_epoch, metrics=_metrics(trainer, "train_loss_epoch"))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the final state."""
        tensors = {f"weights.{name}": value for name, value in pl_module.state_dict().items()}
        tensors |= _flatten("optimizer", trainer.optimizers[0].state_dict())
        tensors |= _flatten("schedule", trainer.lr_scheduler_configs[0].scheduler.state_dict())
        tensors |= _random_streams()
        save_file({name: value.contiguous().clone() for name, value in tensors.items()}, self.run_dir / FINAL_FILE)
        self.write("end", global_step=trainer.global_step)


def digest(*tensors: Tensor) -> str:
    """Returns a digest of the tensors' dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def _metrics(trainer: Trainer, prefix: str) -> dict[str, str]:
    return {name: float(v).hex() for name, v in sorted(trainer.callback_metrics.items()) if name.startswith(prefix)}


def _flatten(key: str, value: Any) -> dict[str, Tensor]:
    """Returns each tensor and number of a nested state by its key path, numbers as float64; the rest is left out."""
    if isinstance(value, Tensor):
        return {key: value}
    if isinstance(value, (bool, int, float)):
        return {key: torch.tensor(float(value), dtype=torch.float64)}
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = dict(enumerate(value)).items()
    else:
        return {}
    return {name: tensor for k, v in items for name, tensor in _flatten(f"{key}.{k}", v).items()}


def _random_streams() -> dict[str, Tensor]:
    """Returns where python's, numpy's and torch's random streams stand."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "streams.python": torch.tensor(words, dtype=torch.int64),
        "streams.python.gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "streams.numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "streams.numpy.rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "streams.torch": torch.get_rng_state(),
    }
