"""What one rank adds to Lightning's checkpoint so that it can go on exactly, and how it is put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_resume.data.identity import settle
from lightning_resume.data.loader import ResumableLoader
from lightning_resume.data.streams import Streams, pack, unpack
from lightning_resume.errors import MissingStateError, ResumeError, StateMismatchError
from lightning_resume.plugin import averaging, identity, loops, module_state
from lightning_resume.plugin.metrics import capture_metrics, restore_dictionaries, restore_metrics
from lightning_resume.plugin.optimizers import describe_optimizers
from lightning_resume.plugin.positional import POSITIONAL
from lightning_resume.rng import RNGState

_KEYS = (
    "moment",
    "seeds",
    "item_rng",
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
    trainer: Trainer,
    *,
    moment: str,
    data_version: str | None,
    schedulers: list[str],
    streams: RNGState | None,
    item_rng: Mapping[str, Any],
    configured: Mapping[str, Any],
) -> dict[str, Any]:
    """This rank's state, in plain containers and tensors. Draws no number, moves no stream.

    Args:
        trainer: a trainer that is fitting.
        moment: "cut" between two batches, "end" when training has ended, "hook" anywhere else.
        data_version: the user's own name for the data.
        schedulers: their classes when the fit began; callbacks add others later.
        streams: the global streams before save hooks could draw; None: as they stand.
        item_rng: kind and seed of the items' randomness.
        configured: what `trainer_identity` said before the fit began; callbacks change settings later.
    """
    ahead = loops.num_batches_ahead(trainer)
    return {
        "moment": moment,
        "batch_in_epoch": loops.batch_in_epoch(trainer),
        "identity": identity.describe_run(trainer, configured, data_version, item_rng),
        "seeds": loops.capture_seeds(),
        "item_rng": dict(item_rng),
        "rng": (streams or RNGState.capture()).state_dict(),
        "generators": pack(Streams(module_state.held_generators(trainer)).capture_generators()),
        "loaders": [loader.state_dict(ahead) for loader in loops.train_loaders(trainer)],
        "val_loaders": [_idle_state(loader, moment) for loader in loops.val_loaders(trainer)],
        "optimizers": {**describe_optimizers(trainer), "schedulers": schedulers},
        "averaging": averaging.places_set_up(trainer),
        "combined": loops.combined_state(trainer),
        "extras": loops.capture_extras(trainer),
        "module": module_state.capture_module(trainer),
        "metrics": capture_metrics(trainer),
    }


def check_rank_state(state: Mapping[str, Any], allow: Collection[str]) -> None:
    """Refuses a state that lacks a part, or has random streams that are none, before anything is restored.

    Raises:
        MissingStateError: a part is missing; the error names it.
        StateMismatchError: a random stream's state does not fit such a stream.
    """
    for key in _KEYS:
        if key not in state:
            raise MissingStateError(f"rank state {key!r}")
    for name in identity.missing_streams(state["rng"]):
        if identity.MISSING_STREAM not in allow:
            words = (identity.MISSING_STREAM,)
            remedy = f"Resume from another checkpoint, or let it go on as it stands now with allow={words!r}."
            raise MissingStateError(f"random stream {name!r}", remedy)
    try:
        _streams_of(state).require_fitting()
    except ResumeError:
        raise
    except Exception as error:  # whatever the words of a forged state lead to
        raise StateMismatchError("random streams", f"{type(error).__name__}: {error}", "states of streams") from error


def check_run(
    trainer: Trainer,
    state: Mapping[str, Any],
    configured: Mapping[str, Any],
    data_version: str | None,
    allow: Collection[str],
) -> list[str]:
    """Compares data, settings and devices with those of the save.

    Returns:
        The differences that `allow` lets pass, one text each.

    Raises:
        StateMismatchError: some are not allowed; a DataChangedError where the first of them concerns the data.
    """
    allowed = settle(identity.run_differences(trainer, state, configured, data_version), allow)
    allowed += _other_batch_sizes(trainer, state)
    return allowed + [f"random stream {name!r}: absent" for name in identity.missing_streams(state["rng"])]


def _other_batch_sizes(trainer: Trainer, state: Mapping[str, Any]) -> list[str]:
    """What entering an epoch in its middle with batches of another size means for its items, one text each."""
    num_batches, texts = state["batch_in_epoch"], []
    num_ranks = (
        trainer.world_size if state["item_rng"]["kind"] == POSITIONAL else 1
    )  # of whose batches it tells the size
    for saved, loader in zip(state["identity"]["loaders"], loops.train_loaders(trainer), strict=False):
        before, now = saved.get("batch_size"), (getattr(loader, "batch_size", None) or 0) * num_ranks
        if num_batches and before and now and before != now:
            fate = "left out" if now > before else "trained again"
            num_items = num_batches * abs(now - before)
            texts.append(f"{num_batches} batches of the new size are taken for trained: {num_items} items are {fate}")
    return texts


def _streams_of(state: Mapping[str, Any]) -> RNGState:
    """The saved global streams; what a resume was allowed to go on without stays as it is now."""
    now = RNGState.capture().state_dict()
    saved = {**now, **state["rng"]}
    if len(saved["cuda"]) not in (0, torch.cuda.device_count()):
        saved["cuda"] = now["cuda"]
    return RNGState.from_state_dict(saved)


def enter_epoch(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Before an epoch that follows a checkpoint taken between epochs: streams and metrics as they stood."""
    loops.restore_extras(trainer, identity.extras_to_restore(trainer, state))
    restore_dictionaries(trainer, state["metrics"])
    Streams(module_state.held_generators(trainer)).restore(unpack(state["generators"]))
    _streams_of(state).restore()


def enter_first_batch(
    trainer: Trainer, state: Mapping[str, Any], *, between_epochs: bool, allow: Collection[str]
) -> list[str]:
    """Before the first resumed batch: everything stands as it stood at the save.

    Returns:
        The differences that `allow` lets pass.
    """
    if not between_epochs:
        loops.restore_extras(trainer, identity.extras_to_restore(trainer, state))
    differences = _restore_val_loaders(trainer, state["val_loaders"], allow)
    differences += _restore_loaders(trainer, state, allow, between_epochs=between_epochs)
    if between_epochs:
        # The pass begins live, from the streams as they stand now: the epoch's hooks may have drawn.
        loops.begin_pass(trainer, None)
        return differences
    averaging.set_up_again(trainer, state["averaging"], state["optimizer_states"])
    module_state.restore_module(trainer, state["module"])
    Streams(module_state.held_generators(trainer)).restore(unpack(state["generators"]))
    restore_metrics(trainer, state["metrics"])
    _streams_of(state).restore()
    # Leaves the streams as it finds them, except where a pass had not really begun: that one begins now, live.
    is_same_round = identity.has_same_turns(trainer, state)
    loops.begin_pass(trainer, state["combined"] if is_same_round else {**state["combined"], "consumed": None})
    return differences


def _restore_loaders(
    trainer: Trainer, state: Mapping[str, Any], allow: Collection[str], *, between_epochs: bool
) -> list[str]:
    """Puts the loaders where they stood; one of another kind or without a saved place, if allowed, begins afresh."""
    differences: list[str] = []
    loaders = loops.train_loaders(trainer)
    for index, (loader, saved) in enumerate(zip_longest(loaders, state["loaders"])):
        if loader is None:
            continue
        name = _name("training loader", index, len(loaders))
        fresh = {**loader.state_dict(), "is_iterating": False}
        if saved is None or saved["kind"] != fresh["kind"]:
            differences += loader.load_state_dict(fresh, allow, name=name)
        else:
            saved = {**saved, "is_iterating": False} if between_epochs else saved
            _tell_cost(loader, saved)
            differences += loader.load_state_dict(saved, allow, name=name)
    return differences


def _tell_cost(loader: ResumableLoader, saved: Mapping[str, Any]) -> None:
    if (count := loader.num_read_again(saved)) > 0:
        name = type(getattr(loader, "dataset", loader)).__name__
        rank_zero_info(
            f"{name} has no positions: {count} batches are read again to get back. "
            "state_dict() and load_state_dict() of the data set would save that."
        )


def _idle_state(loader: ResumableLoader, moment: str) -> dict[str, Any]:
    """A validation loader's state; outside a hook its pass is over, and what its workers still read is waited for."""
    if moment != "hook":
        loader.finish_pass()
    return loader.state_dict()


def _restore_val_loaders(trainer: Trainer, states: list[dict[str, Any]], allow: Collection[str]) -> list[str]:
    loaders = loops.val_loaders(trainer)
    if states and len(loaders) != len(states):
        raise StateMismatchError("number of validation loaders", len(states), len(loaders))
    differences: list[str] = []
    for index, (loader, saved) in enumerate(zip(loaders, states, strict=False)):
        name = _name("validation loader", index, len(loaders))
        found = loader.load_state_dict({**saved, "is_iterating": False}, allow, name=name)
        differences += [f"{text} ({name})" for text in found]
    return differences


def _name(kind: str, index: int, num_loaders: int) -> str:
    return f"{kind} {index}" if num_loaders > 1 else f"the {kind}"
