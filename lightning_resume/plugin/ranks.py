"""What several processes have to do together: gather their states, agree on a decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
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


def largest(trainer: Trainer, values: Sequence[int]) -> list[int]:
    """For each value the largest one of all ranks; the same on every rank. All ranks must call."""
    if trainer.world_size == 1:
        return list(values)
    tensor = torch.tensor(values, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return [int(value) for value in tensor.tolist()]
