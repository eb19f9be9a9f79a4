"""``lightning-resume prune`` and ``migrate``."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from lightning_resume.catalog import (
    newest_verified,
    prune_checkpoints,
    scan_checkpoints,
    step_checkpoints,
    steps_of_run,
)
from lightning_resume.cli.display import Row, print_rows, row_of
from lightning_resume.cli.look import is_folder_of_checkpoints, look_at_each, require_folder
from lightning_resume.errors import CheckpointError, CheckpointWriteError, FolderLockedError
from lightning_resume.format.migrate import migrate_checkpoint, saved_schema
from lightning_resume.format.migrations import SCHEMA
from lightning_resume.format.verify import read_index
from lightning_resume.lock import FolderLock
from lightning_resume.policy import archived, to_prune

_BAD_BYTES = "It did not pass a full verification."


def prune_folder(
    folder: Path, *, keep_last: int, archive_every: int | None, run_id: str | None, dry_run: bool, as_json: bool
) -> int:
    """Deletes old checkpoints; returns the exit status."""
    if not require_folder(folder):
        return 2
    lock = FolderLock(folder)
    try:
        if not dry_run:
            lock.acquire()
        rows = _prune(folder, keep_last, archive_every, run_id, dry_run)
    except (FolderLockedError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        lock.release()
    print_rows(rows, as_json=as_json)
    return 1 if any(row["action"] == "failed" for row in rows) else 0


def _prune(folder: Path, keep_last: int, archive_every: int | None, run_id: str | None, dry_run: bool) -> list[Row]:
    steps = step_checkpoints(folder)
    if run_id is None and steps:
        run_id = steps[-1].run_id
    run = steps_of_run(folder, run_id)
    if not run and not steps:
        _require_none_bad(folder)
        return []
    good = newest_verified(run)
    if good is None:
        raise CheckpointError(
            folder, f"Nothing was pruned in {str(folder)!r}: the run {run_id!r} has no good checkpoint."
        )
    doomed = [run[place].path for place in to_prune(run, keep_last, archived(run, archive_every) | {good})]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deleted = [] if dry_run else prune_checkpoints(doomed)
    reason = "\n".join(str(warning.message) for warning in caught)
    word = {path: "to delete" if dry_run else "deleted" if path in deleted else "failed" for path in doomed}
    return [
        row_of(
            info,
            is_verified=place == good,
            status="corrupt" if place > good else info.status,  # the newer ones were verified first, and did not pass
            action=word.get(info.path, "kept"),
            reason=reason if word.get(info.path) == "failed" else _BAD_BYTES if place > good else "",
        )
        for place, info in sorted(run.items())
    ]


def _require_none_bad(folder: Path) -> None:
    """Refuses a folder whose checkpoints are all bad; one that has none of a run needs no pruning."""
    infos = scan_checkpoints(folder)
    bad = [info for info in infos if info.status in ("corrupt", "incomplete") and not info.path.name.startswith(".")]
    if bad:
        lines = [f"  {info}" for info in bad[:10]] + ["  …"] * (len(bad) > 10)
        headline = f"Nothing was pruned in {str(folder)!r}: it has no good checkpoint of a step, and {len(bad)} bad."
        remedy = f"Look at them with: lightning-resume verify {shlex.quote(str(folder))}"
        raise CheckpointError(folder, "\n".join([headline, *lines, remedy]))


def migrate_paths(paths: Sequence[Path], *, as_json: bool) -> int:
    """Rewrites checkpoints of an older schema; returns the exit status."""
    rows: list[Row] = []
    is_refused = False
    for path in paths:
        lock = FolderLock(path if is_folder_of_checkpoints(path) else path.absolute().parent)
        try:
            if path.exists():
                lock.acquire()
            rows += look_at_each([path], "migrating", _migrate)
        except FolderLockedError as error:
            print(error, file=sys.stderr)
            is_refused = True
        finally:
            lock.release()
    for row in rows:
        row.setdefault("action", "failed")
    print_rows(rows, as_json=as_json)
    return 1 if is_refused or any(row["action"] == "failed" for row in rows) else 0


def _migrate(path: Path) -> Row:
    is_old = saved_schema(path) != SCHEMA
    try:
        index = migrate_checkpoint(path)
    except CheckpointWriteError as error:  # says nothing against the checkpoint, which is as it was
        return row_of(read_index(path), path=path, status="good", is_verified=True, action="failed", reason=str(error))
    return row_of(index, path=path, status="good", is_verified=True, action="migrated" if is_old else "kept")
