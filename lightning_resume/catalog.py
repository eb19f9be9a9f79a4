"""A folder of checkpoints: what is in it, which is the newest good one, and taking old ones away. Knows no torch."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from lightning_resume.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CorruptCheckpointError,
)
from lightning_resume.format.durable import delete_tree, discard, retire_old_versions, sync_directory
from lightning_resume.format.hidden import HiddenName, is_abandoned, parse_hidden
from lightning_resume.format.index import INDEX_NAME, MAX_INDEX_BYTES, CheckpointIndex
from lightning_resume.format.strict_json import parse_json
from lightning_resume.format.verify import read_index, verify_checkpoint
from lightning_resume.lock import LOCK_NAME

STALE_AFTER = timedelta(hours=1)
_STEP_DIRNAME = re.compile(r"step-[0-9]+")


@dataclass(frozen=True)
class CheckpointInfo:
    """One entry of a folder of checkpoints.

    Attributes:
        path: where it is.
        status: "good"; "incomplete" (never committed, or on its way out); "corrupt" (a checkpoint that cannot be
            read); "foreign" (nothing of ours).
        reason: why it is not good; "" if it is.
        global_step: optimizer steps taken, or None if unknown; so are the other counters.
        current_epoch: the epoch in progress.
        batch_in_epoch: batches trained in it.
        num_bytes: size of its files, without the index; of one that is not good, of what lies there; 0 if unknown.
        kind: "full" or "weights", or None if unknown.
        run_id: of the run that wrote it, or None.
        timeline: how often that run had gone back to an earlier step; a run that did writes lower step numbers again.
    """

    path: Path
    status: str
    reason: str = ""
    global_step: int | None = None
    current_epoch: int | None = None
    batch_in_epoch: int | None = None
    num_bytes: int = 0
    kind: str | None = None
    run_id: str | None = None
    timeline: int | None = None

    def __str__(self) -> str:
        """One line: name, status, reason."""
        return f"{self.path.name}: {self.status}" + (f", {self.reason}" if self.reason else "")


def step_dirname(global_step: int) -> str:
    """Name of the checkpoint directory of a step: ``step-00000500``."""
    if global_step < 0:
        raise ValueError(f"global_step={global_step} is negative")
    return f"step-{global_step:08d}"


def scan_checkpoints(root: str | os.PathLike[str], *, verify: bool = False) -> list[CheckpointInfo]:
    """Looks at everything in a folder; changes nothing, and no rubbish in there makes it fail.

    Args:
        root: the folder. One that does not exist has no checkpoints.
        verify: read every file and compare its digest, instead of the index and the sizes only.

    Returns:
        One entry for each thing in the folder but its lock, sorted by timeline, global_step, current_epoch,
        batch_in_epoch (unknown ones first) and name; never by modification time.

    Raises:
        CheckpointReadError: the folder itself cannot be listed.
    """
    root = Path(root)
    try:
        names = sorted(name for name in os.listdir(root) if name != LOCK_NAME)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointReadError(root, None, error) from error
    visible = set(names)
    return sorted((_look_at(root / name, visible, verify) for name in names), key=_order)


def newest_good(
    root: str | os.PathLike[str], *, verify: bool = False, kind: str | None = "full"
) -> CheckpointInfo | None:
    """The checkpoint to resume from: the last good one by timeline, global_step, current_epoch, batch_in_epoch.

    Args:
        root: the folder.
        verify: compare every file's digest; the newest is tried first, so that mostly one checkpoint is read.
        kind: "full", "weights", or None for any.

    Returns:
        Its entry, or None if there is no good one.

    Raises:
        CheckpointReadError: the folder itself cannot be listed.
    """
    candidates = [info for info in scan_checkpoints(root) if info.status == "good" and kind in (None, info.kind)]
    for info in reversed(candidates):
        if not verify or _look_into(info.path, verify=True).status == "good":
            return info
    return None


def step_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The good full checkpoints that are named after their step, oldest first; no ModelCheckpoint's are among them.

    Raises:
        CheckpointReadError: the folder itself cannot be listed.
    """
    return [
        info
        for info in scan_checkpoints(root)
        if info.status == "good"
        and info.kind == "full"
        and info.global_step is not None
        and info.path.name == step_dirname(info.global_step)
    ]


def steps_of_run(root: str | os.PathLike[str], run_id: str | None) -> dict[tuple[int, int], CheckpointInfo]:
    """One run's `step_checkpoints`, by timeline and step."""
    steps = [info for info in step_checkpoints(root) if info.run_id == run_id]
    return {(info.timeline or 0, info.global_step or 0): info for info in steps}


def newest_verified(run: Mapping[tuple[int, int], CheckpointInfo]) -> tuple[int, int] | None:
    """Timeline and step of the newest checkpoint that passes a full verification; None if none does."""
    for place in sorted(run, reverse=True):
        if _look_into(run[place].path, verify=True).status == "good":
            return place
    return None


def prune_checkpoints(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Deletes checkpoints: each is renamed out of sight first, so none is ever seen in part.

    A failure is a warning, never an error: training does not end because an old checkpoint is gone already. What has
    neither an index nor a step's name is not ours and stays. A crash leaves a hidden directory, which
    `clean_incomplete` removes.

    Args:
        paths: checkpoint directories.

    Returns:
        Those that were deleted.
    """
    pruned: list[Path] = []
    for path in map(Path, paths):
        try:
            if not _is_ours(path):
                warnings.warn(f"{str(path)!r} is no checkpoint and was not deleted", stacklevel=2)
                continue
            retire_old_versions(path)  # they would take its place otherwise
            discard(path)
        except FileNotFoundError:
            warnings.warn(f"the old checkpoint {str(path)!r} was gone already", stacklevel=2)
        except OSError as error:
            warnings.warn(f"the old checkpoint {str(path)!r} could not be deleted: {error}", stacklevel=2)
        else:
            pruned.append(path)
    return pruned


def clean_incomplete(root: str | os.PathLike[str], *, stale_after: timedelta = STALE_AFTER) -> list[Path]:
    """Removes what killed processes left: half-written saves, half-deleted checkpoints. Nothing but our hidden names.

    A replaced version whose successor never came into place is put back instead. What a live process is working on
    stays. Whether a process on another machine lives cannot be asked: its leavings count as dead when nothing in them
    has changed for `stale_after`.

    Args:
        root: the folder. One that does not exist needs no cleaning.
        stale_after: see above.

    Returns:
        The hidden paths that are gone now. One that cannot be removed is a warning.
    """
    root = Path(root)
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    cleaned: list[Path] = []
    for name in names:
        hidden = parse_hidden(name)
        if hidden is None or not is_abandoned(root / name, hidden, stale_after):
            continue
        try:
            _clean(root / name, hidden)
        except OSError as error:
            warnings.warn(f"{str(root / name)!r} could not be removed: {error}", stacklevel=2)
        else:
            cleaned.append(root / name)
    return cleaned


def _clean(path: Path, hidden: HiddenName) -> None:
    target = path.with_name(hidden.name)
    if hidden.kind != "old":
        delete_tree(path)
    elif os.path.lexists(target):
        discard(path, name=hidden.name)
    else:
        os.rename(path, target)
        sync_directory(target.parent)


def _is_ours(path: Path) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode) and (
        os.path.lexists(path / INDEX_NAME) or _STEP_DIRNAME.fullmatch(path.name) is not None
    )


def _look_at(path: Path, visible: set[str], verify: bool) -> CheckpointInfo:
    hidden = parse_hidden(path.name)
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return CheckpointInfo(path, "foreign", "a symbolic link")
        if hidden and (hidden.kind != "old" or hidden.name in visible):
            return CheckpointInfo(path, "incomplete", _HIDDEN_REASONS[hidden.kind], num_bytes=_bytes_in(path))
        if not stat.S_ISDIR(mode):
            return CheckpointInfo(path, "foreign", "a file" if stat.S_ISREG(mode) else "no regular file")
        has_index = INDEX_NAME in os.listdir(path)
    except FileNotFoundError:
        return CheckpointInfo(path, "incomplete", _GONE)
    except OSError as error:
        return CheckpointInfo(path, "corrupt", f"cannot be looked at: {error.strerror or error}")
    if has_index:
        return _look_into(path, verify)
    if hidden or _STEP_DIRNAME.fullmatch(path.name):
        return CheckpointInfo(path, "incomplete", "never finished: no index.json", num_bytes=_bytes_in(path))
    return CheckpointInfo(path, "foreign", "a directory without index.json")


_GONE = "gone while it was looked at"  # pruned by another process, or put in its place
_HIDDEN_REASONS = {
    "tmp": "a save in flight, or one that was cut short",
    "old": "a version that was replaced",
    "trash": "being deleted",
}


def _look_into(path: Path, verify: bool) -> CheckpointInfo:
    try:
        return _describe(path, verify_checkpoint(path) if verify else read_index(path))
    except CheckpointNotFoundError:
        return CheckpointInfo(path, "incomplete", _GONE)
    except CheckpointError as error:
        if isinstance(error, CorruptCheckpointError) and _is_foreign_index(path):
            return CheckpointInfo(path, "foreign", "a directory with another kind of index.json")
        return CheckpointInfo(path, "corrupt", in_one_line(error), num_bytes=_bytes_in(path))


def _bytes_in(path: Path) -> int:
    """Size of the files in a directory, or of a file, without an index; what cannot be looked at counts as nothing."""
    num_bytes = 0
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR((status := os.lstat(path)).st_mode):
            return status.st_size if stat.S_ISREG(status.st_mode) else 0
        for name in os.listdir(path):
            with contextlib.suppress(OSError):
                status = os.lstat(path / name)
                num_bytes += status.st_size if stat.S_ISREG(status.st_mode) and name != INDEX_NAME else 0
    return num_bytes


def _describe(path: Path, index: CheckpointIndex) -> CheckpointInfo:
    return CheckpointInfo(
        path=path,
        status="good",
        global_step=index.global_step,
        current_epoch=index.current_epoch,
        batch_in_epoch=index.batch_in_epoch,
        num_bytes=index.num_bytes,
        kind=index.kind,
        run_id=index.run_id,
        timeline=index.timeline,
    )


def _is_foreign_index(path: Path) -> bool:
    """Whether the index is sound JSON of something else: then the directory is not a damaged checkpoint of ours."""
    if _STEP_DIRNAME.fullmatch(path.name):
        return False
    try:
        file = path / INDEX_NAME
        if not stat.S_ISREG(os.lstat(file).st_mode) or os.lstat(file).st_size > MAX_INDEX_BYTES:
            return False
        document = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return False
    schema = document.get("schema") if isinstance(document, dict) else None
    return not (isinstance(schema, str) and schema.startswith("lightning-resume"))


def in_one_line(error: CheckpointError) -> str:
    """The message without its path, in one line."""
    if isinstance(error, CorruptCheckpointError):
        return f"{error.file}: expected {error.expected}, found {error.found}"
    return str(error).partition("\n")[0].rpartition(f"{error.path!r}: ")[2]


def place_in_run(saved: CheckpointInfo | CheckpointIndex) -> tuple[int, int, int, int]:
    """What orders the checkpoints of a run: timeline, global_step, current_epoch, batch_in_epoch; -1 for unknown."""
    numbers = (saved.timeline, saved.global_step, saved.current_epoch, saved.batch_in_epoch)
    timeline, step, epoch, batch = (-1 if number is None else number for number in numbers)
    return timeline, step, epoch, batch


def _order(info: CheckpointInfo) -> tuple[tuple[int, int, int, int], str]:
    return place_in_run(info), info.path.name
