"""The callback's own checkpoints in a folder, and what `ckpt_path="last"` means."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection
from dataclasses import replace

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_resume.catalog import CheckpointInfo, scan_checkpoints, step_dirname
from lightning_resume.errors import CheckpointError, NoGoodCheckpointError
from lightning_resume.format.verify import verify_checkpoint


def step_checkpoints(folder: str) -> list[CheckpointInfo]:
    """The good full checkpoints that are named after their step, by step; a ModelCheckpoint's are not among them."""
    return [
        info
        for info in scan_checkpoints(folder)
        if info.status == "good"
        and info.kind == "full"
        and info.global_step is not None
        and info.path.name == step_dirname(info.global_step)
    ]


def find_last(folder: str, others: Collection[str]) -> set[str]:
    """The newest good checkpoint in `folder`, by step number; an empty set and one info line where there is none.

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
            newer = [str(info) for info in bad if info.path.name > candidate.path.name]
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


def warn_of_newer(folder: str, path: str, global_step: int) -> None:
    """Says that a run which goes on from an older checkpoint shares its folder with newer ones."""
    newer = [info.path.name for info in step_checkpoints(folder) if (info.global_step or 0) > global_step]
    if newer:
        rank_zero_warn(
            f"Training goes on from {path!r}, but {folder!r} holds newer checkpoints ({', '.join(newer)}). "
            'Until it has passed them, "last" means the newest of them. Delete them, or pass another dirpath.'
        )
