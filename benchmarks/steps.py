"""What saving does to training: the time of each step while a save goes on behind it."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.saves import Saves
from benchmarks.states import tensors_of
from lightning_resume.format.prepared import prepare_checkpoint
from lightning_resume.writer import NICENESS, BackgroundWriter


def matrix_step(width: int = 512) -> None:
    """A step of a CPU training loop: products on one thread, some 5 ms."""
    matrix = torch.full((width, width), 1e-3)
    for _ in range(2):
        matrix = matrix @ matrix


class Behind(Protocol):
    """What writes a checkpoint behind training."""

    def start(self, saves: Saves, path: Path) -> None:
        """Begins; training waits for that. From then on the state may change."""

    def is_done(self) -> bool:
        """Whether it has ended."""

    def finish(self) -> None:
        """Raises what went wrong, if anything."""


class InThread:
    """As this package does it: out of a copy."""

    def start(self, saves: Saves, path: Path) -> None:
        """Begins."""
        checkpoint = saves.prepare(path)
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
    """In a forked process, which has the state as it was: a page that training changes is copied first."""

    def start(self, saves: Saves, path: Path) -> None:
        """Begins."""
        self._pid, self._status = os.fork(), -1
        if self._pid == 0:
            try:
                os.nice(NICENESS)
                torch.set_num_threads(1)
                prepare_checkpoint(path, saves.state).commit(1)
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
        Moment and length of every step and of every stall, moments between which a save was written, and two ratios of
        medians, while one is written to undisturbed: of a step (None if all was written before the first one), and of
        an update of the whole state, the first one after the stall.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps: list[tuple[float, float, bool]] = []
    stalls: list[tuple[float, float]] = []
    spans: list[tuple[float, float]] = []
    updates: dict[bool, list[float]] = {False: [], True: []}
    tensors = [tensor for _, tensor in tensors_of(saves.state)]
    begun = time.perf_counter()

    def update(is_writing: bool) -> None:
        now = time.perf_counter()
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(1)
        updates[is_writing].append(time.perf_counter() - now)

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
        update(is_writing=False)
        now = time.perf_counter()
        behind.start(saves, folder / str(number))
        stalls.append((now - begun, time.perf_counter() - now))
        update(is_writing=True)
        while not behind.is_done():
            step(is_writing=True)
        behind.finish()
        spans.append((sum(stalls[-1]), time.perf_counter() - begun))
    rest()
    torch.set_num_threads(threads)
    quiet, busy = ([seconds for _, seconds, is_writing in steps if is_writing is kind] for kind in (False, True))
    ratio = statistics.median(busy) / statistics.median(quiet) if busy else None
    slower = statistics.median(updates[True]) / statistics.median(updates[False])
    return {"steps": steps, "stalls": stalls, "spans": spans, "step_ratio": ratio, "update_ratio": slower}
