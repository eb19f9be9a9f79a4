"""The contenders that load a state into tensors that are there, from files that the page cache holds.

A model and its optimizer take it over as a resume does (`states.resume`), tensors without them by a copy of each; that
is how `load_file` does it in every case, as its files have no nesting.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.machine import settle_memory
from benchmarks.states import State, bytes_of, tensors_of
from lightning_resume.format.checkpoint import read_checkpoint, write_checkpoint

BLOCK_BYTES = 4 * 2**20


class Loads:
    """Files of one state, and the contenders that read them.

    Args:
        state: is saved in each format first, and loaded into.
        folder: for the files.
        take_over: brings a loaded state to where it is used; by default each tensor is copied.
    """

    def __init__(self, state: State, folder: Path, take_over: Callable[[State], None] | None = None) -> None:
        self.state, self.folder, self.take_over = state, folder, take_over or self._copy
        self.live = dict(tensors_of(state))
        torch.save(state, folder / "state.pt")
        save_file({name: tensor.contiguous() for name, tensor in self.live.items()}, folder / "state.safetensors")
        write_checkpoint(folder / "ours", state)

    def files(self) -> list[Path]:
        """Every file of ours."""
        return list((self.folder / "ours").iterdir())

    def torch_load(self, folder: Path) -> None:
        self.take_over(torch.load(self.folder / "state.pt", weights_only=True))

    def load_file(self, folder: Path) -> None:
        self._copy(load_file(self.folder / "state.safetensors"))

    def raw_read(self, folder: Path) -> None:
        _read(self.files())

    def sha256_pass(self, folder: Path) -> None:
        hash_files(self.files())

    def ours(self, folder: Path) -> None:
        self.take_over(read_checkpoint(self.folder / "ours"))

    def ours_unverified(self, folder: Path) -> None:
        self.take_over(read_checkpoint(self.folder / "ours", verify=False))

    def contenders(self) -> dict[str, Callable[[Path], None]]:
        """By name, in the order of their turns."""
        return {
            "raw read": self.raw_read,
            "sha256 pass on 2 threads": self.sha256_pass,
            "torch.load, into live tensors": self.torch_load,
            "load_file, into live tensors": self.load_file,
            "ours, not verified, into live tensors": self.ours_unverified,
            "ours, verified, into live tensors": self.ours,
        }

    def cold(self) -> dict[str, Callable[[Path], None]]:
        """Two of them, for turns that begin with `forget`."""
        return {"raw read, cold": self.raw_read, "ours, cold": self.ours}

    def forget(self) -> None:
        """Leaves nothing of the files in the page cache; memory for them is there."""
        for path in self.files():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        settle_memory(4 * bytes_of(self.state))

    def weights_read_ratio(self) -> float:
        """Bytes that are read for the weights alone, in relation to their size."""
        before = _bytes_read()
        read_checkpoint(self.folder / "ours", keys={"state_dict"})
        return (_bytes_read() - before) / sum(tensor.nbytes for tensor in self.state["state_dict"].values())

    def _copy(self, loaded: State) -> None:
        with torch.no_grad():
            for name, tensor in tensors_of(loaded):
                self.live[name].copy_(tensor)


def hash_files(paths: Iterable[Path]) -> None:
    """Takes the SHA-256 of all files, on two threads: the longest first, each thread takes the next one."""
    longest_first = sorted(paths, key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda path: _read([path], hashlib.sha256()), longest_first))


def _read(paths: Iterable[Path], digest: hashlib._Hash | None = None) -> None:
    block = bytearray(BLOCK_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # quicker where the files are not cached
            while count := file.readinto(block):
                if digest is not None:
                    digest.update(memoryview(block)[:count])


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])
