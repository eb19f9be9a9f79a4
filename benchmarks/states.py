"""The two states that are saved: a transformer with AdamW, and very many small tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]


class Block(nn.Module):
    """One layer of a transformer: its tensors only, nothing is computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def transformer(width: int, num_layers: int) -> nn.Module:
    """About 12 · width² parameters a layer, and an embedding of 16 · width² / 10."""
    return nn.Sequential(nn.Embedding(16 * width // 10, width), *(Block(width) for _ in range(num_layers)))


def trained(width: int = 768, num_layers: int = 11) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A transformer and its AdamW after one step; by default 1 GB of float32 in some 400 tensors, moments included."""
    torch.manual_seed(0)
    model = transformer(width, num_layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Weights and both moments, as Lightning saves them."""
    return {
        "epoch": 0,
        "global_step": 1,
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
    }


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, loaded: State) -> None:
    """Does what Lightning does with a loaded state: weights are copied, moments of the same kind are taken as they are.

    So the loaded moments live on, and those of before are freed.
    """
    model.load_state_dict(loaded["state_dict"])
    optimizer.load_state_dict(loaded["optimizer_states"][0])


def big_state(width: int = 768, num_layers: int = 11) -> State:
    """Weights and both moments; by default 1 GB of float32 in some 400 tensors."""
    return state_of(*trained(width, num_layers))


def small_state(num_tensors: int = 20_000) -> State:
    """Tensors of 1 to 4 KB, 51 MB by default."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(256, 1025, (num_tensors,), generator=generator).tolist()
    return {
        "state_dict": {f"layers.{n // 10}.weight_{n % 10}": torch.full((size,), 0.5) for n, size in enumerate(sizes)}
    }


def adapted_state(width: int, num_layers: int) -> tuple[State, list[str]]:
    """A frozen transformer with adapters of a hundredth of its size; the state, and the names of what is frozen."""
    model = transformer(width, num_layers).requires_grad_(False)
    frozen = [name for name, _ in model.named_parameters()]
    num_frozen = sum(parameter.numel() for parameter in model.parameters())
    state = {**model.state_dict(), **{f"adapter.{n}": torch.zeros(num_frozen // 1600) for n in range(16)}}
    return {"global_step": 1, "state_dict": state}, frozen


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a state, with the path to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors_of(item, f"{path}.{number}" if path else str(number))


def bytes_of(state: State) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for _, tensor in tensors_of(state))
