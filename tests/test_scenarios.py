"""Our own judge of exact resume: every scenario is trained, killed, resumed, and compared bit by bit.

A scenario is trained to its end without the callback and with it: the two have to be equal. Then its processes are
killed one after the other and resumed with another seed. What a process records, in order, has to be a piece of what
the uninterrupted run recorded: from the batch at which it was resumed, to its death or the end.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from scenarios import SCENARIOS
from scenarios.parts import Scenario
from scenarios.running import Record, run

MAX_LOST = 8  # batches that a resume may train again

KILLS: tuple[list[int], ...] = ([4, 13], [9, 12], [2, 5], [7, 16], [1, 10])
"""After how many batches of the whole training the processes of one run die, one after the other."""


def _is_slow(name: str) -> bool:
    """Whether a scenario is left out unless asked for: four in five of those that are killed anywhere."""
    return "kills" not in SCENARIOS[name] and zlib.crc32(name.encode()) % 5 != 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if _is_slow(name) else ()) for name in SCENARIOS]
)
def test_a_killed_and_resumed_run_is_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    """Law 1 and law 3, in every kind of job: the callback changes nothing, and neither does a kill, or a second."""
    scenario = SCENARIOS[name]
    # By the name, so that the places of the kills are spread over the scenarios and stay where they are.
    kills = scenario.get("kills") or KILLS[zlib.crc32(name.encode()) % len(KILLS)]

    bare = run(scenario, tmp_path / "bare", with_callback=False)
    baseline = run(scenario, tmp_path / "base")
    runs = _killed_and_resumed(scenario, kills, baseline, tmp_path)

    assert disturbance(bare, baseline) == "", "the callback disturbs an uninterrupted run"
    for processes in runs:
        assert discontinuity(baseline, processes) == "", f"killed after batches {kills[: len(processes) - 1]}"


def _killed_and_resumed(
    scenario: Scenario, kills: Sequence[int], baseline: Sequence[Record], folder: Path
) -> list[list[list[Record]]]:
    """Kills one process after the other, and resumes what the last left (where places are named, what each left)."""
    batches, killed, runs = of(baseline, 0, "batch"), [], []
    for kill in kills:
        place = batches[kill - 1]["epoch"], batches[kill - 1]["batch"]
        killed.append(run(scenario, folder / "work", resume=bool(killed), kill_at=place))
        if kill == kills[-1] or "kills" in scenario:
            left = shutil.copytree(folder / "work", folder / f"after {kill}")
            runs.append([*killed, run(scenario, left, resume=True)])
    return runs


# -- comparing ---------------------------------------------------------------------------------------------------------


def disturbance(bare: Sequence[Record], baseline: Sequence[Record]) -> str:
    """Says what differs between two runs; nothing if both recorded the same. Their processes write in any order."""
    ranks = sorted({record["rank"] for record in bare})
    return "\n".join(filter(None, (difference(of(bare, rank), of(baseline, rank)) for rank in ranks)))


def discontinuity(baseline: Sequence[Record], processes: Sequence[Sequence[Record]]) -> str:
    """Says where the processes, one after the other, are not the baseline; nothing if they are."""
    for rank in sorted({record["rank"] for record in baseline}):
        expected, done = of(baseline, rank), 0
        for number, process in enumerate(processes):
            found = of(process, rank)
            start = _start(expected, found, done)
            lost = len(of(expected[start:done], rank, "batch"))
            if start > done or lost > MAX_LOST:
                return f"process {number} of rank {rank} begins at record {start}, its predecessor got to {done}"
            done = start + len(found)
            if text := difference(expected[start:done], found):
                return f"process {number} of rank {rank}: {text}"
        if done != len(expected):
            return f"rank {rank} ends after {done} of {len(expected)} records"
    return ""


def of(records: Sequence[Record], rank: int, kind: str | None = None) -> list[Record]:
    """What one rank recorded, of one kind or of all."""
    return [record for record in records if record["rank"] == rank and kind in (None, record["kind"])]


def _start(expected: Sequence[Record], found: Sequence[Record], done: int) -> int:
    """Where in the baseline a process begins, judged by its first batch; one that was killed before it: at `done`."""
    for index, record in enumerate(found):
        if record["kind"] == "batch":
            places = [(other["kind"], other.get("epoch"), other.get("batch")) for other in expected]
            return max(places.index(("batch", record["epoch"], record["batch"])) - index, 0)
    return done


def difference(expected: Sequence[Record], found: Sequence[Record]) -> str:
    """Says which fields differ, and shows the first pair of records that does; nothing if all are equal."""
    if list(expected) == list(found):
        return ""
    pairs = [(old, new) for old, new in zip(expected, found, strict=False) if old != new]
    fields = {f"{o['kind']}.{name}" for o, n in pairs for name in {**o, **n} if o.get(name) != n.get(name)}
    text = f"{len(expected)} records expected, {len(found)} found; fields that differ: {sorted(fields)}"
    return text if not pairs else f"{text}\nfirst: {pairs[0][0]}\n   now {pairs[0][1]}"
