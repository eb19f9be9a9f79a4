"""`item_rng="positional"` in a Lightning run: the run's seed, its loaders, and another number of processes."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer

from lightning_resume.data.loader import ResumableLoader
from lightning_resume.data.positional import Positional, key_of
from lightning_resume.data.positional_loader import why_not_positional
from lightning_resume.errors import StateMismatchError, WorldSizeError
from lightning_resume.plugin.ranks import decide
from lightning_resume.rng import RNGState

STOCK, POSITIONAL = "stock", "positional"


def fresh_seed(trainer: Trainer, item_rng: str) -> int | None:
    """The seed of a run that begins: `seed_everything`'s, or else torch's; rank 0's. All ranks must call.

    None in a run whose items are drawn as PyTorch draws them.
    """
    if item_rng == STOCK:
        return None
    return decide(trainer, int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())) % 2**32)


def wrap(trainer: Trainer, loader: object, seed: int | None) -> ResumableLoader:
    """The loader, wrapped; by position where the run has a seed for it.

    A validation loader whose items have no positions is left to draw as it always did.

    Raises:
        UnsupportedSetupError: a training loader's items have no positions.
    """
    if seed is None or (not trainer.training and why_not_positional(loader) is not None):
        return ResumableLoader(loader)
    positional = Positional(seed, trainer.global_rank, trainer.world_size, lambda: trainer.current_epoch)
    return ResumableLoader(loader, positional)


def check_item_rng(checkpoint: Mapping[str, Any], item_rng: str, world_size: int) -> None:
    """Refuses a checkpoint whose items were drawn in another way, or by another number of processes.

    Raises:
        WorldSizeError: another number of processes, and the items have no positions.
        StateMismatchError: the other `item_rng`.
    """
    saved = checkpoint["rank_state"]["item_rng"]["kind"]
    if checkpoint["world_size"] != world_size and saved != POSITIONAL:
        raise WorldSizeError(checkpoint["world_size"], world_size)
    if saved != item_rng:
        raise StateMismatchError("item_rng", saved, item_rng, f"Pass item_rng={saved!r}.")


def for_rank(checkpoint: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The rank's own saved state; that of a rank which there was not has random streams of its own."""
    state: dict[str, Any] = checkpoint["rank_state"]
    if rank < checkpoint["world_size"]:
        return state
    key = key_of(state["item_rng"]["seed"], "rank", rank, checkpoint["global_step"])
    number = int.from_bytes(key[:4], "little")
    streams = RNGState(
        random.Random(number).getstate(),
        np.random.RandomState(number).get_state(legacy=False),
        torch.Generator().manual_seed(number).get_state(),
        tuple(state["rng"].get("cuda", ())),
    )
    return {**state, "rng": streams.state_dict()}


def verdict(differences: Sequence[str], saved_world_size: int, world_size: int, notes: Sequence[str] = ()) -> str:
    """What is exact about a resume, and what is not.

    Args:
        differences: that were allowed.
        saved_world_size: number of processes that saved the checkpoint.
        world_size: number of processes now.
        notes: what else there is to be told.
    """
    if saved_world_size == world_size:
        return "; ".join(["NOT exact: " + "; ".join(differences) if differences else "exact", *notes])
    rest = f"other world size ({saved_world_size} → {world_size}): per-rank streams (dropout) and running means differ"
    text = "NOT exact: " + "; ".join([*differences, rest]) if differences else f"exact order and items; {rest}"
    return "; ".join([text, *notes])
