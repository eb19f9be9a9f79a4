"""What training waits for at a save, in Lightning's own loop: each contender has a process and a fit of its own.

A process that does nothing but save gets the memory for a copy from what its allocator has kept. In a training that may
be gone by the next save: then the system has to find and to clear each page again, which takes several times as long.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.new_process import in_new_process
from benchmarks.states import small_state
from lightning_resume import AtomicResumeCallback
from lightning_resume.format.memory import map_memory

THEIRS, OURS, STALL = "Lightning async", "ours", "stall"
COPY, COPY_BESIDE = "memcpy", "memcpy, 2 threads"
NUM_SAVES = 4  # in one fit; the first is not counted
STEPS_APART = 10  # some 3 s: what is saved is written by then, behind a training that leaves a core free
STEPS_APART_IF_BUSY = 25
HEAD_WIDTH = 64
MAX_ROUNDS = 2  # each is some 20 to 40 s a contender


def measure_fits(folder: Path, rounds: int, num_threads: int, **sizes: int) -> dict[str, list[float]]:
    """Seconds of each save's stall by contender, which take turns, and of memcpys of the same tensors.

    Args:
        folder: for the checkpoints.
        rounds: fits of each contender.
        num_threads: with which torch trains.
        sizes: `width` and `num_layers` of a transformer, or `num_tensors` of 1 to 4 KB, moments included.
    """
    seconds: dict[str, list[float]] = {name: [] for name in (COPY, COPY_BESIDE, THEIRS, OURS)}
    for _ in range(min(rounds, MAX_ROUNDS)):
        for name in (THEIRS, OURS):
            measured = in_new_process(_fit, name, folder, num_threads, sizes)
            for what, values in measured.items():
                seconds[name if what == STALL else what] += values
    return seconds


def silent_trainer(max_steps: int, callbacks: list[Callback], **more: Any) -> Trainer:
    """Trains on the CPU and says nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    shown = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", max_steps=max_steps, callbacks=callbacks, **shown, **more)


def tokens(num_batches: int) -> DataLoader[Any]:
    """Batches for `Transformer`."""
    return DataLoader([torch.arange(16)] * num_batches)  # type: ignore[arg-type]


class Transformer(LightningModule):
    """Trains on a few tokens: most of a step is AdamW's."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // HEAD_WIDTH, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.embedding = nn.Embedding(16 * width // 10, width)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(self.embedding(batch)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class _ManySmall(Transformer):
    """The tensors of `small_state`: a third are parameters, the others their moments."""

    def __init__(self, num_tensors: int) -> None:
        LightningModule.__init__(self)
        tensors = small_state(num_tensors // 3)["state_dict"].values()
        self.tensors = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.stack(torch._foreach_norm(list(self.tensors))).sum()


class _Watch(Callback):
    """Measures from the end of a batch to the beginning of the next, and two memcpys of the state between two saves.

    Args:
        every: steps from save to save.

    Attributes:
        seconds: of the batches after which a save was due, and of the memcpys, into memory that was used before.
    """

    def __init__(self, every: int) -> None:
        self.seconds: dict[str, list[float]] = {COPY: [], COPY_BESIDE: [], STALL: []}
        self._every = every
        self._ended = 0.0
        self._memory: torch.Tensor | None = None

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        self._ended = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if batch_idx and batch_idx % self._every == 0:
            self.seconds[STALL].append(now - self._ended)
        if batch_idx % self._every == self._every - 1:
            self._copy(trainer)

    def _copy(self, trainer: Trainer) -> None:
        state = trainer.optimizers[0].state
        tensors = [tensor for p, s in state.items() for tensor in (p, s["exp_avg"], s["exp_avg_sq"])]
        if self._memory is None:
            self._memory = map_memory(sum(tensor.nbytes for tensor in tensors))
            self._memory.fill_(1)
        places = itertools.accumulate((tensor.nbytes for tensor in tensors), initial=self._memory.data_ptr())
        pieces = [(to, tensor.data_ptr(), tensor.nbytes) for to, tensor in zip(places, tensors)]  # noqa: B905
        for name, parts in ((COPY, [pieces]), (COPY_BESIDE, [pieces[::2], pieces[1::2]])):
            with ThreadPoolExecutor(len(parts)) as pool:
                begun = time.perf_counter()
                list(pool.map(_move, parts))
                self.seconds[name].append(time.perf_counter() - begun)


def _move(pieces: list[tuple[int, int, int]]) -> None:
    for piece in pieces:
        ctypes.memmove(*piece)


def _fit(name: str, folder: Path, num_threads: int, sizes: dict[str, int]) -> dict[str, list[float]]:
    """Stalls and memcpys of one fit, without the first of each."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    module = _ManySmall(**sizes) if "num_tensors" in sizes else Transformer(**sizes)
    every = STEPS_APART if num_threads == 1 else STEPS_APART_IF_BUSY
    watch = _Watch(every)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        saving: Callback = AtomicResumeCallback(place, every_n_train_steps=every)
        plugins = []
        if name == THEIRS:
            saving = ModelCheckpoint(place, every_n_train_steps=every, save_top_k=-1)
            plugins = [AsyncCheckpointIO()]
        trainer = silent_trainer(NUM_SAVES * every + 1, [watch, saving], plugins=plugins)
        os.sync()
        trainer.fit(module, tokens(NUM_SAVES * every + 1))
    return {what: seconds[1:] for what, seconds in watch.seconds.items()}
