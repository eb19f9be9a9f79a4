"""What a resume waits for: a state is loaded once, by a process that has just begun.

Its model is there, its optimizer has no moments yet, and the memory for what is loaded is all new: the system has to
find and to clear each page. In a process that loads again and again (`loads`), an allocator hands out what it has kept.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import torch

from benchmarks.loads import hash_files
from benchmarks.machine import settle_memory
from benchmarks.new_process import in_new_process
from benchmarks.states import resume, state_of, trained, transformer
from lightning_resume.format.checkpoint import read_checkpoint, write_checkpoint

HASHING, THEIRS, OURS = "sha256 pass on 2 threads", "torch.load", "ours, verified"


def measure_resumes(folder: Path, rounds: int, width: int, num_layers: int) -> dict[str, list[float]]:
    """Seconds of each contender, in turns, from files that the page cache holds."""
    place = folder / "resumes"
    place.mkdir()
    state = state_of(*trained(width, num_layers))
    torch.save(state, place / "state.pt")
    write_checkpoint(place / "ours", state)
    del state
    os.sync()
    hash_files((place / "ours").iterdir())  # they were written past the page cache
    seconds: dict[str, list[float]] = {name: [] for name in (HASHING, THEIRS, OURS)}
    for _ in range(rounds):
        for name, values in seconds.items():
            values.append(in_new_process(_load_once, name, place, width, num_layers))
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
