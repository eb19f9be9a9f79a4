"""What a resume waits for: a state is loaded once, by a process that has just begun.

Its model is there, its optimizer has no moments yet, and the memory for what is loaded is all new: the system has to
find and to clear each page. In a process that loads again and again (`loads`), an allocator hands out what it has kept.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.fits import Transformer, silent_trainer, tokens
from benchmarks.loads import hash_files
from benchmarks.machine import settle_memory
from benchmarks.new_process import in_new_process
from benchmarks.states import resume, state_of, trained, transformer
from lightning_resume import AtomicResumeCallback
from lightning_resume.format.checkpoint import read_checkpoint, write_checkpoint

HASHING, THEIRS, OURS = "sha256 pass on 2 threads", "torch.load", "ours, verified"
THEIR_FIT, OUR_FIT = "Lightning's fit, to its first batch", "ours, to its first batch"
STEPS = 2


def measure_resumes(folder: Path, rounds: int, width: int, num_layers: int) -> dict[str, list[float]]:
    """Seconds of each contender, in turns, from files that the page cache holds."""
    place = folder / "resumes"
    place.mkdir()
    state = state_of(*trained(width, num_layers))
    torch.save(state, place / "state.pt")
    write_checkpoint(place / "ours", state)
    del state
    for name in (THEIR_FIT, OUR_FIT):
        in_new_process(_save_in_fit, name, place, width, num_layers)
    os.sync()
    for written in (place / "ours", place / OUR_FIT / f"step-{STEPS:08d}"):
        hash_files(written.iterdir())  # they were written past the page cache
    seconds: dict[str, list[float]] = {name: [] for name in (HASHING, THEIRS, OURS, THEIR_FIT, OUR_FIT)}
    for _ in range(rounds):
        for name, values in seconds.items():
            load = _go_on_in_fit if name in (THEIR_FIT, OUR_FIT) else _load_once
            values.append(in_new_process(load, name, place, width, num_layers))
    shutil.rmtree(place)
    return seconds


def _load_once(name: str, folder: Path, width: int, num_layers: int) -> float:
    model = transformer(width, num_layers)
    optimizer = torch.optim.AdamW(model.parameters())
    settle_memory(12 * sum(parameter.nbytes for parameter in model.parameters()))  # four times what is loaded
    begun = time.perf_counter()
    if name == HASHING:
        hash_files((folder / "ours").iterdir())
    elif name == THEIRS:
        resume(model, optimizer, torch.load(folder / "state.pt", weights_only=True))
    else:
        resume(model, optimizer, read_checkpoint(folder / "ours"))
    return time.perf_counter() - begun


def _save_in_fit(name: str, folder: Path, width: int, num_layers: int) -> None:
    saving: Callback = AtomicResumeCallback(folder / name, every_n_train_steps=STEPS)
    if name == THEIR_FIT:
        saving = ModelCheckpoint(folder / name, filename="state", every_n_train_steps=STEPS)
    silent_trainer(STEPS, [saving]).fit(Transformer(width, num_layers), tokens(STEPS + 1))


def _go_on_in_fit(name: str, folder: Path, width: int, num_layers: int) -> float:
    """From the call of `fit` to the beginning of the first batch; without a checkpoint that is nothing."""
    module, first = Transformer(width, num_layers), _FirstBatch()
    callbacks: list[Callback] = [first]
    path = str(folder / name / "state.ckpt")
    if name == OUR_FIT:
        path = "last"
        callbacks.append(AtomicResumeCallback(folder / name, save_on_train_end=False))
    trainer = silent_trainer(STEPS + 1, callbacks, enable_checkpointing=name == OUR_FIT)
    settle_memory(12 * sum(parameter.nbytes for parameter in module.parameters()))
    begun = time.perf_counter()
    trainer.fit(module, tokens(STEPS + 1), ckpt_path=path, weights_only=True)
    return first.moment - begun


class _FirstBatch(Callback):
    moment = 0.0

    def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        self.moment = time.perf_counter()
