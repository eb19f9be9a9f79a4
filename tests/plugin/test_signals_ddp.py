"""SIGTERM to several ranks, not all of them, and not at the same moment: all stop at the same step, saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ddp_job
import pytest
from toy import saved_steps


def train(folder: Path, name: str, checkpoint: str, *sends: str) -> list[list[dict[str, Any]]]:
    """Runs the script to its end and returns the records of each rank."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, ddp_job.__file__, str(folder), name, checkpoint, *sends]
    done = subprocess.run(command, timeout=ddp_job.TIME_LIMIT_SECONDS + 10, capture_output=True, text=True)
    errors = "".join(path.read_text() for path in sorted(folder.glob(f"{name}-*.err")))
    assert done.returncode == 0, errors + done.stderr
    lines = [(folder / f"{name}-{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    return [[r for r in map(json.loads, rank) if r["kind"] != "message"] for rank in lines]


def batches(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == "batch"]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The records of a run that was not signalled."""
    return train(tmp_path_factory.mktemp("ddp") / "base", "base", "none")


@pytest.mark.parametrize(
    "sends",
    [["1:on_before_optimizer_step:2"], ["0:on_after_backward:1", "1:on_before_backward:1", "1:on_train_batch_end:3"]],
    ids=["the_last_rank_alone", "both_at_different_moments"],
)
def test_all_ranks_stop_at_the_same_step(
    sends: list[str], baseline: list[list[dict[str, Any]]], tmp_path: Path
) -> None:
    """The step is saved, the process ends with status 0 as under stock Lightning, and the resumed run is exact.

    Ranks that are faster than a tenth of a second do not ask each other at every step.
    """
    stopped = train(tmp_path, "stopped", "none", *sends)
    step = saved_steps(tmp_path / "checkpoints")[-1]
    resumed = train(tmp_path, "resumed", "last")

    assert 2 <= step < 64
    for rank in range(2):
        assert batches(stopped[rank]) == batches(baseline[rank])[:step]
        assert batches(resumed[rank]) == batches(baseline[rank])[step:]
        assert resumed[rank][-2] == baseline[rank][-2]  # the end: streams, weights, optimizer
