"""What saving does to training: the time of each step while a save goes on behind it."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.saves import Saves
from lightning_resume.format.prepared import PreparedCheckpoint
from lightning_resume.writer import NICENESS, BackgroundWriter


def matrix_step(width: int = 512) -> None:
    """A step of a CPU training loop: products on one thread, some 5 ms."""
    matrix = torch.full((width, width), 1e-3)
    for _ in range(2):
        matrix = matrix @ matrix


class Behind(Protocol):
    """What writes a checkpoint behind training."""

    def start(self, checkpoint: PreparedCheckpoint) -> None:
        """Begins; training waits for that."""

    def is_done(self) -> bool:
        """Whether it has ended."""

    def finish(self) -> None:
        """Raises what went wrong, if anything."""


class InThread:
    """As this package does it."""

    def start(self, checkpoint: PreparedCheckpoint) -> None:
        """Begins."""
        self._writer = BackgroundWriter()
        self._writer.submit("save", lambda: checkpoint.commit(1))

    def is_done(self) -> bool:
        """Whether it has ended."""
        return not self._writer.is_busy

    def finish(self) -> None:
        """Raises what went wrong, if anything."""
        outcome = self._writer.collect()
        if outcome is not None and outcome.error is not None:
            raise outcome.error


class InProcess:
    """In a forked process, which has the image in common with this one. It could not tell what it has written."""

    def start(self, checkpoint: PreparedCheckpoint) -> None:
        """Begins."""
        self._pid, self._status = os.fork(), -1
        if self._pid == 0:
            try:
                os.nice(NICENESS)
                checkpoint.commit(1)
                os._exit(0)
            finally:
                os._exit(1)

    def is_done(self) -> bool:
        """Whether it has ended."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._status = status
        return bool(pid)

    def finish(self) -> None:
        """Raises what went wrong, if anything."""
        if self._status != 0:
            raise RuntimeError(f"the forked process ended with {self._status}")


def timeline(saves: Saves, behind: Behind, folder: Path, num_saves: int, rest_seconds: float) -> dict[str, Any]:
    """Trains on one thread, rests and saves in turn.

    Args:
        saves: the state; its image has been used once.
        behind: writes.
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
    begun = time.perf_counter()

    def step(is_writing: bool) -> None:
        now = time.perf_counter()
        matrix_step()
        steps.append((now - begun, time.perf_counter() - now, is_writing))

    def rest() -> None:
        until = time.perf_counter() + rest_seconds
        while time.perf_counter() < until:
            step(is_writing=False)

    for number in range(num_saves):
        rest()
        now = time.perf_counter()
        behind.start(saves.prepare(folder / str(number)))
        stalls.append((now - begun, time.perf_counter() - now))
        while not behind.is_done():
            step(is_writing=True)
        behind.finish()
        spans.append((sum(stalls[-1]), time.perf_counter() - begun))
    rest()
    torch.set_num_threads(threads)
    quiet, busy = ([seconds for _, seconds, is_writing in steps if is_writing is kind] for kind in (False, True))
    ratio = statistics.median(busy) / statistics.median(quiet) if busy else None
    return {"steps": steps, "stalls": stalls, "spans": spans, "step_ratio": ratio}
