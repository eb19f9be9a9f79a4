"""The figures as text: seconds, ratios, and what they should be at most."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.fits import COPY, COPY_BESIDE, OURS, THEIRS


class Promise(NamedTuple):
    """A ratio that has a limit.

    Attributes:
        what: the two that are compared.
        found: the ratio; nan if the run has not measured it.
        limit: what it should be at most.
        floor: what it would be at least on this machine, by what the same run has measured of the hardware; a limit
            below it was set on a machine with another balance of disk, memory and processor.
    """

    what: str
    found: float
    limit: float
    floor: float = 0.0

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if math.isnan(self.found):
            return "not measured"
        if self.found <= self.limit:
            return "kept"
        return f"out of reach here: {self.floor:.2f} at best" if self.floor > self.limit else "missed"


def median(seconds: dict[str, list[float]], name: str) -> float:
    """Median seconds of a contender."""
    return statistics.median(seconds[name])


def promises(report: dict[str, Any]) -> Iterator[Promise]:
    """Every ratio that has a limit."""
    yield from _of_saves(report)
    yield from _of_stalls(report)
    yield from _of_adapters(report["adapters"]["save"], report["adapters"]["written_ratio"])
    yield from _of_loads(report)
    yield Promise("planning 100,000 tensors: seconds", report["planning_seconds_100k"], 2.0)


def _of_saves(report: dict[str, Any]) -> Iterator[Promise]:
    big, small = report["big"]["save"], report["small"]["save"]
    ours, raw, hashing = (median(big, name) for name in ("ours", "raw O_DIRECT + fdatasync", "sha256, 2 threads"))
    # Every byte is hashed, and copied to where the disk takes it from, by two cores at most.
    floor = max(raw, hashing + median(big, "memcpy") / 2) / raw
    yield Promise("save / O_DIRECT", ours / raw, 1.2, floor)
    yield Promise("save / buffered write + fsync", ours / median(big, "buffered write + fsync"), 0.85)
    yield Promise("save / Lightning", ours / median(big, "Lightning"), 0.35)
    theirs = median(big, "save_file + fsync + sha256")
    yield Promise("save / (save_file + fsync + sha256)", ours / theirs, 0.45, floor * raw / theirs)
    yield Promise("save: peak memory in MB", report["memory"]["ours"] * report["big"]["num_bytes"] / 1e6, 80)
    yield Promise("small: save / torch.save", median(small, "ours") / median(small, "torch.save + fsync"), 0.1)


def _of_stalls(report: dict[str, Any]) -> Iterator[Promise]:
    big, timeline = report["big"]["save"], report["big"]["timeline"]
    for name, of in (("big", ""), ("big, all cores", ", torch on all cores")):
        if name in report["fits"]:
            fit = report["fits"][name]
            stall, theirs, copy, beside = (median(fit, who) for who in (OURS, THEIRS, COPY, COPY_BESIDE))
            yield Promise(f"stall / memcpy{of}", stall / copy, 1.2)
            yield Promise(f"stall / Lightning async's{of}", stall / theirs, 0.33, beside / theirs)
    if "small" in report["fits"]:
        stall, theirs = (median(report["fits"]["small"], who) for who in (OURS, THEIRS))
        yield Promise("small: stall / Lightning async's", stall / theirs, 0.4)
    yield Promise("step while a save is written / undisturbed", _step_ratio(timeline), 1.1)
    num_bytes = report["big"]["num_bytes"]
    memory = report["memory"]["ours async, 1 thread"] * num_bytes / (num_bytes + 64e6)
    yield Promise("async: peak memory / (state + 64 MB)", memory, 1.05)
    raw = median(big, "raw O_DIRECT + fdatasync")
    for threads, name, limit in (("1 thread", "sha256", 1.5), ("2 threads", "sha256, 2 threads", 1.25)):
        found = median(big, f"ours async, {threads}: write") / raw
        yield Promise(f"async, {threads}: write / O_DIRECT", found, limit, median(big, name) / raw)
    yield Promise("a save every minute: % of the time", _percent_of_a_minute(report), 1.0)


def _of_adapters(seconds: dict[str, list[float]], written_ratio: float) -> Iterator[Promise]:
    yield Promise("adapters: bytes written / trained bytes", written_ratio, 1.05)
    ratio = median(seconds, "linked save") / median(seconds, "full save")
    yield Promise("adapters: linked save / full save", ratio, 0.4)
    stall, copy = median(seconds, "linked save: stall"), median(seconds, "memcpy of what is trained")
    yield Promise("adapters: stall / (1.2 memcpy of what is trained + 10 ms)", stall / (1.2 * copy + 0.01), 1.0)


def _of_loads(report: dict[str, Any]) -> Iterator[Promise]:
    big, small = report["big"]["load"], report["small"]["load"]
    names = ("ours, verified, into live tensors", "torch.load, into live tensors", "sha256 pass on 2 threads")
    ours, theirs, hashing = (median(big, name) for name in names)
    yield Promise("verified load / torch.load", ours / theirs, 0.8, hashing / theirs)
    yield Promise("verified load / sha256 pass", ours / hashing, 1.3)
    ours, theirs = (median(small, name) for name in names[:2])
    yield Promise("small: verified load / torch.load", ours / theirs, 0.15)
    cold, raw = median(big, "ours, cold"), median(big, "raw read, cold")
    yield Promise("verified load / raw read, both cold", cold / raw, 1.35, max(raw, hashing) / raw)
    yield Promise("load: peak memory / state", report["memory"]["a load"], 1.05)
    yield Promise("weights only: bytes read / weights", report["big"]["weights_read_ratio"], 1.05)


def _behind(report: dict[str, Any]) -> Iterator[tuple[str, float, float, float, float]]:
    """What writes behind training: step and update in relation to undisturbed ones, seconds of stall and writing."""
    for name, key in (("a thread", "timeline"), ("a forked process", "timeline of a process")):
        timeline = report["big"][key]
        stall = statistics.median(seconds for _, seconds in timeline["stalls"])
        write = statistics.median(end - begin for begin, end in timeline["spans"])
        yield name, _step_ratio(timeline), timeline["update_ratio"], stall, write


def _step_ratio(timeline: dict[str, Any]) -> float:
    """Of steps while a save was written, to undisturbed ones; nan if the first update took longer than the write."""
    ratio = timeline["step_ratio"]
    return math.nan if ratio is None else float(ratio)


def _decimals(ratio: float) -> str:
    return "not measured" if math.isnan(ratio) else f"{ratio:.2f}"


def _percent_of_a_minute(report: dict[str, Any]) -> float:
    """Computed: the stall, and the slow-down while a save is written."""
    _, ratio, _, _, written = next(_behind(report))
    slowed = written * (1 - 1 / max(ratio, 1.0))
    return float(100 * (median(report["fits"]["big"], OURS) + slowed) / 60)


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
    for name, seconds in report["fits"].items():
        lines += _table(f"{name}: stall in a fit of its own", seconds, COPY)
    lines += _table("big: loading once, in a new process", report["resume"], "torch.load")
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
    lines += ["", f"{'writing behind training, in':36}{'step':>13}{'update':>10}{'stall s':>10}{'write s':>10}"]
    for name, step, update, stall, write in _behind(report):
        lines.append(f"  {name:34}{_decimals(step):>13}{update:10.2f}{stall:10.3f}{write:10.3f}")
    judged = "" if not report["quick"] else "  (of a small state: not judged)"
    lines += ["", f"{'ratio of medians':58}{'found':>13}{'limit':>8}{judged}"]
    for promise in promises(report):
        verdict = "" if report["quick"] else f"  {promise.verdict}"
        lines.append(f"  {promise.what:56}{_decimals(promise.found):>13}{promise.limit:8.2f}{verdict}")
    return "\n".join(lines)


def _table(title: str, seconds: dict[str, list[float]], against: str) -> list[str]:
    reference = median(seconds, against)
    lines = ["", f"{title:46}{'min s':>9}{'median s':>10}{'ratio':>8}"]
    for name, values in seconds.items():
        middle = statistics.median(values)
        lines.append(f"  {name:44}{min(values):9.3f}{middle:10.3f}{middle / reference:8.2f}")
    return lines


_ROWS = {
    "raw O_DIRECT + fdatasync": ("the plain disk (`O_DIRECT`, `fdatasync`)", "yes", None),
    "torch.save + fsync": ("`torch.save`, `fsync`", "yes", "torch.save + fsync"),
    "save_file + fsync + sha256": (
        "safetensors' `save_file`, `fsync`, SHA-256 of the file",
        "yes",
        "save_file + fsync + sha256",
    ),
    "Lightning": ("Lightning's `TorchCheckpointIO`", "no", "Lightning"),
    "Lightning async": ("Lightning's `AsyncCheckpointIO`", "no", None),
    "ours": ("this package, `async_save=False`", "yes, and hashed", "ours"),
    "ours async, 1 thread": ("this package", "yes, and hashed", None),
}


_RESUMES = {
    "sha256 pass on 2 threads": "SHA-256 of the files on two threads, nothing else",
    "torch.load": "`torch.load`, nothing checked",
    "ours, verified": "this package, every byte checked",
    "Lightning's fit, to its first batch": "Lightning's `fit(ckpt_path=...)`, to its first batch",
    "ours, to its first batch": 'this package, `fit(ckpt_path="last")`, to its first batch, every byte checked',
}


_FITS = {
    COPY: "a memcpy of each tensor, on one thread",
    COPY_BESIDE: "the same on two threads",
    THEIRS: "`ModelCheckpoint` with `AsyncCheckpointIO`",
    OURS: "this package",
}


def as_markdown(report: dict[str, Any]) -> str:
    """The tables that README shows."""
    machine, save, memory = report["machine"], report["big"]["save"], report["memory"]
    rate = machine["sha256_gb_per_s"]["1"]
    lines = [
        f"{machine['date']}, {machine['cores']} cores of {machine['processor']}, {machine['file_system']}, torch "
        f"{machine['versions']['torch']}, lightning {machine['versions']['lightning']}. SHA-256: {rate} GB/s on one "
        f"core. Medians of {report['rounds']} rounds.",
        "",
        f"| saving {report['big']['num_bytes'] / 1e9:.2f} GB | durable | seconds until written | training waits "
        "| memory, times the state |",
        "|---|---|---|---|---|",
    ]
    stalls = {"Lightning async": THEIRS, "ours async, 1 thread": OURS}
    for name, (shown, is_durable, waits) in _ROWS.items():
        stall = f"{median(save, waits):.3f}" if waits else ""
        if name in stalls:
            stall = f"{median(report['fits']['big'], stalls[name]):.3f}"
        used = f"{memory[name]:.2f}" if name in memory else ""
        lines.append(f"| {shown} | {is_durable} | {median(save, name):.2f} | {stall} | {used} |")
    lines += ["", "| ratio of medians | found | aim | |", "|---|---|---|---|"]
    lines += [f"| {p.what} | {_decimals(p.found)} | {p.limit:.2f} | {p.verdict} |" for p in promises(report)]
    lines += [
        "",
        "| a training in Lightning's loop waits for a save, seconds "
        f"| {report['big']['num_bytes'] / 1e9:.1f} GB, torch on one thread | on all cores | 20,000 small tensors |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {shown} | " + " | ".join(f"{median(seconds, name):.3f}" for seconds in report["fits"].values()) + " |"
        for name, shown in _FITS.items()
    ]
    lines += ["", "| loading once, in a new process, as a resume does | seconds |", "|---|---|"]
    lines += [f"| {shown} | {median(report['resume'], name):.2f} |" for name, shown in _RESUMES.items()]
    lines += [
        "",
        "| written behind training by | step / undisturbed | first update of all weights / undisturbed "
        "| training waits | written in |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {_decimals(step)} | {update:.2f} | {stall:.3f} s | {write:.2f} s |"
        for name, step, update, stall, write in _behind(report)
    ]
    lines += ["", "| a save of | seconds | seconds per GB | extra memory | files |", "|---|---|---|---|---|"]
    for row in report["scale"]:
        gigabytes = row["num_bytes"] / 1e9
        lines.append(
            f"| {gigabytes:.1f} GB | {row['seconds']:.2f} | {row['seconds'] / gigabytes:.2f} "
            f"| {row['memory_bytes'] / 1e6:.0f} MB | {row['num_files']:.0f} |"
        )
    return "\n".join(lines)
