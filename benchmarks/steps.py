"""What saving does to training: the time of each step while a save goes on behind it."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.saves import Saves
from lightning_resume.writer import BackgroundWriter


def matrix_step(width: int = 512) -> None:
    """A step of a CPU training loop: products on one thread, some 5 ms."""
    matrix = torch.full((width, width), 1e-3)
    for _ in range(2):
        matrix = matrix @ matrix


def timeline(saves: Saves, folder: Path, num_saves: int, rest_seconds: float) -> dict[str, Any]:
    """Trains on one thread, rests and saves in turn.

    Args:
        saves: the state; its image has been used once.
        folder: for the checkpoints.
        num_saves: how many.
        rest_seconds: undisturbed training before each save, and after the last one.

    Returns:
        Moment and length of every step and of every stall, moments between which a save was written, and the ratio of
        the median step while one is written to the median undisturbed step.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps: list[tuple[float, float, bool]] = []
    stalls: list[tuple[float, float]] = []
    spans: list[tuple[float, float]] = []
    done = threading.Event()
    done.set()
    begun = time.perf_counter()

    def train(until: float) -> None:
        while (now := time.perf_counter()) < until or not done.is_set():
            is_writing = not done.is_set()
            matrix_step()
            steps.append((now - begun, time.perf_counter() - now, is_writing))

    for number in range(num_saves):
        train(time.perf_counter() + rest_seconds)
        now = time.perf_counter()
        checkpoint = saves.prepare(folder / str(number))
        stalls.append((now - begun, time.perf_counter() - now))
        done.clear()
        writer = BackgroundWriter()

        def write(checkpoint: Any = checkpoint) -> None:
            try:
                checkpoint.commit(1)
            finally:
                done.set()

        written_from = time.perf_counter() - begun
        writer.submit(str(number), write)
        train(0.0)
        writer.wait()
        outcome = writer.collect()
        if outcome is not None and outcome.error is not None:
            raise outcome.error
        spans.append((written_from, time.perf_counter() - begun))
    train(time.perf_counter() + rest_seconds)
    torch.set_num_threads(threads)
    quiet, busy = ([seconds for _, seconds, is_writing in steps if is_writing is kind] for kind in (False, True))
    ratio = statistics.median(busy) / statistics.median(quiet) if busy else None
    return {"steps": steps, "stalls": stalls, "spans": spans, "step_ratio": ratio}
