"""Puts the demo's outcome into a file and on the screen."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_resume.demo.comparison import Bucket
from lightning_resume.demo.driver import Kill, Run
from lightning_resume.demo.records import Place
from lightning_resume.demo.settings import DemoSettings

LIBRARIES = ("lightning-resume", "lightning", "torch", "numpy", "safetensors", "scikit-learn")


def make_report(
    settings: DemoSettings, baseline: Run, interrupted: Run, buckets: list[Bucket], total_seconds: float
) -> dict[str, Any]:
    """Returns everything that was found out, as plain values for JSON."""
    return {
        "exact": is_exact(buckets),
        "seed": settings.seed,
        "settings": asdict(settings),
        "kills": [_kill_row(number, kill) for number, kill in enumerate(interrupted.kills, start=1)],
        "buckets": [_bucket_row(bucket) for bucket in buckets],
        "seconds": {
            "baseline": round(baseline.seconds, 3),
            "interrupted": round(interrupted.seconds, 3),
            "total": round(total_seconds, 3),
        },
        "versions": {"python": platform.python_version(), **{library: _version(library) for library in LIBRARIES}},
        "platform": platform.platform(),
    }


def is_exact(buckets: list[Bucket]) -> bool:
    """Returns whether every part of the interrupted run is bit-equal to the baseline's."""
    return all(bucket.is_exact for bucket in buckets)


def write_report(report: dict[str, Any], path: Path) -> None:
    """Writes the report as JSON."""
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def print_report(report: dict[str, Any], console: Console) -> None:
    """Prints the kills, and the verdict on each bucket."""
    kills = Table("#", "killed in", "resumed from", title="What was done to the interrupted run")
    kills.add_column("steps\nagain", justify="right")
    kills.add_column("batches\nagain", justify="right")
    for kill in report["kills"]:
        again = str(kill["num_steps_again"]), str(kill["num_batches_again"])
        kills.add_row(str(kill["number"]), _place(kill["killed_at"]), _place(kill["resumed_from"]), *again)
    console.print(kills)
    verdict = Table(title="Interrupted run against the baseline, which ran without the callback")
    verdict.add_column("part")
    for column in ("compared", "different", "largest difference\n(expected 0.0)"):
        verdict.add_column(column, justify="right")
    verdict.add_column("verdict")
    for bucket in report["buckets"]:
        word = "[green]EXACT[/]" if bucket["exact"] else "[bold red]DIFFERENT[/]"
        numbers = f"{bucket['num_compared']:,}", f"{bucket['num_different']:,}"
        verdict.add_row(bucket["name"], *numbers, _difference(bucket["largest_difference"]), word)
    console.print(verdict)
    word = "[bold green]EXACT[/]" if report["exact"] else "[bold red]DIFFERENT[/]"
    seconds = report["seconds"]
    console.print(
        f"{word} after {len(report['kills'])} x SIGKILL. {seconds['total']:.1f} s in all; "
        f"the baseline took {seconds['baseline']:.1f} s, the interrupted run {seconds['interrupted']:.1f} s."
    )


def _kill_row(number: int, kill: Kill) -> dict[str, Any]:
    return {
        "number": number,
        "drawn_batch": kill.drawn_batch,
        "killed_at": _place_row(kill.killed_at),
        "resumed_from": _place_row(kill.resumed_from),
        "num_steps_again": kill.num_steps_again,
        "num_batches_again": kill.num_batches_again,
        "startup_seconds": round(kill.startup_seconds, 3),
    }


def _bucket_row(bucket: Bucket) -> dict[str, Any]:
    largest = bucket.largest_difference
    return {
        "name": bucket.name,
        "num_compared": bucket.num_compared,
        "num_different": bucket.num_different,
        # JSON has no infinity
        "largest_difference": largest if largest is None or math.isfinite(largest) else "inf",
        "exact": bucket.is_exact,
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # this package itself, when it is run from its source
        return "not installed"


def _place_row(place: Place | None) -> dict[str, int] | None:
    return None if place is None else place._asdict()


def _place(row: dict[str, int] | None) -> str:
    return "-" if row is None else f"epoch {row['epoch']} batch {row['batch']} step {row['global_step']}"


def _difference(value: float | str | None) -> str:
    if value is None:
        return "(digests)"
    return str(value) if value in (0.0, "inf") else f"{value:.3g}"
