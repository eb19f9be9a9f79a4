"""A training that saves as fast as it can, killed at random times; `python -m benchmarks.kills` does it 200 times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_resume_after_a_kill_at_a_random_time_is_exact() -> None:
    """At most two steps are lost each time, and at most one directory more is there than are kept."""
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", "8", "--seed", "5"]

    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)

    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(process.stdout)
    assert (report["kills"], report["faults"]) == (8, [])
    assert report["most steps lost"] <= 2
    assert report["most directories"] <= 3
