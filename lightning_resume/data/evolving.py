"""Attributes that change while a run goes on: an epoch counter in a sampler, its weights, a difficulty in a data set.

A new process builds its samplers and data sets anew, as they were when the first one started. What has changed in
them since is part of the run. Numbers, texts and flags that stand in an object's attributes are looked at, and lists,
dicts, arrays and tensors of them up to a size; everything else is the business of `state_dict`, or of generators,
which are found on their own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, set)


class EvolvingAttributes:
    """Watches the attributes of a few objects.

    Args:
        owners: name -> object, as it is in a process that has just built it.
        max_elements: containers, arrays and tensors are looked at up to this size; 0: not at all.
    """

    def __init__(self, owners: Mapping[str, object], max_elements: int = 0) -> None:
        self._owners = dict(owners)
        self._max_elements = max_elements
        self._before = {name: self._digests(owner) for name, owner in self._owners.items()}

    def _digests(self, owner: object) -> dict[str, object]:
        attributes = getattr(owner, "__dict__", None)
        items = attributes.items() if isinstance(attributes, dict) else ()
        digests = {key: _digest(value, self._max_elements) for key, value in items}
        return {key: digest for key, digest in digests.items() if digest is not None}

    def changed(self) -> dict[str, dict[str, Any]]:
        """Those that differ from what they were: owner -> attribute -> a copy of its value."""
        changed: dict[str, dict[str, Any]] = {}
        for name, owner in self._owners.items():
            before, now = self._before[name], self._digests(owner)
            new = {key: copy.deepcopy(vars(owner)[key]) for key, digest in now.items() if before.get(key) != digest}
            if new:
                changed[name] = new
        return changed

    def restore(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets what `changed` returned in another process."""
        for name, attributes in changed.items():
            if name in self._owners:
                vars(self._owners[name]).update(copy.deepcopy(dict(attributes)))


def _digest(value: Any, max_elements: int) -> object | None:
    """Something that tells one value from another; None for what is not looked at."""
    if type(value) in _PLAIN:
        return type(value).__name__, repr(value)
    if max_elements == 0:
        return None
    if type(value) is torch.Tensor and value.layout is torch.strided and value.numel() <= max_elements:
        return _digest(value.detach().cpu().contiguous().view(torch.uint8).numpy(), max_elements * value.element_size())
    if type(value) is np.ndarray and value.size <= max_elements and value.dtype.kind in "biufc":
        return value.dtype.str, value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).digest()
    if type(value) in _CONTAINERS and len(value) <= max_elements:
        parts = value.items() if type(value) is dict else value
        digests = [_digest(part, max_elements) for part in parts]
        return None if None in digests else (type(value).__name__, *digests)
    return None
