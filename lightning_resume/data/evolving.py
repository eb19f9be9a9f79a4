"""Attributes that change while a run goes on: an epoch counter in a sampler, its weights, a difficulty in a data set.

A new process builds its samplers and data sets anew, as they were when the first one started. What has changed in
them since is part of the run. Numbers, texts and flags that stand in an object's attributes are looked at, and lists,
dicts, arrays and tensors of them up to a size; everything else is the business of `state_dict`, or of generators,
which are found on their own.
"""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

Changes = dict[str, dict[str, Any]]
"""Owner -> attribute -> its value; under `IN_PLACE` owner -> the attributes that are still the objects they were."""

IN_PLACE = "changed in place"
MAX_ELEMENTS = 1000
MAX_OWNERS = 256
MAX_MEMBERS = 64  # of a list of data sets or transforms
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, set)
_CODE = (type, nn.Module, FunctionType, BuiltinFunctionType, MethodType)


def data_owners(name: str, data: object) -> dict[str, object]:
    """A data set, and the data sets, transforms and other callable objects inside it, by path.

    What is in its attributes is looked at, and in lists, tuples and dicts there; modules and functions are not.
    """
    found: dict[str, object] = {}
    queue = deque([(name, data)])
    while queue and len(found) < MAX_OWNERS:
        path, value = queue.popleft()
        if any(value is owner for owner in found.values()):
            continue
        found[path] = value
        attributes = getattr(value, "__dict__", None)
        members = list(attributes.items()) if isinstance(attributes, dict) else []
        queue.extend((f"{path}.{key}", part) for key, member in members for key, part in _parts(key, member))
    return found


def _parts(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The data sets and callable objects that an attribute is, or is a list or dict of."""
    members = [(name, value)]
    if type(value) in (list, tuple):
        members = [(f"{name}.{index}", part) for index, part in enumerate(islice(value, MAX_MEMBERS))]  # type: ignore[call-overload]
    elif type(value) is dict:
        members = [(f"{name}.{key}", part) for key, part in islice(value.items(), MAX_MEMBERS)]
    for path, part in members:
        if isinstance(part, Dataset) or (callable(part) and not isinstance(part, _CODE)):
            yield path, part


class EvolvingAttributes:
    """Watches the attributes of a few objects.

    Args:
        owners: name -> object, as it is in a process that has just built it.
        max_elements: a container, an array or a tensor is looked at up to this size in all.
    """

    def __init__(self, owners: Mapping[str, object], max_elements: int = MAX_ELEMENTS) -> None:
        self._owners = dict(owners)
        self._max_elements = max_elements
        self._before = {name: self._digests(owner) for name, owner in self._owners.items()}
        self._objects = {
            name: {key: _attributes(owner)[key] for key in self._before[name]} for name, owner in self._owners.items()
        }
        self._values = {name: {key: _copy(value) for key, value in of.items()} for name, of in self._objects.items()}

    def _digests(self, owner: object) -> dict[str, object]:
        digests = {key: _digest(value, [self._max_elements]) for key, value in _attributes(owner).items()}
        return {key: digest for key, digest in digests.items() if digest is not None}

    def _changed_keys(self, name: str) -> list[str]:
        before, now = self._before[name], self._digests(self._owners[name])
        return [key for key, digest in now.items() if before.get(key) != digest]

    def changed(self) -> Changes:
        """Those that differ from what they were, as copies of their values."""
        changed: Changes = {}
        in_place: dict[str, Any] = {}
        for name, owner in self._owners.items():
            attributes, objects = _attributes(owner), self._objects[name]
            if keys := self._changed_keys(name):
                changed[name] = {key: _copy(attributes[key]) for key in keys}
            if same := [key for key in keys if _is_filled(attributes[key]) and objects.get(key) is attributes[key]]:
                in_place[name] = same
        return {**changed, IN_PLACE: in_place} if in_place else changed

    def restore(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets what `changed` returned in another process, and what it does not name to what it was at first.

        What was changed in place is filled in place, so that others who hold the same object see it too.
        """
        in_place = changed.get(IN_PLACE, {})
        for name, owner in self._owners.items():
            attributes, objects, saved = _attributes(owner), self._objects[name], changed.get(name, {})
            back = {key: self._values[name][key] for key in self._changed_keys(name) if key in self._values[name]}
            for key, value in {**back, **saved}.items():
                is_same = key in in_place.get(name, ()) if key in saved else True
                if is_same and _fill(objects.get(key), value):
                    attributes[key] = objects[key]
                else:
                    attributes[key] = _copy(value)


def look(attributes: Mapping[str, Any], is_wanted: Callable[[str], bool]) -> dict[str, str]:
    """Digests of the attributes that can be looked at, which tell their values apart in any process."""
    digests = {name: _digest(value, [MAX_ELEMENTS]) for name, value in list(attributes.items()) if is_wanted(name)}
    return {
        name: blake2b(repr(digest).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        for name, digest in digests.items()
        if digest is not None
    }


class Snapshot:
    """What `EvolvingAttributes.changed` returned, as a value that `==` compares."""

    def __init__(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        self.changes = changes
        parts = [(name, key, _digest(value, [None])) for name, new in changes.items() for key, value in new.items()]
        self._digest = blake2b(repr(parts).encode("utf-8", "surrogatepass")).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self._digest == other._digest

    __hash__ = None  # type: ignore[assignment]


def _attributes(owner: object) -> dict[str, Any]:
    attributes = getattr(owner, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _copy(value: Any) -> Any:
    """A copy that shares nothing that can change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, set) and set(map(type, value)) <= set(_PLAIN):
        return value.copy()
    return copy.deepcopy(value)


def _is_filled(value: object) -> bool:
    """Whether its content can change while it stays the same object."""
    return isinstance(value, list | dict | set | np.ndarray | torch.Tensor)


def _fill(target: Any, value: Any) -> bool:
    """Gives an object the content of another one of its class and, of an array, its shape; False: it has not."""
    if not _is_filled(target) or type(target) is not type(value):
        return False
    if isinstance(target, list):
        target[:] = value
    elif isinstance(target, dict | set):
        target.clear()
        target.update(value)
    elif target.shape != value.shape or target.dtype != value.dtype:
        return False
    elif isinstance(target, torch.Tensor):
        target.detach().copy_(value)
    else:
        target[...] = value
    return True


def _digest(value: Any, budget: list[int | None]) -> object | None:
    """Something that tells one value from another; None for what is not looked at, or is larger than the budget."""
    if type(value) in _PLAIN or isinstance(value, np.number | np.bool_):
        return type(value).__name__, repr(value)
    if type(value) is torch.Tensor and _is_readable(value) and _takes(budget, value.numel()):
        data = value.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), blake2b(data.numpy().tobytes()).digest()
    if type(value) is np.ndarray and value.dtype.kind in "biufc" and _takes(budget, value.size):
        return value.dtype.str, value.shape, blake2b(np.ascontiguousarray(value).tobytes()).digest()
    if type(value) not in _CONTAINERS or not _takes(budget, len(value)):
        return None
    parts = [part for item in value.items() for part in item] if type(value) is dict else list(value)
    if type(value) is set:  # in another order in each process
        parts.sort(key=repr)
    types = set(map(type, parts))
    if types == {float}:  # twenty times faster than their text
        return type(value).__name__, "float", blake2b(array("d", parts)).digest()
    if types <= set(_PLAIN):
        return type(value).__name__, blake2b(repr(parts).encode("utf-8", "surrogatepass")).digest()
    digests = [_digest(part, budget) for part in parts]
    return None if None in digests else (type(value).__name__, *digests)


def _is_readable(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _takes(budget: list[int | None], size: int) -> bool:
    """Takes a size out of a budget, if there is so much left; None: there always is."""
    if budget[0] is None:
        return True
    budget[0] -= size
    return budget[0] >= 0
