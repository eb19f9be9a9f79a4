"""What the figures were measured on, and what a process takes of it."""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import lightning
import safetensors
import torch


def sha256_rate(num_threads: int, num_bytes: int = 2**28) -> float:
    """GB of 10^9 bytes in a second, all threads together."""
    data = b"\1" * (num_bytes // num_threads)  # zeros would come from pages that are not there yet
    with ThreadPoolExecutor(num_threads) as pool:
        begun = time.perf_counter()
        list(pool.map(lambda _: hashlib.sha256(data).digest(), range(num_threads)))
        return num_bytes / 1e9 / (time.perf_counter() - begun)


def facts(folder: Path) -> dict[str, Any]:
    """Processor, memory, file system, versions, and how busy the machine is otherwise."""
    return {
        "date": date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _field("/proc/cpuinfo", "model name"),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "load_average": os.getloadavg()[0],
        "torch_threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "safetensors": safetensors.__version__,
            "lightning": lightning.__version__,
        },
        "sha256_gb_per_s": {str(count): round(sha256_rate(count), 2) for count in (1, 2)},
    }


def _field(path: str, name: str) -> str:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")


def _file_system(folder: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    fitting = [(point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(fitting, key=lambda pair: len(pair[0]))[1] if fitting else "unknown"


def settle_memory(num_bytes: int) -> None:
    """Takes so much memory and frees it, so that whoever takes some next finds what the machine really has.

    Free memory of a virtual machine goes back to its host after some seconds, and taking it anew costs several times as
    much: it would be chance which contender pays. What was freed last is taken first.
    """
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        block = b"\1" * mmap.PAGESIZE * 256
        for _ in range(num_bytes // len(block)):
            memory.write(block)


class PeakMemory:
    """How far this process's memory grows in a `with` block: `num_bytes` above what it had before."""

    num_bytes = 0

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
        self._before = self._read("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.num_bytes = max(0, self._read("VmHWM") - self._before)

    def _read(self, name: str) -> int:
        return int(_field("/proc/self/status", name).split()[0]) * 1024
