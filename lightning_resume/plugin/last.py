"""What `ckpt_path="last"` means."""

from __future__ import annotations

import os
import re
import warnings

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_resume.catalog import newest_good, scan_checkpoints
from lightning_resume.errors import NoGoodCheckpointError


def find_last(trainer: Trainer, folder: str) -> set[str]:
    """The newest good checkpoint in `folder`, by step number; an empty set and one info line where there is none.

    Raises:
        NoGoodCheckpointError: there are checkpoints, but only bad ones.
    """
    newest = newest_good(folder)
    if newest is not None:
        path = os.fspath(newest.path)
        _make_newest(path)
        return {path}
    bad = [info for info in scan_checkpoints(folder) if info.status == "corrupt"]
    if bad:
        raise NoGoodCheckpointError(folder, [f"{info.path}: {info.reason}" for info in bad])
    # Lightning would warn that there is none; for a first start that is what is expected.
    warnings.filterwarnings("ignore", message=re.escape('.fit(ckpt_path="last") is set, but there is no last checkpoint'))
    rank_zero_info(f"No checkpoint in {folder!r} yet: training starts from scratch.")
    return set()


def _make_newest(path: str) -> None:
    """Lightning takes the candidate with the newest mtime; a ModelCheckpoint's `last.ckpt` must not win by its clock."""
    try:
        os.utime(path)
    except OSError as error:
        warnings.warn(f"could not touch {path!r} ({error}); Lightning may prefer another 'last'", stacklevel=2)
