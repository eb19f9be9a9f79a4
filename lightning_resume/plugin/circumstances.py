"""What a run depends on and a resume cannot put back: Trainer settings, versions, threads, and numbers in the code.

A difference is no reason to refuse a resume, but it is told.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resume.plugin.attributes import changed_attributes, forgotten_attributes, look_at_attributes

MAX_TOLD = 8


def look_at_beginning(trainer: Trainer) -> dict[str, Any]:
    """How a fit begins: after the optimizers are made, before their state is restored."""
    return {
        "settings": _settings(trainer),
        "optimizers": [[_numbers(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
        "attributes": look_at_attributes(trainer),
    }


def capture_circumstances(trainer: Trainer, beginning: Mapping[str, Any]) -> dict[str, Any]:
    """For a checkpoint: how the fit began, and the plain attributes that have changed since; nothing before it did."""
    if not beginning:
        return {}
    return {
        **beginning,
        "attributes": changed_attributes(trainer, beginning["attributes"]),
        "num_training_batches": trainer.num_training_batches,
    }


def compare_circumstances(
    trainer: Trainer, saved: Mapping[str, Any] | None, beginning: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Compares a fit with that of the save, when all has been restored; warns of attributes that have not been.

    Args:
        trainer: before its first resumed batch.
        saved: what `capture_circumstances` returned, if anything.
        beginning: what `look_at_beginning` returned in this process.

    Returns:
        What makes this run another one, and what else there is to be told, one text each.
    """
    if not saved:
        return [], []
    before, now = dict(saved["settings"]), dict(beginning["settings"])
    if saved["num_training_batches"] == trainer.num_training_batches:  # the limit changes nothing
        now["limit_train_batches"] = before["limit_train_batches"]
    changed = [name for name in before if name in now and before[name] != now[name]]
    differences = [f"{name}: {before[name]!r} → {now[name]!r}" for name in changed]
    notes = [f"{text}; the saved one goes on" for text in _other_numbers(saved["optimizers"], beginning["optimizers"])]
    forgotten = forgotten_attributes(trainer, saved["attributes"])
    if forgotten:
        notes.append(f"not restored, as no state_dict has them: {listed(forgotten)}")
        rank_zero_warn(
            "These attributes had changed when the checkpoint was saved, and start anew (saved → now): "
            f"{listed([f'{name}: {sides}' for name, sides in forgotten.items()])}. Where training depends on one, put "
            "it into state_dict() or on_save_checkpoint() of its owner, or make it a buffer."
        )
    return differences, notes


def weights_in_callbacks(checkpoint: Mapping[str, Any]) -> list[str]:
    """What a callback's state had in common with the model at the save: after a resume the callback has a copy of it.

    That is as it should be for a snapshot, and not for a callback that goes on using its model's own tensor.

    Args:
        checkpoint: as it was read; tensors that were the same memory at the save are one there.

    Returns:
        Key paths, such as ``Callback.best.0``.
    """
    weights = [*checkpoint["state_dict"].values(), *checkpoint.get("current_model_state", {}).values()]
    places = {value.data_ptr() for value in weights if isinstance(value, torch.Tensor) and value.numel()}
    found: list[str] = []
    pending = [(str(key), state) for key, state in checkpoint["callbacks"].items()]
    while pending:
        path, value = pending.pop()
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and value.numel() and value.data_ptr() in places:
                found.append(path)
        elif isinstance(value, Mapping):
            pending += [(f"{path}.{key}", child) for key, child in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(f"{path}.{index}", child) for index, child in enumerate(value)]
    return sorted(found)


def _settings(trainer: Trainer) -> dict[str, Any]:
    clip = trainer.gradient_clip_val or None
    algorithm = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm) or "norm")
    return {
        "gradient_clip_val": clip,
        "gradient_clip_algorithm": algorithm if clip is not None else None,
        "limit_train_batches": trainer.limit_train_batches,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "number of threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "lightning": str(lightning.__version__),
        "numpy": str(np.__version__),
        "machine": platform.machine(),
    }


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's options in one group: numbers, flags and tuples of them."""
    values = {name: value.item() if _is_number(value) else value for name, value in group.items() if name != "params"}
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _is_plain(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, bool | int | float) for part in parts)


def _other_numbers(saved: list[Any], current: list[Any]) -> list[str]:
    """Options that the code gives another value than it did; groups that came or went are not compared."""
    texts = []
    for index, (before, now) in enumerate(zip(saved, current, strict=False)):
        for number, (old, new) in enumerate(zip(before, now, strict=False)):
            place = f"optimizer {index}" + (f", group {number}" if len(before) > 1 else "")
            names = [name for name in old if name in new and old[name] != new[name] and name != "initial_lr"]
            texts += [f"{name} of {place} in the code: {old[name]!r} → {new[name]!r}" for name in names]
    return texts


def listed(texts: Any) -> str:
    """The first few, and how many there are."""
    texts = list(texts)
    more = [f"… ({len(texts)} in all)"] if len(texts) > MAX_TOLD else []
    return ", ".join([*texts[:MAX_TOLD], *more])
