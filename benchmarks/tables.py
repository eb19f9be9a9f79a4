"""The figures as text: seconds, ratios, and what was promised of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

Promise = tuple[str, float, float]  # what, the ratio, its limit


def median(seconds: dict[str, list[float]], name: str) -> float:
    """Median seconds of a contender."""
    return statistics.median(seconds[name])


def promises(report: dict[str, Any]) -> Iterator[Promise]:
    """Every ratio that has a limit."""
    machine, memory = report["machine"], report["memory"]
    big, small, adapters = (report[name]["save"] for name in ("big", "small", "adapters"))
    num_bytes, timeline = report["big"]["num_bytes"], report["big"]["timeline"]
    ours, raw = median(big, "ours"), median(big, "raw O_DIRECT + fdatasync")
    rate = machine["sha256_gb_per_s"]["1"]
    limit = raw if rate >= 0.8 else max(raw, num_bytes / 1e9 / machine["sha256_gb_per_s"]["2"])
    yield "save / O_DIRECT (or sha256, where that is slow)", ours / limit, 1.2
    yield "save / buffered write + fsync", ours / median(big, "buffered write + fsync"), 0.85
    yield "save / Lightning", ours / median(big, "Lightning"), 0.35
    yield "save / (save_file + fsync + sha256)", ours / median(big, "save_file + fsync + sha256"), 0.45
    yield "save: peak memory in MB", memory["ours"] * num_bytes / 1e6, 80
    yield "small: save / torch.save", median(small, "ours") / median(small, "torch.save + fsync"), 0.1
    stall, copy = median(big, "ours async, 1 thread: stall"), median(big, "memcpy")
    yield "stall / memcpy", stall / copy, 1.2
    yield "stall / Lightning async's", stall / median(big, "Lightning async: stall"), 0.33
    small_stall = median(small, "ours async, 1 thread: stall")
    yield "small: stall / Lightning async's", small_stall / median(small, "Lightning async: stall"), 0.4
    yield "step while a save is written / undisturbed", timeline["step_ratio"] or 0.0, 1.1
    yield "async: peak memory / (state + 64 MB)", memory["ours async, 1 thread"] * num_bytes / (num_bytes + 64e6), 1.05
    yield "async, 1 thread: write / O_DIRECT", median(big, "ours async, 1 thread: write") / raw, 1.5
    yield "async, 2 threads: write / O_DIRECT", median(big, "ours async, 2 threads: write") / raw, 1.25
    yield "a save every minute: % of the time", _percent_of_a_minute(report), 1.0
    yield "adapters: bytes written / trained bytes", report["adapters"]["written_ratio"], 1.05
    yield "adapters: linked save / full save", median(adapters, "linked save") / median(adapters, "full save"), 0.4
    stall, copy = median(adapters, "linked save: stall"), median(adapters, "memcpy of what is trained")
    yield "adapters: stall / (1.2 memcpy of what is trained + 10 ms)", stall / (1.2 * copy + 0.01), 1.0
    for name, ratio in (("big", 0.8), ("small", 0.15)):
        load = report[name]["load"]
        ours = median(load, "ours, verified, into live tensors")
        yield f"{name}: verified load / torch.load", ours / median(load, "torch.load, into live tensors"), ratio
        yield f"{name}: verified load / sha256 pass", ours / median(load, "sha256 pass on 2 threads"), 1.3
    load = report["big"]["load"]
    yield "verified load / raw read, both cold", median(load, "ours, cold") / median(load, "raw read, cold"), 1.35
    yield "load: peak memory / state", memory["a load"], 1.05
    yield "weights only: bytes read / weights", report["big"]["weights_read_ratio"], 1.05
    yield "planning 100,000 tensors: seconds", report["planning_seconds_100k"], 2.0


def _percent_of_a_minute(report: dict[str, Any]) -> float:
    """Computed: the stall, and the slow-down while a save is written."""
    timeline = report["big"]["timeline"]
    stall = statistics.median(seconds for _, seconds in timeline["stalls"])
    written = statistics.median(end - begin for begin, end in timeline["spans"])
    slowed = written * (1 - 1 / max(timeline["step_ratio"] or 1.0, 1.0))
    return float(100 * (stall + slowed) / 60)


def as_text(report: dict[str, Any]) -> str:
    """Tables of all contenders and promises."""
    machine = report["machine"]
    rates = ", ".join(f"{rate} GB/s on {count}" for count, rate in machine["sha256_gb_per_s"].items())
    lines = [f"sha256: {rates} thread(s)"]
    lines.append(f"{machine['date']}, {machine['cores']} cores of {machine['processor']}, {machine['file_system']}")
    lines.append(f"load average {machine['load_average']:.1f}, torch {machine['versions']['torch']}")
    for name, against in (("big", "raw O_DIRECT + fdatasync"), ("small", "torch.save + fsync")):
        lines += _table(f"{name}: {report[name]['num_bytes'] / 1e6:.0f} MB, saving", report[name]["save"], against)
        lines += _table(f"{name}: loading", report[name]["load"], "torch.load, into live tensors")
    adapters = report["adapters"]
    lines += _table(f"adapters: {adapters['num_bytes'] / 1e6:.0f} MB, saving", adapters["save"], "full save")
    lines += ["", "peak memory of a save (and of a load) / state"]
    lines += [f"  {name:44}{ratio:8.2f}" for name, ratio in report["memory"].items()]
    lines += ["", f"{'a save by size: MB':22}{'s':>9}{'s per GB':>10}{'extra MB':>10}{'files':>7}"]
    for row in report["scale"]:
        gigabytes = row["num_bytes"] / 1e9
        lines.append(
            f"  {1000 * gigabytes:20.0f}{row['seconds']:9.3f}{row['seconds'] / gigabytes:10.2f}"
            f"{row['memory_bytes'] / 1e6:10.1f}{row['num_files']:7.0f}"
        )
    lines += ["", f"{'promised of medians':58}{'found':>10}{'limit':>8}"]
    for what, found, limit in promises(report):
        lines.append(f"  {what:56}{found:10.2f}{limit:8.2f}  {'' if found <= limit else 'MISSED'}".rstrip())
    return "\n".join(lines)


def _table(title: str, seconds: dict[str, list[float]], against: str) -> list[str]:
    reference = median(seconds, against)
    lines = ["", f"{title:46}{'min s':>9}{'median s':>10}{'ratio':>8}"]
    for name, values in seconds.items():
        middle = statistics.median(values)
        lines.append(f"  {name:44}{min(values):9.3f}{middle:10.3f}{middle / reference:8.2f}")
    return lines
