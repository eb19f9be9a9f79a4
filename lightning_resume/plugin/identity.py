"""What else a resumed run must have in common with the saved one: its Trainer's settings, its devices, its streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_resume.data.fingerprint import first_look
from lightning_resume.data.global_order import global_identity
from lightning_resume.data.identity import (
    Difference,
    data_differences,
    data_version_differences,
    loader_identity,
)
from lightning_resume.errors import StateMismatchError
from lightning_resume.plugin import loops
from lightning_resume.plugin.positional import POSITIONAL
from lightning_resume.rng import STREAMS, RNGState

# field -> the word in `allow` that lets a difference pass
OVERRIDES = {
    "accumulate_grad_batches": "accumulation_changed",
    "precision": "precision_changed",
    "number of CUDA devices": "cuda_devices_changed",
}
MISSING_STREAM = "rng_missing"
COMBINED = "mode of the training loaders"


def trainer_identity(trainer: Trainer) -> dict[str, Any]:
    """The Trainer's settings that are compared, as the user configured them; to be called before training begins."""
    return {"accumulate_grad_batches": _accumulation(trainer), "precision": str(trainer.precision)}


def _accumulation(trainer: Trainer) -> int | str:
    """The configured factor, or the schedule of factors: the Trainer's attribute has only that of the last epoch."""
    for callback in loops.callbacks(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            schedule = callback.scheduling
            if len(schedule) == 1:
                return int(schedule[0])
            return ", ".join(f"{schedule[epoch]} from epoch {epoch}" for epoch in sorted(schedule))
    return int(trainer.accumulate_grad_batches)


def describe_run(
    trainer: Trainer, configured: Mapping[str, Any], data_version: str | None, item_rng: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that a resume compares, as plain JSON values; what the data sets changed in themselves is left out."""
    return {
        "data_version": data_version,
        "loaders": _loader_identities(trainer, item_rng, is_lasting=True),
        COMBINED: loops.combined_mode(trainer),
        **configured,
        "number of CUDA devices": len(RNGState.capture().cuda),
    }


def run_differences(
    trainer: Trainer, state: Mapping[str, Any], configured: Mapping[str, Any], data_version: str | None
) -> list[Difference]:
    """Compares this run with that of the save; what the save did not know is not compared.

    The loaders are not compared where Lightning has just asked for new ones, for an epoch that begins: the save
    describes those of the epoch before.
    """
    saved = state["identity"]
    differences = data_version_differences(saved["data_version"], data_version)
    if not _has_new_loaders(trainer, state):
        current = _loader_identities(trainer, state["item_rng"], is_lasting=False)
        differences += data_differences(saved["loaders"], current)
        differences += _mode_differences(trainer, saved)
    now = {**configured, "number of CUDA devices": _num_cuda_devices(trainer, saved)}
    return differences + [
        Difference(field, saved[field], now[field], word, StateMismatchError)
        for field, word in OVERRIDES.items()
        if field in saved and field in now and saved[field] != now[field]
    ]


def _loader_identities(trainer: Trainer, item_rng: Mapping[str, Any], *, is_lasting: bool) -> list[dict[str, Any]]:
    """The training loaders by plain values; with positional randomness as all ranks together have them."""
    loaders = loops.train_loaders(trainer)
    identities = [loader_identity(loader, is_lasting=is_lasting) for loader in loaders]
    if item_rng["kind"] != POSITIONAL:
        return identities
    return [
        global_identity(identity, loader, trainer.world_size)
        for identity, loader in zip(identities, loaders, strict=True)
    ]


def _mode_differences(trainer: Trainer, saved: Mapping[str, Any]) -> list[Difference]:
    """Of several loaders on both sides: whether they take turns as they did."""
    before, now = saved.get(COMBINED), loops.combined_mode(trainer)
    return [Difference(COMBINED, before, now, "data_changed")] if None not in (before, now) and before != now else []


def _has_new_loaders(trainer: Trainer, state: Mapping[str, Any]) -> bool:
    interval = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    last = state["extras"]["last_train_dl_reload_epoch"]
    return bool(state["between_epochs"] and interval and trainer.current_epoch - last >= interval)


def _num_cuda_devices(trainer: Trainer, saved: Mapping[str, Any]) -> int:
    """How many there are; none where neither the saved run nor this one uses them."""
    are_used = saved.get("number of CUDA devices") or trainer.strategy.root_device.type == "cuda"
    return torch.cuda.device_count() if are_used else 0


def has_same_turns(trainer: Trainer, state: Mapping[str, Any]) -> bool:
    """Whether there are as many loaders as at the save, in the same mode."""
    is_same_number = len(loops.train_loaders(trainer)) == len(state["loaders"])
    return is_same_number and not _mode_differences(trainer, state["identity"])


def missing_streams(rng: Mapping[str, Any]) -> list[str]:
    """The global random streams that a saved state lacks."""
    return [name for name in (*STREAMS, "cuda") if name not in rng]


def has_other_accumulation(state: Mapping[str, Any], configured: Mapping[str, Any]) -> bool:
    """Whether the user has changed the accumulation factor, so that the saved one is not to be put back."""
    field = "accumulate_grad_batches"
    return bool(state["identity"].get(field, configured[field]) != configured[field])


def extras_to_restore(trainer: Trainer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The saved extras, with the user's new accumulation factor if there is one."""
    extras = dict(state["extras"])
    if state["has_other_accumulation"]:
        extras["accumulate_grad_batches"] = trainer.accumulate_grad_batches
    return extras


def look_at_data(loader: Any, told: set[str]) -> None:
    """Takes a first look at a loader's data set, before it is used; says once what cannot be compared at a resume.

    Args:
        loader: a training loader.
        told: classes of which it has been said; one is added.
    """
    dataset = getattr(loader, "dataset", loader)
    reason = first_look(dataset)
    name = type(dataset).__qualname__
    if reason is not None and name not in told:
        told.add(name)
        rank_zero_info(
            f"A resume compares the type and length of the data set {name}, not its content: {reason}. "
            "Give it a method __fingerprint__() that returns a str, or pass data_version=..."
        )
