"""Kills in late epochs, and of jobs whose worker processes read ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy import Job, assert_same, run, step_dir

from lightning_resume.format.checkpoint import read_index


@pytest.mark.parametrize("kill_after", [12, 19, 28])
def test_the_order_of_a_late_epoch_goes_on(kill_after: int, tmp_path: Path) -> None:
    """DAT-03, DAT-04, DAT-17: killed in epoch 1, 2 or 3, its rest and the epochs after it are in the same order."""
    job = Job(max_epochs=4)
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=kill_after)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=kill_after)


def test_what_workers_fetched_ahead_is_not_lost(tmp_path: Path) -> None:
    """DAT-09: with eight batches fetched ahead, the position is what was trained."""
    job = Job(loader={"num_workers": 2, "prefetch_factor": 4})
    baseline = run(job, tmp_path / "base")
    killed = run(job, tmp_path / "work", kill_after=3)

    resumed = run(job, tmp_path / "work", resume=True)

    assert read_index(step_dir(killed.folder, 3)).batch_in_epoch == 3
    assert resumed.batches[0] == baseline.batches[3]
    assert_same(baseline, resumed, start=3)
