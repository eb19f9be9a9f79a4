"""Memory by its address: gathered from many pieces, in large pages, apart from children; and as well without."""

from __future__ import annotations

import mmap
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_resume.format import memory


@pytest.mark.parametrize("answer", [None, -1, 3, "real"], ids=["no such call", "forbidden", "stops early", "as it is"])
def test_pieces_stand_one_behind_the_other(answer: Any, monkeypatch: Any) -> None:
    """Whatever the system's call does; nothing before or after the place is touched."""
    if answer is None:
        monkeypatch.setattr(memory, "_write_pieces", None)
    elif answer != "real":
        monkeypatch.setattr(memory, "_write_pieces", lambda *arguments: answer)
    generator = np.random.default_rng(0)
    pieces = [generator.integers(0, 256, size, np.uint8) for size in (1, 5000, 17, 4096, 100_003)]
    expected = np.concatenate(pieces)
    place = np.full(expected.size + 20, 7, np.uint8)

    listed = memory.list_pieces([piece.ctypes.data for piece in pieces], [piece.size for piece in pieces])
    memory.gather_memory(place.ctypes.data + 10, listed, expected.size)

    assert np.array_equal(place[10:-10], expected)
    assert set(place[:10]) == set(place[-10:]) == {7}


def test_as_many_pieces_as_the_system_takes_are_gathered() -> None:
    """At the limit of one call."""
    source = np.arange(memory.MAX_PIECES * 3, dtype=np.uint8)
    place = np.zeros_like(source)

    addresses = [source.ctypes.data + 3 * number for number in range(memory.MAX_PIECES)]
    memory.gather_memory(place.ctypes.data, memory.list_pieces(addresses, [3] * memory.MAX_PIECES), source.size)

    assert np.array_equal(place, source)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and forks")
has_large_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without large pages"
)
MIB = 2**20


@pytest.mark.parametrize("num_bytes", [1, 4096, 2 * MIB - 1, 2 * MIB, 5 * MIB + 7])
@pytest.mark.parametrize("answer", ["as it is", "no wiping", "no large pages"])
def test_mapped_memory_is_zeros_at_a_page(num_bytes: int, answer: str, monkeypatch: Any) -> None:
    """Whatever the system grants; all of it can be written to."""

    class Grudging(mmap.mmap):
        def madvise(self, advice: int, *place: int) -> None:
            if answer == "no wiping" or (answer == "no large pages" and advice == mmap.MADV_HUGEPAGE):
                raise OSError(22, "Invalid argument")
            super().madvise(advice, *place)

    monkeypatch.setattr(mmap, "mmap", Grudging)

    place = memory.map_memory(num_bytes)

    assert (place.dtype, tuple(place.shape)) == (torch.uint8, (num_bytes,))
    assert place.data_ptr() % mmap.PAGESIZE == 0
    assert not place.any()
    assert bool((place.fill_(255) == 255).all())


@on_linux
@has_large_pages
def test_mapped_memory_is_to_be_of_large_pages_that_no_child_gets() -> None:
    """By the flags that the kernel keeps of it: "hg" (large pages), "wf" (wiped on fork)."""
    place = memory.map_memory(4 * MIB)

    assert {"hg", "wf"} <= _flags_at(place.data_ptr())
    assert place.data_ptr() % memory.LARGE_PAGE_BYTES == 0


@on_linux
@pytest.mark.parametrize("may_wipe", [True, False])
def test_a_childs_memory_costs_the_parent_nothing(may_wipe: bool, monkeypatch: Any) -> None:
    """A page that is copied on write would be a fault for each, and twice the memory; what is written stays apart."""
    if not may_wipe:
        monkeypatch.setattr(memory, "_WIPE_ON_FORK", -1)
    place = memory.map_memory(8 * MIB).fill_(1)
    begin, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        os.read(begin, 1)  # lives while the parent writes
        os._exit(0)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    place.numpy()[:: mmap.PAGESIZE] = 2
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    os.write(end, b"x")
    os.waitpid(pid, 0)

    assert num_faults < 200  # of 2,048 pages
    os.close(begin)
    os.close(end)


def _flags_at(address: int) -> set[str]:
    """Flags of the mapping that an address is in."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(bound, 16) for bound in mapping.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return set(mapping.partition("VmFlags:")[2].split())
    raise AssertionError("no mapping")
