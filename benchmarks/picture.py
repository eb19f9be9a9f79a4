"""The figures as a picture: bars of time and memory, and the steps of a training that saves in the background."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.fits import COPY, OURS, THEIRS

BARS = {
    "raw O_DIRECT + fdatasync": "the plain disk",
    "torch.save + fsync": "torch.save",
    "save_file + fsync + sha256": "safetensors + sha256",
    "Lightning": "Lightning",
    "Lightning async": "Lightning async",
    "ours": "this package",
    "ours async, 1 thread": "this package, async",
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes the picture; its kind follows the file's ending."""
    figure, ((times, memory), (stalls, steps)) = pyplot.subplots(2, 2, figsize=(12, 7))
    save, names = report["big"]["save"], list(BARS)
    colors = ["0.7"] * (len(names) - 2) + ["tab:green"] * 2
    size = report["big"]["num_bytes"] / 1e9
    times.barh([BARS[name] for name in names], [statistics.median(save[name]) for name in names], color=colors)
    times.set(title=f"Until {size:.2f} GB are written", xlabel="seconds (median)")
    times.invert_yaxis()
    measured = [name for name in names if name in report["memory"]]
    memory.barh([BARS[name] for name in measured], [report["memory"][name] for name in measured], color="tab:blue")
    memory.set(title="Peak memory on top of the state", xlabel="times the state")
    memory.invert_yaxis()
    fits = report["fits"]["big"]
    waits = {
        "memcpy": fits[COPY],
        "Lightning": save["Lightning"],
        "Lightning async": fits[THEIRS],
        "this package, sync": save["ours"],
        "this package, async": fits[OURS],
    }
    stalls.barh(list(waits), [statistics.median(seconds) for seconds in waits.values()], color="tab:orange")
    stalls.set(title="What training waits for", xlabel="seconds (median)")
    stalls.invert_yaxis()
    timeline = report["big"]["timeline"]
    moments, seconds, _ = zip(*timeline["steps"], strict=True)
    steps.plot(moments, [1000 * value for value in seconds], ".", markersize=2)
    for begin, end in timeline["spans"]:
        steps.axvspan(begin, end, color="tab:green", alpha=0.2)
    for moment, value in timeline["stalls"]:
        steps.plot([moment], [1000 * value], "rx")
    steps.set(title="Steps; green: a save is written, red: its stall", xlabel="seconds", ylabel="ms", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
