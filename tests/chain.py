"""One run that is killed again and again, against the run that never was."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from toy import Job, Run, assert_records_equal, assert_same, run


def kill_in_turn(
    job: Job, workdir: Path, kills: Mapping[int, int], *, after_save: bool = True, aside: Collection[str] = ()
) -> tuple[Run, Run]:
    """Kills the run at each place in turn, resumes it each time, and checks every process against the baseline.

    Args:
        job: what to train.
        workdir: of both runs.
        kills: batch at which a process is killed, counted from 1 → batches that its successor finds trained.
        after_save: kill when all of the batch is over, its save too; False: at its end, before that.
        aside: kinds of records that the caller compares.

    Returns:
        The baseline, and the last process.
    """
    baseline = run(job, workdir / "base")
    where, start = "kill_after" if after_save else "kill_at", 0
    for kill, kept in kills.items():
        killed = run(job, workdir / "work", resume=start > 0 or kill != next(iter(kills)), **{where: kill})
        assert_records_equal(baseline.batches[start:kill], killed.batches)
        start = kept
    last = run(job, workdir / "work", resume=True)
    assert_same(_without(aside, baseline), _without(aside, last), start)
    return baseline, last


def _without(kinds: Collection[str], process: Run) -> Run:
    return replace(process, records=[record for record in process.records if record["kind"] not in kinds])
