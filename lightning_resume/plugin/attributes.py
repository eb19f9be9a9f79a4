"""Plain attributes of modules and callbacks that have changed as the run went on, and that nobody restores.

What such an attribute means is its owner's business: it is not put back. A resume names those that had changed at the
save and that do not come back with the same value, through a `state_dict` or a load hook.
"""

from __future__ import annotations

import dis
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from inspect import isfunction
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn

from lightning_resume.data.evolving import look
from lightning_resume.plugin import loops

LIBRARIES = frozenset(
    {"torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_resume"}
)
MAX_CHILDREN = 256
MAX_SHOWN = 60

Digests = dict[str, dict[str, str]]
"""Owner -> attribute -> digest of its value."""


def look_at_attributes(trainer: Trainer) -> Digests:
    """The plain attributes of the module, its children, the data module and the user's callbacks, as they are now.

    Numbers, texts, flags, arrays, tensors, and containers of them, with up to 1000 elements. Only instance dictionaries
    are read: no property and nothing else of the user's is called. Names with an underscore in front, and those of
    Lightning's and torch's own classes, are left out.
    """
    return {name: look(vars(owner), _is_users(owner)) for name, owner in _owners(trainer).items()}


def changed_attributes(trainer: Trainer, before: Digests) -> dict[str, dict[str, tuple[str, str]]]:
    """Those that differ from what `look_at_attributes` saw: owner -> attribute -> (digest, short text)."""
    owners, changed = _owners(trainer), {}
    for name, digests in look_at_attributes(trainer).items():
        seen = before.get(name, {})
        values = vars(owners[name])
        new = {key: (digest, _shown(values[key])) for key, digest in digests.items() if seen.get(key) != digest}
        if new:
            changed[name] = new
    return changed


def forgotten_attributes(trainer: Trainer, saved: Mapping[str, Mapping[str, tuple[str, str]]]) -> dict[str, str]:
    """Those of `changed_attributes` at the save that have another value now: "owner.attribute" -> "saved → now"."""
    owners, now = _owners(trainer), look_at_attributes(trainer)
    forgotten = {}
    for name, attributes in saved.items():
        for key, (digest, text) in attributes.items():
            if name in owners and now[name].get(key) != digest:
                value = _shown(vars(owners[name])[key]) if key in vars(owners[name]) else "absent"
                forgotten[f"{name}.{key}"] = f"{text} → {value}"
    return forgotten


def _owners(trainer: Trainer) -> dict[str, object]:
    module = trainer.lightning_module
    name = type(module).__name__
    children = [(path, child) for path, child in module.named_modules() if path and _is_own_class(child)]
    owners: dict[str, object] = {name: module}
    owners |= {f"{name}.{path}": child for path, child in children[:MAX_CHILDREN]}
    numbers: Counter[str] = Counter([name])
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    for owner in [datamodule, *loops.callbacks(trainer)]:
        if owner is not None and _is_own_class(owner):
            name = type(owner).__name__
            owners[f"{name} {numbers[name] + 1}" if numbers[name] else name] = owner
            numbers[name] += 1
    return owners


def _is_own_class(owner: object) -> bool:
    """Whether its class is the user's, and it keeps its attributes in a dictionary."""
    return hasattr(owner, "__dict__") and type(owner).__module__.partition(".")[0] not in LIBRARIES


def _is_users(owner: object) -> Callable[[str], bool]:
    """Tells by its name whether an attribute is the user's own, and not one of the libraries' base classes."""
    names = _names_of(type(owner))  # type: ignore[arg-type]
    return lambda name: not name.startswith("_") and name not in names


@functools.cache
def _names_of(cls: type) -> frozenset[str]:
    """The attributes that the libraries' base classes of a class set."""
    if issubclass(cls, LightningModule):
        return frozenset(vars(LightningModule()))
    if issubclass(cls, LightningDataModule):
        return frozenset(vars(LightningDataModule()))
    if issubclass(cls, nn.Module):
        return frozenset(vars(nn.Module()))
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in LIBRARIES]
    codes = [member.__code__ for base in bases for member in vars(base).values() if isfunction(member)]
    return frozenset(i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value.item() if isinstance(value, torch.Tensor) else value).replace("\n", " ")
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
