"""The callback's own checkpoints in a folder, and what `ckpt_path="last"` means."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_resume.catalog import CheckpointInfo, scan_checkpoints, step_dirname
from lightning_resume.errors import NoGoodCheckpointError


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

    Args:
        folder: where this callback saves.
        others: what other callbacks offer as their last.

    Raises:
        NoGoodCheckpointError: there are checkpoints, but only bad ones.
    """
    good = step_checkpoints(folder)
    if good:
        path = os.fspath(good[-1].path)
        _make_newest(path, others)
        return {path}
    # What a kill during the very first save leaves is hidden; everything else that is bad was good once.
    found = [info for info in scan_checkpoints(folder) if not info.path.name.startswith(".")]
    bad = [info for info in found if info.status in ("corrupt", "incomplete")]
    if bad:
        raise NoGoodCheckpointError(folder, bad)
    if others:
        return set()
    # Lightning would warn that there is none; for a first start that is what is expected.
    expected = re.escape('.fit(ckpt_path="last") is set, but there is no last checkpoint')
    warnings.filterwarnings("ignore", message=expected)
    rank_zero_info(f"No checkpoint in {folder!r} yet: training starts from scratch.")
    return set()


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
