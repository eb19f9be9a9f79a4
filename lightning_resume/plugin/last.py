"""The callback's own checkpoints in a folder, and what `ckpt_path="last"` means."""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Collection
from dataclasses import replace

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_resume.catalog import CheckpointInfo, place_in_run, scan_checkpoints, step_checkpoints
from lightning_resume.errors import CheckpointError, NoGoodCheckpointError
from lightning_resume.format.index import CheckpointIndex
from lightning_resume.format.verify import verify_checkpoint


def find_last(folder: str, others: Collection[str]) -> set[str]:
    """The newest good checkpoint in `folder`, by timeline and step; an empty set and one info line where there is none.

    Each candidate is verified in full, the newest first. Those that fail are passed over with a warning that names
    them, what is wrong, and what is taken instead.

    Args:
        folder: where this callback saves.
        others: what other callbacks offer as their last.

    Raises:
        NoGoodCheckpointError: there are checkpoints, but only bad ones.
    """
    # What a kill in the middle of a save leaves is hidden; everything else was good once, or should have been.
    found = [info for info in scan_checkpoints(folder) if not info.path.name.startswith(".")]
    bad = [info for info in found if info.status in ("corrupt", "incomplete") or _is_link_to_step(info)]
    for candidate in reversed(step_checkpoints(folder)):
        try:
            verify_checkpoint(candidate.path)
        except CheckpointError as error:
            bad.append(replace(candidate, status="corrupt", reason=str(error).replace("\n", " ")))
        else:
            path = os.fspath(candidate.path)
            newer = [str(info) for info in bad if _step_of(info) > (candidate.global_step or 0)]
            if newer:
                rank_zero_warn(f"{candidate.path.name} in {folder!r} is resumed from, the newer ones are bad: {newer}")
            _make_newest(path, others)
            return {path}
    if bad:
        raise NoGoodCheckpointError(folder, bad)
    if others:
        return set()
    # Lightning would warn that there is none; for a first start that is what is expected.
    expected = re.escape('.fit(ckpt_path="last") is set, but there is no last checkpoint')
    warnings.filterwarnings("ignore", message=expected)
    rank_zero_info(f"No checkpoint in {folder!r} yet: training starts from scratch.")
    return set()


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


def warn_of_bad(folder: str) -> None:
    """Tells of what looks like a checkpoint and is none: by index and sizes, without reading the data.

    What is left of a cut short save is hidden, and nothing to tell of.
    """
    bad = [str(info) for info in scan_checkpoints(folder) if info.status in ("corrupt", "incomplete")]
    bad = [text for text in bad if not text.startswith(".")]
    if bad:
        rank_zero_warn(
            f"{folder!r} holds {len(bad)} that cannot be resumed from: {'; '.join(bad)}. "
            f"Look at them with: lightning-resume verify {shlex.quote(folder)}"
        )
