"""Ways to change a weight that autograd does not hear of, where no sample of its bytes is taken."""

from __future__ import annotations

import torch
from torch import nn

HIDDEN = 1_000_003  # an item of a weight of 12 MiB that no sample looks at


def change_by_data(weight: nn.Parameter) -> None:
    weight.data.view(-1)[HIDDEN] += 1


def change_by_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy().reshape(-1)[HIDDEN] += 1


def change_by_storage(weight: nn.Parameter) -> None:
    weight.untyped_storage()[4 * HIDDEN] ^= 1


def change_by_fused_optimizer(weight: nn.Parameter) -> None:
    weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([weight], fused=True, weight_decay=0.0)
    weight.grad = torch.zeros_like(weight)
    weight.grad.view(-1)[HIDDEN] = 1.0
    optimizer.step()
    weight.requires_grad_(False)
    weight.grad = None


HIDDEN_CHANGES = [change_by_data, change_by_numpy, change_by_storage, change_by_fused_optimizer]
