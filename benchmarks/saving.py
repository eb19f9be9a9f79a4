"""Saving and loading beside what else there is: the hardware, torch, safetensors, Lightning.

    python -m benchmarks                          1 GB and 20,000 small tensors, a quarter of an hour, 8 GB
    python -m benchmarks --quick                  a fortieth of it, under a minute: shows that it runs, and no more
    python -m benchmarks --folder /mnt/disk       where the files go; a temporary folder by default

All contenders take turns (A B C A B C …) in one process, on a disk that is at rest; peak memory, what a resume waits
for, and what a training in Lightning's loop waits for at a save, are taken in processes of their own. Only ratios
within one run mean anything, and only where nothing else runs: a plain write waits for the disk, hashing waits for a
core. `--json` and `--picture` write the figures to files.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.fits import measure_fits
from benchmarks.loads import Loads
from benchmarks.machine import PeakMemory, facts
from benchmarks.new_process import in_new_process
from benchmarks.resumes import measure_resumes
from benchmarks.saves import Raw, Saves, take_turns
from benchmarks.states import State, adapted_state, big_state, bytes_of, resume, small_state, state_of, trained
from benchmarks.steps import InProcess, InThread, timeline
from lightning_resume.format.checkpoint import read_checkpoint
from lightning_resume.format.prepared import prepare_checkpoint

MAX_RESUMES = 5  # each in a process that begins for it: some seconds
OTHERS = ("torch.save + fsync", "save_file + fsync + sha256", "Lightning", "Lightning async")
OURS = ("ours", "ours async, 1 thread")


def run(options: Namespace) -> dict[str, Any]:
    """All figures."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    sizes = {"width": 256, "num_layers": 2} if options.quick else {"width": 768, "num_layers": 11}
    rounds = options.rounds or (1 if options.quick else 7)
    folder = Path(tempfile.mkdtemp(prefix="lightning_resume-", dir=options.folder))
    report: dict[str, Any] = {"machine": facts(folder), "quick": options.quick, "rounds": rounds}
    try:
        rest_seconds = 0.2 if options.quick else 3.0
        live = trained(**sizes)
        take_over = functools.partial(resume, *live)
        report["big"] = measure_state(state_of(*live), folder, rounds, rest_seconds, take_over)
        del live, take_over
        report["resume"] = measure_resumes(folder, min(rounds, MAX_RESUMES), **sizes)
        report["fits"] = measure_all_fits(folder, rounds, is_quick=options.quick, **sizes)
        report["small"] = measure_state(small_state(500 if options.quick else 20_000), folder, rounds, rest_seconds)
        report["adapters"] = measure_adapters(folder, rounds, **sizes)
        layers = (1,) if options.quick else (1, 11, 46)
        report["scale"] = [measure_scale(sizes["width"], number, folder) for number in layers]
        report["planning_seconds_100k"] = seconds_to_plan(1000 if options.quick else 100_000)
        measured = OURS if options.quick else (*OTHERS, *OURS)
        report["memory"] = {name: peak_memory(name, sizes, folder) for name in measured}
        report["memory"]["a load"] = in_new_process(_peak_of_load, sizes, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def measure_state(
    state: State,
    folder: Path,
    rounds: int,
    rest_seconds: float,
    take_over: Callable[[State], None] | None = None,
) -> dict[str, Any]:
    """One state: saved and loaded by all contenders.

    With `take_over` it is that of a model, which is trained while it is saved, and takes over what is loaded.
    """
    raw, saves = Raw(bytes_of(state)), Saves(state)
    result: dict[str, Any] = {"num_bytes": bytes_of(state), "save": take_turns(saves.contenders(raw), folder, rounds)}
    del raw
    if take_over is not None:
        for name, behind in (("timeline", InThread()), ("timeline of a process", InProcess())):
            place = folder / "timeline"
            place.mkdir()
            result[name] = timeline(saves, behind, place, 3, rest_seconds)
            shutil.rmtree(place)
    saves.image = None  # type: ignore[assignment]
    gc.collect()
    place = folder / "loads"
    place.mkdir()
    loads = Loads(state, place, take_over)
    result["load"] = take_turns(loads.contenders(), folder, rounds)
    if take_over is not None:
        result["load"] |= take_turns(loads.cold(), folder, rounds, loads.forget)
    result["weights_read_ratio"] = loads.weights_read_ratio()
    shutil.rmtree(place)
    return result


def measure_all_fits(folder: Path, rounds: int, *, is_quick: bool, **sizes: int) -> dict[str, dict[str, list[float]]]:
    """Stalls in fits of the two states, with torch on one thread; of the large one on all cores too."""
    if is_quick:
        return {"big": measure_fits(folder, 1, 1, **sizes)}
    return {
        "big": measure_fits(folder, rounds, 1, **sizes),
        "big, all cores": measure_fits(folder, rounds, len(os.sched_getaffinity(0)), **sizes),
        "small": measure_fits(folder, rounds, 1, num_tensors=20_000),
    }


def measure_adapters(folder: Path, rounds: int, width: int, num_layers: int) -> dict[str, Any]:
    """A frozen model with adapters: full saves beside such that link what did not change."""
    # A frozen model of the size of weights and moments together.
    state, frozen = adapted_state(width, 3 * num_layers)
    trained = [tensor for name, tensor in state["state_dict"].items() if name not in frozen]
    raw, saves, full = Raw(sum(tensor.nbytes for tensor in trained)), Saves(state, frozen), Saves(state, frozen)
    place = folder / "adapters"
    place.mkdir()
    saves.prepare(place / "first").commit()
    written: list[float] = []

    def link(turn: Path) -> dict[str, float]:
        for tensor in trained:
            tensor.add_(1)
        begun = time.perf_counter()
        path = place / f"{len(list(place.iterdir()))}"
        checkpoint = saves.prepare(path)
        stall = time.perf_counter() - begun
        checkpoint.commit(1)
        new = sum(file.stat().st_size for file in path.iterdir() if file.stat().st_nlink == 1)
        written.append(new / sum(tensor.nbytes for tensor in trained))
        return {"stall": stall}

    def whole(turn: Path) -> None:
        full.image.kept.clear()
        full.ours_in_background(turn, 1)

    turns = {"memcpy of what is trained": raw.copy, "full save": whole, "linked save": link}
    seconds = take_turns(turns, folder, rounds)
    shutil.rmtree(place)
    return {"num_bytes": bytes_of(state), "save": seconds, "written_ratio": statistics.median(written)}


def seconds_to_plan(num_tensors: int) -> float:
    """Encoding and planning very many tensors of one number each."""
    state = {"state_dict": {f"layers.{number}.weight": torch.ones(1) for number in range(num_tensors)}}
    begun = time.perf_counter()
    prepare_checkpoint("never-written", state)
    return time.perf_counter() - begun


def peak_memory(name: str, sizes: dict[str, int], folder: Path) -> float:
    """Peak memory of a save on top of the state, in relation to the state; measured in a new process."""
    return in_new_process(_peak, name, sizes, folder)


def measure_scale(width: int, num_layers: int, folder: Path) -> dict[str, float]:
    """A save of another size, in a new process: bytes of the state, seconds, bytes of extra memory, files."""
    return in_new_process(_scale, width, num_layers, folder)


def _scale(width: int, num_layers: int, folder: Path) -> dict[str, float]:
    state, seconds = big_state(width, num_layers), []
    with tempfile.TemporaryDirectory(dir=folder) as place:
        prepare_checkpoint(Path(place) / "first", {"w": torch.ones(1)}).commit()
        with PeakMemory() as peak:
            for number in range(3):
                begun = time.perf_counter()
                index = prepare_checkpoint(Path(place) / str(number), state).commit()
                seconds.append(time.perf_counter() - begun)
                shutil.rmtree(Path(place) / str(number))
    figures = {"num_bytes": bytes_of(state), "seconds": min(seconds), "memory_bytes": peak.num_bytes}
    return {**figures, "num_files": len(index.files) + 1}


def _peak(name: str, sizes: dict[str, int], folder: Path) -> float:
    warnings.filterwarnings("ignore")
    state = big_state(**sizes)
    saves = Saves(state)
    small = Saves(small_state(10)).contenders(Raw(1))[name]
    contender = saves.contenders(Raw(1))[name]
    with tempfile.TemporaryDirectory(dir=folder) as first, tempfile.TemporaryDirectory(dir=folder) as second:
        small(Path(first))  # what is loaded on first use is no matter
        with PeakMemory() as peak:
            contender(Path(second))
    return peak.num_bytes / bytes_of(state)


def _peak_of_load(sizes: dict[str, int], folder: Path) -> float:
    """Memory of a verified load into a model and its optimizer, on top of them."""
    live = trained(**sizes)
    num_bytes = bytes_of(state_of(*live))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for name, state in (("small", small_state(10)), ("big", state_of(*live))):
            prepare_checkpoint(Path(place) / name, state).commit()
        del state
        read_checkpoint(Path(place) / "small")  # what is loaded on first use is no matter
        with PeakMemory() as peak:
            resume(*live, read_checkpoint(Path(place) / "big"))
    return peak.num_bytes / num_bytes


def write(report: dict[str, Any], path: Path) -> None:
    """Writes the figures as JSON."""
    path.write_text(json.dumps(_rounded(report), separators=(",", ":")) + "\n")


def _rounded(value: Any) -> Any:
    """Seconds to the hundredth of a millisecond: the clock says no more."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value
