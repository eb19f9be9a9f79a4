"""What one rank adds to Lightning's checkpoint so that it can go on exactly, and how it is put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_resume.data.identity import check_data_version, check_identity, loader_identity
from lightning_resume.data.streams import Streams, pack, unpack
from lightning_resume.errors import MissingStateError, StateMismatchError
from lightning_resume.plugin import averaging, loops
from lightning_resume.plugin.metrics import capture_metrics, restore_dictionaries, restore_metrics
from lightning_resume.rng import RNGState

_KEYS = (
    "moment",
    "seeds",
    "batch_in_epoch",
    "identity",
    "rng",
    "generators",
    "loaders",
    "val_loaders",
    "averaging",
    "combined",
    "optimizers",
    "extras",
    "module",
    "metrics",
)


def capture_rank_state(
    trainer: Trainer, *, moment: str, data_version: str | None, optimizers: Mapping[str, Any]
) -> dict[str, Any]:
    """This rank's state, in plain containers and tensors. Draws no number, moves no stream.

    Args:
        trainer: a trainer that is fitting.
        moment: "cut" between two batches, "end" when training has ended, "hook" anywhere else.
        data_version: the user's own name for the data.
        optimizers: what `describe_optimizers` said when the fit began; callbacks add schedulers later.
    """
    ahead = loops.num_batches_ahead(trainer)
    return {
        "moment": moment,
        "batch_in_epoch": loops.batch_in_epoch(trainer),
        "identity": {
            "data_version": data_version,
            "loaders": [loader_identity(loader) for loader in loops.train_loaders(trainer)],
        },
        "seeds": loops.capture_seeds(),
        "rng": RNGState.capture().state_dict(),
        "generators": pack(Streams(loops.held_generators(trainer)).capture_generators()),
        "loaders": [loader.state_dict(ahead) for loader in loops.train_loaders(trainer)],
        "val_loaders": [loader.state_dict() for loader in loops.val_loaders(trainer)],
        "optimizers": dict(optimizers),
        "averaging": averaging.places_set_up(trainer),
        "combined": loops.combined_state(trainer),
        "extras": loops.capture_extras(trainer),
        "module": loops.capture_module(trainer),
        "metrics": capture_metrics(trainer),
    }


def check_rank_state(state: Mapping[str, Any]) -> None:
    """Refuses a state that lacks a part, before anything is restored.

    Raises:
        MissingStateError: a part is missing; the error names it.
    """
    for key in _KEYS:
        if key not in state:
            raise MissingStateError(f"rank state {key!r}")
    RNGState.from_state_dict(state["rng"])


def check_data(
    trainer: Trainer, state: Mapping[str, Any], data_version: str | None, allow: Collection[str]
) -> list[str]:
    """Compares the loaders with those of the save; returns the differences that `allow` lets pass."""
    current = [loader_identity(loader) for loader in loops.train_loaders(trainer)]
    saved = state["identity"]
    return [
        *check_data_version(saved["data_version"], data_version, allow),
        *check_identity(saved["loaders"], current, allow),
    ]


def enter_epoch(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Before an epoch that follows a checkpoint taken between epochs: streams and metrics as they stood."""
    loops.restore_extras(trainer, state["extras"])
    restore_dictionaries(trainer, state["metrics"])
    Streams(loops.held_generators(trainer)).restore(unpack(state["generators"]))
    RNGState.from_state_dict(state["rng"]).restore()


def enter_first_batch(
    trainer: Trainer, state: Mapping[str, Any], *, between_epochs: bool, allow: Collection[str]
) -> list[str]:
    """Before the first resumed batch: everything stands as it stood at the save.

    Returns:
        The differences that `allow` lets pass.
    """
    if not between_epochs:
        loops.restore_extras(trainer, state["extras"])
    differences = _restore_val_loaders(trainer, state["val_loaders"], allow)
    loaders = loops.train_loaders(trainer)
    if len(loaders) != len(state["loaders"]):
        raise StateMismatchError("number of training loaders", len(state["loaders"]), len(loaders))
    for loader, saved in zip(loaders, state["loaders"], strict=True):
        differences += loader.load_state_dict({**saved, "is_iterating": False} if between_epochs else saved, allow)
    if between_epochs:
        # The pass begins live, from the streams as they stand now: the epoch's hooks may have drawn.
        loops.begin_pass(trainer, None)
        return differences
    averaging.set_up_again(trainer, state["averaging"], state["optimizer_states"])
    loops.restore_module(trainer, state["module"])
    Streams(loops.held_generators(trainer)).restore(unpack(state["generators"]))
    restore_metrics(trainer, state["metrics"])
    RNGState.from_state_dict(state["rng"]).restore()
    # Leaves the streams as it finds them, except where a pass had not really begun: that one begins now, live.
    loops.begin_pass(trainer, state["combined"])
    return differences


def _restore_val_loaders(trainer: Trainer, states: list[dict[str, Any]], allow: Collection[str]) -> list[str]:
    loaders = loops.val_loaders(trainer)
    if states and len(loaders) != len(states):
        raise StateMismatchError("number of validation loaders", len(states), len(loaders))
    differences: list[str] = []
    for loader, saved in zip(loaders, states, strict=False):
        differences += loader.load_state_dict({**saved, "is_iterating": False}, allow)
    return differences
