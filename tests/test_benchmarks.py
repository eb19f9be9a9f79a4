"""The benchmarks run: a smoke test that judges no time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tables import as_markdown, as_text, promises

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures with what Linux has")
def test_the_quick_benchmark_measures_all_contenders_and_draws_them(tmp_path: Path) -> None:
    """One round of each; the tables are printed, figures and picture are written, nothing is left in the folder."""
    (tmp_path / "work").mkdir()
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--quick", "--rounds=1", f"--folder={tmp_path / 'work'}", f"--json={figures}", f"--picture={picture}"]

    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    report = json.loads(figures.read_text())

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("sha256: ")
    assert "save / Lightning " in result.stdout
    assert not re.search("kept|missed", result.stdout)  # of so small a state nothing is judged
    assert {"memcpy", "ours", "Lightning async: stall"} <= report["big"]["save"].keys()
    assert "ours, verified, into live tensors" in report["small"]["load"]
    assert {name: len(seconds) for name, seconds in report["fits"]["big"].items()} == {
        "memcpy": 6,
        "memcpy, 2 threads": 6,
        "Lightning async": 3,
        "ours": 3,
    }
    assert {name: len(seconds) for name, seconds in report["resume"].items()} == {
        "sha256 pass on 2 threads": 1,
        "torch.load": 1,
        "ours, verified": 1,
        "Lightning's fit, to its first batch": 1,
        "ours, to its first batch": 1,
    }
    assert 0.5 < report["memory"]["a load"] < 2
    assert report["adapters"]["written_ratio"] < 1.2
    assert picture.stat().st_size > 10_000
    assert list((tmp_path / "work").iterdir()) == []


def test_readme_shows_what_was_measured() -> None:
    """Its tables are those of the figures that are kept beside its picture, to the last digit."""
    report = json.loads((ROOT / "docs" / "benchmark.json").read_text())

    assert not report["quick"]
    assert f"<!-- benchmark -->\n{as_markdown(report)}\n<!-- /benchmark -->" in (ROOT / "README.md").read_text()


def test_a_ratio_that_was_not_measured_is_not_shown_as_one() -> None:
    """Where no step fell into a write, the tables say so, and no limit counts as kept."""
    report = json.loads((ROOT / "docs" / "benchmark.json").read_text())
    for key in ("timeline", "timeline of a process"):
        report["big"][key]["step_ratio"] = None

    verdicts = {promise.what: promise.verdict for promise in promises(report)}
    texts = as_text(report), as_markdown(report)

    assert verdicts["step while a save is written / undisturbed"] == "not measured"
    assert verdicts["a save every minute: % of the time"] == "not measured"  # computed from it
    assert "| a forked process | not measured | " in texts[1]
    assert not any(re.search(r"\bnan\b", text) for text in texts)
