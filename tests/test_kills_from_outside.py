"""Kills and traces from outside the process: strace sees and strikes at real system calls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ladder import Step, assert_ladder
from toy import Job, assert_same, run
from toy_training import train_here
from tracing import FAMILIES, Call, can_trace, traced

from lightning_resume import read_checkpoint, scan_checkpoints, write_checkpoint
from lightning_resume.catalog import clean_incomplete, newest_good, prune_checkpoints, step_dirname

JOB = Job(num_items=20, max_epochs=1, plugin={"every_n_train_steps": 2, "keep_last_k": 1, "save_on_train_end": False})

pytestmark = pytest.mark.skipif(bool(can_trace()), reason=can_trace())


def save(folder: Path, step: int) -> None:
    """A checkpoint of a few files, whose every value tells its step."""
    value = torch.full((200,), float(step))
    state = {"state_dict": {"a": value, "b": -value}, "optimizer_states": [{"m": value}], "other": value + 1}
    write_checkpoint(
        folder / step_dirname(step),
        state,
        rank_states=[{"r": value}],
        counters={"global_step": step},
        max_shard_bytes=1000,
    )


def two_saves(folder: Path) -> None:
    """Two consecutive saves, each of which prunes the one before it."""
    for step in (2, 3):
        save(folder, step)
        prune_checkpoints([folder / step_dirname(step - 1)])


def warmed_up(folder: Path, work: Path) -> Any:
    """The same action for every process; the first time is done elsewhere, so that nothing is imported any more."""
    work.mkdir(parents=True)
    for place in (work, folder):
        place.mkdir(exist_ok=True)
        save(place, 1)
    two_saves(work)
    return partial(two_saves, folder)


def value_of(path: Path) -> int:
    """The step that all values tell."""
    state = read_checkpoint(path, rank=0)
    (value,) = {
        *state["state_dict"]["a"].tolist(),
        *(-state["state_dict"]["b"]).tolist(),
        *state["optimizer_states"][0]["m"].tolist(),
        *(state["other"] - 1).tolist(),
    }
    return int(value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kill_at_any_system_call_leaves_a_good_checkpoint(family: str, tmp_path: Path) -> None:
    """Struck at the k-th call of its kind in the folder, for every k: the newest checkpoint is whole."""
    folder = tmp_path / "undisturbed"
    calls = traced(warmed_up(folder, tmp_path / "warm"), folder, tmp_path / "trace")
    points = [call for call in calls if call.name in FAMILIES[family]]
    num_cases, steps = 0, set()

    for number, call in enumerate(points):
        folder = tmp_path / str(number)
        action = warmed_up(folder, tmp_path / f"warm-{number}")

        seen = traced(action, folder, tmp_path / "trace", kill_at=call)

        assert [(each.name, each.ordinal) for each in seen][-1] == (call.name, call.ordinal)
        newest = newest_good(folder, verify=True)
        assert newest is not None
        assert newest.global_step == value_of(newest.path)
        assert {info.status for info in scan_checkpoints(folder, verify=True)} <= {"good", "incomplete"}
        steps.add(newest.global_step)
        clean_incomplete(folder)
        assert all(path.name.startswith("step-") for path in folder.iterdir())
        num_cases += 1

    assert num_cases == len(points) >= (2 if family in ("rename", "mkdir") else 10)
    assert {2} < steps <= {1, 2, 3}


def as_step(call: Call) -> Step | None:
    """A system call as a step of the ladder."""
    if call.name in FAMILIES["open"]:
        return Step("create", call.path) if call.creates else None
    what = next(what for what, names in FAMILIES.items() if call.name in names)
    return Step({"unlink": "remove"}.get(what, what), call.path, call.target)


def test_the_order_in_which_saves_become_durable_seen_by_strace(tmp_path: Path) -> None:
    """Files, index, hidden directory, rename, parent, and only then the pruning: in the system's own words."""
    folder = tmp_path / "ck"

    calls = traced(warmed_up(folder, tmp_path / "warm"), folder, tmp_path / "trace")

    assert_ladder([step for step in map(as_step, calls) if step], num_saves=2, num_pruned=2)


def training(workdir: Path, *, async_save: bool) -> Any:
    """Trains five batches: saves of the steps 0, 2 and 4, the last two of which prune the one before."""
    workdir.mkdir(parents=True)
    job = replace(JOB, plugin={**JOB.plugin, "async_save": async_save})
    return partial(train_here, job, workdir)


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_the_order_in_which_a_training_becomes_durable_seen_by_strace(async_save: bool, tmp_path: Path) -> None:
    """Three saves and two prunings in a real training, also where they are made behind it."""
    folder = tmp_path / "work" / "checkpoints"

    calls = traced(training(tmp_path / "work", async_save=async_save), folder, tmp_path / "trace")

    assert_ladder([step for step in map(as_step, calls) if step], num_saves=3, num_pruned=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_killed_at_a_system_call_goes_on_exactly(family: str, tmp_path: Path) -> None:
    """A tenth of the calls, in whichever thread gets there first; the run that goes on is the uninterrupted one."""
    baseline = run(replace(JOB, plugin={**JOB.plugin, "async_save": False}), tmp_path / "base")
    folder = tmp_path / "undisturbed" / "checkpoints"
    calls = traced(training(folder.parent, async_save=True), folder, tmp_path / "trace")
    points = [call for call in calls if call.name in FAMILIES[family]][::10]

    for number, call in enumerate(points):
        workdir = tmp_path / str(number)
        traced(training(workdir, async_save=True), workdir, tmp_path / "trace", kill_at=call)
        newest = newest_good(workdir / "checkpoints", verify=True)

        resumed = run(JOB, workdir, resume=True, seed=1 if newest is None else None)

        start = resumed.places[0][2]
        assert start == (newest.global_step if newest else 0)
        assert_same(baseline, resumed, start=start)
        assert {info.status for info in scan_checkpoints(workdir / "checkpoints", verify=True)} == {"good"}
    assert points
