"""Optimizers and schedulers: are they those of the save, and does each parameter get its own state back?

PyTorch matches an optimizer's state by position. Parameters handed over in another order would get each other's
moments without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_resume.errors import StateMismatchError

# Their state is one vector over all parameters: it cannot be dealt out anew.
_UNDIVIDED = (torch.optim.LBFGS.__name__,)
_REMEDY = (
    "Return from configure_optimizers() what it returned at the save; to train on with something else, load the "
    "weights alone with load_module() and start a new run."
)


def describe_optimizers(trainer: Trainer) -> dict[str, Any]:
    """The optimizers and schedulers: classes, and the names of the parameters in each group."""
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters(remove_duplicate=True)}
    return {
        "optimizers": [
            {
                "class": type(optimizer).__name__,
                "groups": [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups],
            }
            for optimizer in trainer.optimizers
        ],
        "schedulers": [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs],
    }


def match_optimizers(
    saved: Mapping[str, Any], current: Mapping[str, Any], optimizer_states: Sequence[dict[str, Any]]
) -> list[str]:
    """Compares optimizers and schedulers with those of the save; states of reordered parameters are matched by name.

    Args:
        saved: what `describe_optimizers` said at the save.
        current: what it says now.
        optimizer_states: the saved states; where the order has changed, they are brought into that of now.

    Returns:
        The optimizers that were matched by name, one text each.

    Raises:
        StateMismatchError: names the optimizer and both sides.
    """
    for field in ("optimizers", "schedulers"):
        if len(saved[field]) != len(current[field]):
            raise StateMismatchError(f"number of {field}", len(saved[field]), len(current[field]), _REMEDY)
    if saved["schedulers"] != current["schedulers"]:
        raise StateMismatchError("classes of the schedulers", saved["schedulers"], current["schedulers"], _REMEDY)
    matched: list[str] = []
    for index, (before, now) in enumerate(zip(saved["optimizers"], current["optimizers"], strict=True)):
        if before["class"] != now["class"]:
            raise StateMismatchError(f"class of optimizer {index}", before["class"], now["class"], _REMEDY)
        if before["groups"] == now["groups"]:
            continue
        if not _can_be_matched(before, now):
            raise StateMismatchError(
                f"parameters of optimizer {index}",
                *_first_difference(before["groups"], now["groups"]),
                "Hand the optimizer the same parameters in the same order; if it takes those with requires_grad, "
                "freeze the layers that were frozen at the save, and no others.",
            )
        _reorder(optimizer_states[index], before["groups"], now["groups"])
        matched.append(f"optimizer {index}: parameters in another order, their state was matched by name")
    return matched


def _can_be_matched(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    if saved["class"] in _UNDIVIDED or len(saved["groups"]) != len(current["groups"]):
        return False
    pairs = list(zip(saved["groups"], current["groups"], strict=True))
    return all(None not in before and sorted(before) == sorted(now) for before, now in pairs if before != now)


def _reorder(state: dict[str, Any], saved: Sequence[list[str]], current: Sequence[list[str]]) -> None:
    """Lists each group's parameters in the order of now: PyTorch goes by that list."""
    for group, before, now in zip(state["param_groups"], saved, current, strict=True):
        numbers = dict(zip(before, group["params"], strict=True))
        group["params"] = [numbers[name] for name in now]


def _first_difference(saved: Sequence[list[str]], current: Sequence[list[str]]) -> tuple[str, str]:
    for before, now in zip(saved, current, strict=False):
        for index in range(max(len(before), len(now))):
            sides = [names[index] if index < len(names) else "none" for names in (before, now)]
            if sides[0] != sides[1]:
                return f"{sides[0]} at place {index}", f"{sides[1]} at place {index}"
    return f"{len(saved)} groups", f"{len(current)} groups"
