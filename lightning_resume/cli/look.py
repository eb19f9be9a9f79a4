"""``lightning-resume list`` and ``verify``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_resume.catalog import CheckpointInfo, scan_checkpoints
from lightning_resume.cli.display import Row, print_rows, progress, row_of
from lightning_resume.errors import CheckpointError, CheckpointNotFoundError, IncompleteCheckpointError
from lightning_resume.format.index import INDEX_NAME
from lightning_resume.format.verify import verify_checkpoint


def list_folder(folder: Path, *, as_json: bool) -> int:
    """Prints what is in a folder; returns the exit status."""
    if not require_folder(folder):
        return 2
    try:
        infos = scan_checkpoints(folder)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    print_rows([row_of(info) for info in infos], as_json=as_json)
    if all(info.status == "foreign" for info in infos) and (inside := _folders_inside(folder)):
        more = f", and {len(inside) - 1} more such folders" if len(inside) > 1 else ""
        command = f"lightning-resume list {shlex.quote(str(inside[0]))}"
        print(
            f"Nothing of this package is here, but checkpoints are in {str(inside[0])!r}{more}: {command}",
            file=sys.stderr,
        )
    return 1 if any(info.status == "corrupt" for info in infos) else 0


def verify_paths(paths: Sequence[Path], *, as_json: bool) -> int:
    """Verifies checkpoints and folders of them; returns the exit status."""
    rows = look_at_each(
        paths, "verifying", lambda path: row_of(verify_checkpoint(path), path=path, status="good", is_verified=True)
    )
    print_rows(rows, as_json=as_json)
    return 0 if all(row["status"] == "good" for row in rows) else 1


def look_at_each(paths: Sequence[Path], what: str, look: Callable[[Path], Row]) -> list[Row]:
    """The rows of all checkpoints that the paths lead to; each path has at least one row.

    Args:
        paths: of checkpoints, and of folders of them.
        what: is done, for the progress.
        look: is handed the path of one checkpoint; what it raises becomes the row's reason.
    """
    targets = [(info, info.path != path) for path in paths for info in _checkpoints_at(path)]
    rows: list[Row] = []
    with progress(what, sum(info.num_bytes for info, _ in targets)) as step:
        done = 0
        for info, is_of_folder in targets:
            step(info.path.name, done)
            try:
                rows.append(row_of(info) if info.status == "corrupt" else look(info.path))
            except CheckpointNotFoundError as error:
                if not is_of_folder:  # else a training has pruned it meanwhile
                    rows.append(row_of(None, path=info.path, status="missing", reason=_not_found(error)))
            except CheckpointError as error:
                status = "incomplete" if isinstance(error, IncompleteCheckpointError) else "corrupt"
                rows.append(row_of(None, path=info.path, status=status, reason=str(error)))
            done = info.num_bytes
        step("", done)
    return rows


def require_folder(folder: Path) -> bool:
    """Whether there is such a folder; a line says it if not."""
    if not folder.is_dir():
        print(f"There is no folder {str(folder)!r}.", file=sys.stderr)
    return folder.is_dir()


def is_folder_of_checkpoints(path: Path) -> bool:
    """Whether a path leads to a folder of checkpoints, and not to one checkpoint."""
    return path.is_dir() and not (path / INDEX_NAME).exists()


def _checkpoints_at(path: Path) -> list[CheckpointInfo]:
    if is_folder_of_checkpoints(path):
        try:
            infos = [info for info in scan_checkpoints(path) if info.status in ("good", "corrupt")]
        except CheckpointError:
            infos = []
        if infos:
            return infos
    return [CheckpointInfo(path, "unknown")]


def _folders_inside(folder: Path) -> list[Path]:
    """Folders of checkpoints inside a folder, those of the first level that has any, the last by name first."""
    for depth in range(1, 4):  # as deep as lightning_logs/version_0/checkpoints
        found = {file.parent.parent for file in folder.glob("*/" * (depth + 1) + INDEX_NAME)}
        if ours := [path for path in sorted(found, reverse=True) if _holds_checkpoints(path)]:
            return ours
    return []


def _holds_checkpoints(folder: Path) -> bool:
    try:
        return any(info.status in ("good", "corrupt") for info in scan_checkpoints(folder))
    except CheckpointError:
        return False


def _not_found(error: CheckpointNotFoundError) -> str:
    """The message, with the command that helps."""
    there = Path(error.path).absolute().parent
    while not there.is_dir():
        there = there.parent
    facts = str(error).rpartition("\n")[0]
    return f"{facts}\nSee which checkpoints there are: lightning-resume list {shlex.quote(str(there))}"
