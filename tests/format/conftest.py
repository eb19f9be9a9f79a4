"""What the tests of the format share: an exact comparison, and a round trip through a real directory."""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_resume.format.checkpoint import read_checkpoint, write_checkpoint


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in logical order: NaN payloads and signs of zeros count."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8) if dense.numel() else torch.empty(0, dtype=torch.uint8)


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype, shape, layout, requires_grad and bits."""
    if (left.dtype, left.shape, left.layout, left.requires_grad) != (
        right.dtype,
        right.shape,
        right.layout,
        right.requires_grad,
    ):
        return False
    if left.layout == torch.strided:
        return torch.equal(bits(left), bits(right))
    if left.layout == torch.sparse_coo:
        pairs = [(left._indices(), right._indices()), (left._values(), right._values())]
        return left.is_coalesced() == right.is_coalesced() and all(same_tensor(*pair) for pair in pairs)
    rows = "crow_indices" if left.layout in (torch.sparse_csr, torch.sparse_bsr) else "ccol_indices"
    columns = "col_indices" if rows == "crow_indices" else "row_indices"
    names = [rows, columns, "values"]
    return all(same_tensor(getattr(left.detach(), name)(), getattr(right.detach(), name)()) for name in names)


def same_array(left: Any, right: Any) -> bool:
    """Equal dtype, shape, order and bytes."""
    order = [array.flags.f_contiguous and not array.flags.c_contiguous for array in (left, right)]
    return (
        left.dtype.str == right.dtype.str
        and left.dtype.char == right.dtype.char
        and left.shape == right.shape
        and order[0] == order[1]
        and left.tobytes() == right.tobytes()
    )


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, all the way down; the order of dicts counts."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return same_tensor(left, right)
    if isinstance(left, np.ndarray):
        return same_array(left, right)
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if type(left) is float:
        return struct.pack("d", left) == struct.pack("d", right)
    if type(left) is complex:
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, Mapping):
        attributes = not hasattr(left, "__dict__") or same(list(vars(left).items()), list(vars(right).items()))
        factory = not isinstance(left, defaultdict) or left.default_factory is right.default_factory
        return attributes and factory and same(list(left.items()), list(right.items()))
    if isinstance(left, deque) and left.maxlen != right.maxlen:
        return False
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(itertools.starmap(same, zip(left, right, strict=True)))
    if isinstance(left, (set, frozenset)):
        types = [sorted(f"{type(item)}{item!r}" for item in side) for side in (left, right)]
        return types[0] == types[1] and left == right
    return bool(left == right)


@pytest.fixture(name="same")
def same_fixture() -> Callable[[Any, Any], bool]:
    """Gives the comparison to a test."""
    return same


@pytest.fixture
def round_trip(tmp_path: Path) -> Callable[..., Any]:
    """Writes a value as part of a checkpoint, verifies it and gives back what is read."""
    numbers = itertools.count()

    def run(value: Any, **arguments: Any) -> Any:
        path = tmp_path / f"step-{next(numbers):08d}"
        write_checkpoint(path, {"value": value}, **arguments)
        return read_checkpoint(path)["value"]

    return run
