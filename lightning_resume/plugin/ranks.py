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


def any_rank(trainer: Trainer, flags: Sequence[bool]) -> list[bool]:
    """For each flag, whether it is set on any rank; the same on every rank. All ranks must call."""
    if trainer.world_size == 1:
        return list(flags)
    tensor = torch.tensor([int(flag) for flag in flags], device=trainer.strategy.root_device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return [bool(flag) for flag in tensor.tolist()]
