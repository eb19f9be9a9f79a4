"""Every file operation of two consecutive saves and their pruning, inside a real training: killed there, failing there.

The operations are counted in an undisturbed run, each time anew, so that no case can be missing and none be empty.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from faults import CALLS, CHANGES, REMOVALS, RENAMES, SYNCS, WRITES, Faults
from ladder import Step, assert_ladder
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from toy import Job, Run, assert_records_equal, assert_same, run, saved_steps

from lightning_resume import scan_checkpoints, verify_checkpoint
from lightning_resume.catalog import newest_good
from lightning_resume.lock import LOCK_NAME
from lightning_resume.plugin.last import find_last

NUM_BATCHES, CADENCE = 5, 2  # saves at the steps 2 and 4; each prunes the one before it
NUM_PARTS = 4  # of a matrix, so that several processes can share it


class Arm(Callback):
    """Begins to count when the first batch begins: the save of step 0 is over then."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.faults.install()


def job(faults: Faults | None = None, *, async_save: bool) -> Job:
    """Five batches; nothing else saves than the cadence."""
    return Job(
        num_items=NUM_BATCHES * 4,
        max_epochs=1,
        plugin={
            "every_n_train_steps": CADENCE,
            "keep_last_k": 1,
            "async_save": async_save,
            "save_on_train_end": False,
        },
        callbacks=lambda: [Arm(faults)] if faults else [],
        after_fit=lambda trainer, module: faults.tell() if faults else None,
    )


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing befalls."""
    return run(job(async_save=False), tmp_path_factory.mktemp("baseline"))


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Counts the operations of an undisturbed run, once for each kind."""

    @cache
    def count(async_save: bool, only: Collection[str]) -> list[dict[str, Any]]:
        workdir = tmp_path_factory.mktemp("counted")
        undisturbed = run(job(Faults(workdir, only=only), async_save=async_save), workdir)
        assert saved_steps(undisturbed.folder) == [4]
        return undisturbed.of("operation")

    return count


def without_faults(process: Run) -> Run:
    """The run without what it said of its file operations."""
    return replace(process, records=[record for record in process.records if record["kind"] != "operation"])


def cases(usual: list[tuple[Any, bool]], more: list[tuple[Any, bool]]) -> list[Any]:
    """Parameters of a matrix; the second list takes minutes and is marked so."""

    def case(how: Any, async_save: bool, **marks: Any) -> Any:
        name = errno.errorcode[how] if isinstance(how, int) else how
        return pytest.param(how, async_save, id=f"{name}-{'async' if async_save else 'sync'}", **marks)

    return [case(*each) for each in usual] + [case(*each, marks=pytest.mark.slow) for each in more]


def part_of(operations: list[dict[str, Any]], part: int) -> Iterator[tuple[int, str]]:
    """Numbers and descriptions of the operations that one test of `NUM_PARTS` looks at."""
    for operation in operations[part::NUM_PARTS]:
        yield operation["number"], f"{operation['name']} {operation['path']} {operation['target']}"


def check_resume(baseline: Run, workdir: Path, *, async_save: bool) -> int:
    """The newest checkpoint is whole, "last" finds it, and the run that goes on from it is exact; returns its step."""
    folder = workdir / "checkpoints"
    newest = newest_good(folder, verify=True)
    assert newest is not None
    assert find_last(str(folder), ()).path == str(newest.path)
    assert {info.status for info in scan_checkpoints(folder, verify=True)} <= {"good", "incomplete"}
    step = verify_checkpoint(newest.path).global_step

    resumed = run(job(async_save=async_save), workdir, resume=True)

    assert resumed.places[0] == (0, step, step)
    assert_same(baseline, resumed, start=step)
    assert [info.status for info in scan_checkpoints(folder, verify=True)] == ["good"]  # no temp, one directory
    return step


KILLS = [("kill", True), ("kill", False), ("torn", True), ("power", True)]
MORE_KILLS = [("torn", False), ("power", False), ("power-names", True), ("power-names", False)]


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize(("how", "async_save"), cases(KILLS, MORE_KILLS))
def test_a_run_that_dies_at_any_file_operation_goes_on_exactly(
    how: str, async_save: bool, part: int, baseline: Run, counted: Any, tmp_path: Path
) -> None:
    """Killed ahead of each operation, inside each write, or by a power cut that loses all that may be lost."""
    # What only reads changes nothing that a power cut could take.
    only = {"kill": CALLS, "torn": WRITES}.get(how, CHANGES)
    operations = counted(async_save, only)
    num_cases, steps = 0, set()

    for number, what in part_of(operations, part):
        workdir = tmp_path / str(number)
        faults = Faults(workdir, how, number, only=only)

        killed = run(job(faults, async_save=async_save), workdir, dies=True)

        assert_records_equal(baseline.batches[: len(killed.batches)], killed.batches)
        step = check_resume(baseline, workdir, async_save=async_save)
        assert len(killed.batches) - step <= 2 * CADENCE, what
        steps.add(step)
        num_cases += 1

    assert num_cases == len(operations[part::NUM_PARTS]) >= {"kill": 20, "torn": 3}.get(how, 10)
    assert steps == {0, 2} | ({4} if how != "torn" else set())


FAILURES = [(errno.EIO, True), (errno.ENOSPC, True)]
MORE_FAILURES = [(errno.EIO, False), (errno.ENOSPC, False), (errno.EACCES, True), (errno.EDQUOT, True)]


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize(("code", "async_save"), cases(FAILURES, MORE_FAILURES))
def test_a_run_in_which_any_file_operation_fails_keeps_its_last_checkpoint(
    code: int, async_save: bool, part: int, baseline: Run, counted: Any, tmp_path: Path
) -> None:
    """Training goes on to its end as if nothing had been, a warning tells; what is on disk resumes exactly."""
    operations = counted(async_save, CALLS)
    num_cases = 0

    for number, what in part_of(operations, part):
        workdir = tmp_path / str(number)
        faults = Faults(workdir, code, number, lasting=code == errno.ENOSPC)

        process = without_faults(run(job(faults, async_save=async_save), workdir))

        assert process.records == baseline.records, what
        assert is_told(process) or costs_nothing(operations[number - 1]), what
        check_resume(baseline, workdir, async_save=async_save)
        num_cases += 1

    assert num_cases == len(operations[part::NUM_PARTS]) >= 20


def costs_nothing(operation: dict[str, Any]) -> bool:
    """Whether nobody has to be told: pruning looks again at the next save, and the lock of a dead process is free."""
    return operation["is_reading"] or operation["path"].endswith("/" + LOCK_NAME)


def is_told(process: Run) -> bool:
    """Whether a warning tells that something could not be written or deleted."""
    return any("FAILED; training goes on" in text or "could not be deleted" in text for text in process.messages)


def as_step(operation: dict[str, Any]) -> Step | None:
    """An operation as a step of the ladder."""
    name, path, target = operation["name"], operation["path"], operation["target"]
    if name == "open":
        return None if operation["is_reading"] else Step("create", path)
    kinds = {"write": WRITES, "sync": SYNCS, "rename": RENAMES, "remove": REMOVALS}
    kind = next((kind for kind, names in kinds.items() if name in names), "")
    return Step(kind, path, target) if kind else None


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_nothing_is_deleted_before_its_successor_is_durable(async_save: bool, counted: Any) -> None:
    """Files, index, hidden directory, rename, parent folder, each synced in turn, and only then the pruning."""
    steps = [step for step in map(as_step, counted(async_save, CALLS)) if step]

    assert_ladder(steps, num_saves=2, num_pruned=2)
