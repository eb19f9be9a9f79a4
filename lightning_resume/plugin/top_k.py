"""The best checkpoints of a user's ModelCheckpoint, after a resume into another folder.

Lightning forgets them then: a logger that numbers its folders, or a folder that was moved, is enough. What it had
chosen would no longer be compared with what comes, and another checkpoint would be the best one. Checked on lightning
2.6.6.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_resume.plugin import loops

_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")


def restore_top_k(trainer: Trainer, states: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Restores the best checkpoints of each ModelCheckpoint whose folder is another one than at the save.

    They stay where they are, and Lightning deletes none outside of its folder; after a move they are found in the new
    place.

    Args:
        trainer: after Lightning has restored its callbacks.
        states: of the callbacks, by their keys, as they were saved.

    Returns:
        What could not be restored, and what was, one text each.
    """
    lost, restored = [], []
    for callback in loops.callbacks(trainer):
        state = states.get(callback.state_key)
        if not isinstance(callback, ModelCheckpoint) or not isinstance(state, Mapping) or "best_k_models" not in state:
            continue  # this package's own is one of them
        before, now = state.get("dirpath"), callback.dirpath
        if before == now:
            continue
        name = f"{type(callback).__name__}(monitor={callback.monitor!r})"
        found = {
            path: _find(path, before, now)
            for path in [*state["best_k_models"], *(state.get(key, "") for key in _PATHS)]
        }
        if missing := [path for path, place in found.items() if place is None]:
            lost.append(f"best checkpoints of {name}, not compared with from now on: {missing[0]!r} is not there")
            continue
        best = {found[path]: score for path, score in state["best_k_models"].items()}
        paths = {key: found[state.get(key, "")] for key in _PATHS}
        callback.load_state_dict({**state, **paths, "best_k_models": best, "dirpath": now})
        restored.append(f"best checkpoints of {name} are those from {str(before)!r}; new ones go to {str(now)!r}")
    return lost, restored


def _find(path: str, before: Any, now: Any) -> str | None:
    """Where a checkpoint is now; None where it is not to be found."""
    if not path or os.path.exists(path):
        return path
    if before and now and path.startswith(os.path.join(before, "")):
        moved = os.path.join(now, os.path.relpath(path, before))
        if os.path.exists(moved):
            return moved
    return None
