"""The callback's own checkpoints in a folder, and what `ckpt_path="last"` means."""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_resume.catalog import CheckpointInfo, in_one_line, place_in_run, scan_checkpoints, step_checkpoints
from lightning_resume.errors import CheckpointError, NoGoodCheckpointError, ResumeError
from lightning_resume.format.index import CheckpointIndex
from lightning_resume.format.verify import read_index, verify_checkpoint
from lightning_resume.plugin import loops
from lightning_resume.plugin.ranks import decide

MAX_LOOKS = 3  # at a folder in which somebody else prunes; whether he may is asked afterwards, with the folder's lock


@dataclass(frozen=True)
class Last:
    """What "last" is, as long as nobody else saves or prunes.

    Attributes:
        path: of the newest good checkpoint.
        listed: what it was chosen from.
        told: names of bad ones of which was told.
        is_verified: whether all of its bytes were compared with their digests; else that is left to loading it.
    """

    path: str
    listed: tuple[CheckpointInfo, ...]
    told: frozenset[str] = frozenset()
    is_verified: bool = True


def find_last(folder: str, others: Collection[str], *, trust_newest: bool = False) -> Last | None:
    """The newest good checkpoint in `folder`, by timeline and step; None and one info line where there is none.

    Each candidate is verified in full, the newest first. Those that fail are passed over with a warning that names
    them, what is wrong, and what is taken instead. Where one vanishes meanwhile it is begun anew; if that happens again
    and again, the newest is taken as it is, since loading verifies it too.

    Args:
        folder: where this callback saves.
        others: what other callbacks offer as their last.
        trust_newest: look at index and sizes of the newest only, if one process has saved it: loading it reads and
            verifies every file, and `instead` is what to do if it fails.

    Raises:
        NoGoodCheckpointError: there are checkpoints, but only bad ones.
    """
    for _ in range(MAX_LOOKS):
        try:
            last = _look(folder, trust_newest)
            if last is not None:
                _make_newest(last.path, others)
        except FileNotFoundError:
            continue
        if last is None and not others:
            # Lightning would warn that there is none; for a first start that is what is expected.
            expected = re.escape('.fit(ckpt_path="last") is set, but there is no last checkpoint')
            warnings.filterwarnings("ignore", message=expected)
            rank_zero_info(f"No checkpoint in {folder!r} yet: training starts from scratch.")
        return last
    listed = tuple(step_checkpoints(folder))
    return Last(os.fspath(listed[-1].path), listed, is_verified=False) if listed else None


def instead(folder: str, last: Last | None, path: str, error: CheckpointError) -> Last:
    """What is loaded in place of a "last" that was trusted, and was found to be bad when it was read.

    Args:
        folder: where this callback saves.
        last: what this callback has answered to "last", if it was asked.
        path: that could not be read.
        error: why.

    Raises:
        NoGoodCheckpointError: nothing in the folder is good.
        CheckpointError: `error`, where the path was not a trusted one.
    """
    if last is None or last.is_verified or path != last.path:
        raise error
    found = find_last(folder, ())
    if found is None:
        raise error
    return found


def path_to_load(trainer: Trainer, folder: str, path: str, last: Last | None) -> str:
    """What is loaded, now that the folder is this run's alone. All ranks must call, and are given the same.

    Another process may have saved and pruned since "last" was chosen, before it left the folder.

    Args:
        trainer: about to load.
        folder: where this callback saves.
        path: chosen by Lightning.
        last: what this callback has answered to "last", if it was asked.

    Raises:
        NoGoodCheckpointError: the other process has left nothing good; on every rank.
    """
    chosen: str | ResumeError = path
    if last is not None and path == last.path and trainer.is_global_zero:
        try:
            chosen = _newest_now(folder, last)
        except ResumeError as error:
            chosen = error
    chosen = decide(trainer, chosen)
    if isinstance(chosen, ResumeError):
        raise chosen
    if chosen != path:
        loops.note_path(trainer, chosen)
    return chosen


def _newest_now(folder: str, last: Last) -> str:
    if tuple(step_checkpoints(folder)) == last.listed:
        return last.path
    again = find_last(folder, ())
    if again is None or again.path == last.path:
        return last.path
    rank_zero_info(f"Another process has saved to {folder!r} meanwhile: resuming from {again.path!r}.")
    return again.path


def _look(folder: str, trust_newest: bool) -> Last | None:
    """Verifies the candidates, the newest first; FileNotFoundError if one vanishes meanwhile."""
    # What a kill in the middle of a save leaves is hidden; everything else was good once, or should have been.
    found = [info for info in scan_checkpoints(folder) if not info.path.name.startswith(".")]
    bad = [info for info in found if info.status in ("corrupt", "incomplete") or _is_link_to_step(info)]
    listed = tuple(step_checkpoints(folder))
    for candidate in reversed(listed):
        is_trusted = trust_newest and candidate is listed[-1]
        try:
            if is_trusted and read_index(candidate.path).num_ranks != 1:
                is_trusted = False
            if not is_trusted:
                verify_checkpoint(candidate.path)
        except CheckpointError as error:
            _require_still_there(candidate)
            bad.append(replace(candidate, status="corrupt", reason=in_one_line(error)))
        else:
            newer = [info for info in bad if _step_of(info) > (candidate.global_step or 0)]
            _tell_of_newer(folder, candidate, newer)
            told = frozenset(info.path.name for info in newer)
            return Last(os.fspath(candidate.path), listed, told, is_verified=not is_trusted)
    for info in bad:
        _require_still_there(info)
    if bad:
        raise NoGoodCheckpointError(folder, bad)
    return None


def _require_still_there(info: CheckpointInfo) -> None:
    try:
        os.lstat(info.path)
    except FileNotFoundError:
        raise
    except OSError:  # it is there, and may not be looked at
        return


def _tell_of_newer(folder: str, candidate: CheckpointInfo, newer: Sequence[CheckpointInfo]) -> None:
    if newer:
        headline = f"{candidate.path.name} in {folder!r} is resumed from: what is newer is bad, and is passed over."
        lines = [f"  {info}" for info in newer]
        remedy = (
            f"Training repeats the steps after it. Look at them with: lightning-resume verify {shlex.quote(folder)}"
        )
        rank_zero_warn("\n".join([headline, *lines, remedy]))


def _step_of(info: CheckpointInfo) -> int:
    """The step of a bad one: from its index, or else from its name; -1 where neither tells."""
    name = re.fullmatch(r"step-([0-9]+)", info.path.name)
    return info.global_step if info.global_step is not None else int(name[1]) if name else -1


def _is_link_to_step(info: CheckpointInfo) -> bool:
    return info.path.is_symlink() and info.path.name.startswith("step-")


def _make_newest(path: str, others: Collection[str]) -> None:
    """Lightning takes the newest mtime among the candidates; a `last.ckpt` of another callback must not win by that."""
    if all(os.stat(path).st_mtime > os.stat(other).st_mtime for other in others if os.path.exists(other)):
        return
    try:
        os.utime(path)
    except OSError as error:
        warnings.warn(f"could not touch {path!r} ({error}); Lightning may prefer another 'last'", stacklevel=2)


def timeline_after(folder: str, index: CheckpointIndex) -> int:
    """The timeline of a run that goes on in `folder` from the checkpoint of this index.

    It is that of the checkpoint, or a new one where the folder holds later checkpoints of the run: those of the new
    timeline are then the newer ones, however low their step.
    """
    run = [info for info in scan_checkpoints(folder) if info.status == "good" and info.run_id == index.run_id]
    if index.run_id is None or not any(place_in_run(info) > place_in_run(index) for info in run):
        return index.timeline
    return 1 + max(info.timeline or 0 for info in run)


def warn_of_bad(folder: str, told: Collection[str]) -> None:
    """Tells of what looks like a checkpoint and is none: by index and sizes, without reading the data.

    What is left of a cut short save is hidden, and nothing to tell of; nor is what was `told` of already.
    """
    found = [info for info in scan_checkpoints(folder) if info.status in ("corrupt", "incomplete")]
    bad = [str(info) for info in found if not info.path.name.startswith(".") and info.path.name not in told]
    if bad:
        rank_zero_warn(
            f"{folder!r} holds {len(bad)} that cannot be resumed from: {'; '.join(bad)}. "
            f"Look at them with: lightning-resume verify {shlex.quote(folder)}"
        )
