"""The contenders that save a state. Each is called with an empty folder, and may return parts of its time by name."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO
from safetensors.torch import save_file

from benchmarks.states import State, tensors_of
from lightning_resume.format.image import Image
from lightning_resume.format.memory import map_memory
from lightning_resume.format.plans import PlanCache
from lightning_resume.format.prepared import PreparedCheckpoint, prepare_checkpoint

BLOCK_BYTES = 8 * 2**20
Contender = Callable[[Path], dict[str, float] | None]


class Raw:
    """What the hardware can do with as many bytes, in memory that was used before: large pages, the fastest there is.

    Out of pages of 4 KiB a disk is written to more slowly: 0.52 s in place of 0.41 s for 0.95 GB, past the page cache.
    """

    def __init__(self, num_bytes: int) -> None:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._from, self._to = (map_memory(size).numpy() for _ in range(2))
        self._from.fill(1)
        self._to.fill(2)

    def copy(self, folder: Path) -> None:
        """One memcpy on one thread."""
        np.copyto(self._to, self._from)

    def copy_beside(self, folder: Path) -> None:
        """The same on two threads, half each."""
        half = len(self._to) // 2
        halves = (slice(None, half), slice(half, None))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda part: np.copyto(self._to[part], self._from[part]), halves))

    def hash(self, folder: Path) -> None:
        """sha256 of memory on one thread."""
        hashlib.sha256(self._from).digest()

    def hash_beside(self, folder: Path) -> None:
        """The same on two threads, half each."""
        half = len(self._from) // 2
        view = memoryview(self._from)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda part: hashlib.sha256(part).digest(), (view[:half], view[half:])))

    def write_direct(self, folder: Path) -> None:
        """One file past the page cache, where the file system has that, and fdatasync."""
        fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        self._write(fd)

    def write_buffered(self, folder: Path) -> None:
        """One file through the page cache, and fsync."""
        self._write(os.open(folder / "raw", os.O_WRONLY | os.O_CREAT))

    def _write(self, fd: int) -> None:
        view = memoryview(self._from)
        for begin in range(0, len(view), BLOCK_BYTES):
            os.write(fd, view[begin : begin + BLOCK_BYTES])
        os.fdatasync(fd)
        os.close(fd)


def sync(path: Path) -> None:
    """Makes a file that another library wrote durable."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class Saves:
    """All contenders for one state.

    Args:
        state: what is saved.
        frozen: names in it that are expected not to change.
    """

    def __init__(self, state: State, frozen: list[str] | None = None) -> None:
        self.state, self.frozen = state, frozen or []
        self.image, self.plans, self.sync_plans = Image(), PlanCache(), PlanCache()

    def torch_save(self, folder: Path) -> None:
        torch.save(self.state, folder / "state.pt")
        sync(folder / "state.pt")

    def save_file(self, folder: Path) -> None:
        path = folder / "state.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors_of(self.state)}, path)
        sync(path)
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)

    def lightning(self, folder: Path) -> None:
        TorchCheckpointIO().save_checkpoint(self.state, folder / "state.ckpt")

    def lightning_async(self, folder: Path) -> dict[str, float]:
        writer = AsyncCheckpointIO(TorchCheckpointIO())
        begun = time.perf_counter()
        writer.save_checkpoint(self.state, folder / "state.ckpt")
        stall = time.perf_counter() - begun
        writer.teardown()
        return {"stall": stall}

    def ours(self, folder: Path) -> None:
        prepare_checkpoint(folder / "ours", self.state, plans=self.sync_plans).commit()

    def prepare(self, path: Path) -> PreparedCheckpoint:
        """The part that training waits for."""
        if not self.frozen:  # as if it had been trained meanwhile: nothing is to be linked
            self.image.kept.clear()
        checkpoint = prepare_checkpoint(path, self.state, frozen=self.frozen, plans=self.plans)
        checkpoint.copy_into(self.image, compare_later=True)
        return checkpoint

    def ours_in_background(self, folder: Path, num_threads: int) -> dict[str, float]:
        begun = time.perf_counter()
        checkpoint = self.prepare(folder / "ours")
        stall = time.perf_counter() - begun
        checkpoint.commit(num_threads)
        return {"stall": stall, "write": time.perf_counter() - begun - stall}

    def contenders(self, raw: Raw) -> dict[str, Contender]:
        """By name, in the order of their turns."""
        return {
            "memcpy": raw.copy,
            "memcpy, 2 threads": raw.copy_beside,
            "sha256": raw.hash,
            "sha256, 2 threads": raw.hash_beside,
            "raw O_DIRECT + fdatasync": raw.write_direct,
            "buffered write + fsync": raw.write_buffered,
            "torch.save + fsync": self.torch_save,
            "save_file + fsync + sha256": self.save_file,
            "Lightning": self.lightning,
            "Lightning async": self.lightning_async,
            "ours": self.ours,
            "ours async, 1 thread": lambda folder: self.ours_in_background(folder, 1),
            "ours async, 2 threads": lambda folder: self.ours_in_background(folder, 2),
        }


def take_turns(
    contenders: dict[str, Contender], folder: Path, num_rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """A B C A B C …, each with an empty folder on a disk that is at rest; seconds by name, the first round left out.

    Args:
        contenders: by name.
        folder: for the files.
        num_rounds: that are measured.
        before: is called before each turn, and not measured.
    """
    seconds: dict[str, list[float]] = {}
    for number in range(num_rounds + 1):
        for name, contender in contenders.items():
            place = folder / "turn"
            place.mkdir()
            before()
            os.sync()
            begun = time.perf_counter()
            parts = contender(place)
            parts = {name: time.perf_counter() - begun, **{f"{name}: {part}": s for part, s in (parts or {}).items()}}
            shutil.rmtree(place)
            for part, value in parts.items():
                if number:
                    seconds.setdefault(part, []).append(value)
    return seconds
