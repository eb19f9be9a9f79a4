"""What several processes have to do together: gather their states, agree on a decision."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed
from lightning.pytorch import Trainer

T = TypeVar("T")


def gather(trainer: Trainer, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's state, in rank order, on every rank. All ranks must call."""
    if trainer.world_size == 1:
        return [state]
    states: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(states, state)
    return states


def decide(trainer: Trainer, decision: T) -> T:
    """Rank 0's decision, on every rank. All ranks must call."""
    if trainer.world_size == 1:
        return decision
    return trainer.strategy.broadcast(decision, src=0)
