"""Random generators that the user holds: found as attributes, read and set without drawing.

`numpy.random.Generator` and `RandomState`, `random.Random`, and `torch.Generator` objects are in no global stream.
They are looked for in the attributes of data sets, samplers, collate functions and modules, through containers and
objects, and named by their path: `dataset.augment.rng`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, get_args

import numpy as np
import torch

Generator = np.random.Generator | np.random.RandomState | random.Random | torch.Generator

MAX_OBJECTS = 20_000
MAX_ITEMS = 4096  # of a container: generators are few, data is much
_LEAVES = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    type(None),
    torch.Tensor,
    np.ndarray,
    np.generic,
    type,
    types.ModuleType,
)
_KINDS: tuple[tuple[type, ...], ...] = (
    _LEAVES,
    (random.SystemRandom,),
    get_args(Generator),
    (dict,),
    (list, tuple, set, frozenset, deque),
    (functools.partial,),
    (types.MethodType,),
    (types.FunctionType,),
)
_LEAF, _SYSTEM, _GENERATOR, _DICT, _ITEMS, _PARTIAL, _METHOD, _FUNCTION, _OTHER, _UNSURE = range(len(_KINDS) + 2)
_SLOT = types.MemberDescriptorType
MAX_GLANCED = 64  # items of a container that are looked at out of turn: a glance at a large one is no saving
_BARE = frozenset({dict, list, tuple, set, frozenset, deque})  # have no attributes


def find_generators(owners: Mapping[str, object], stop: Iterable[object] = ()) -> dict[str, Generator]:
    """The generators that can be reached from `owners`, by path; each object once, under its shortest path.

    Args:
        owners: name -> object to start from.
        stop: objects that are not entered.
    """
    found: dict[str, Generator] = {}
    seen = {id(value) for value in stop}
    classes = _Classes()
    kinds = classes.kinds
    queue = deque((path, value, classes.kind_of(value)) for path, value in owners.items())
    while queue and len(seen) < MAX_OBJECTS:
        path, value, kind = queue.popleft()
        if kind == _LEAF or id(value) in seen:
            continue
        seen.add(id(value))
        if kind == _SYSTEM:
            warnings.warn(f"{path} draws from the operating system: its numbers cannot be drawn again", stacklevel=2)
        elif kind == _GENERATOR:
            if not _is_global(value):
                found[path] = value  # type: ignore[assignment]
        else:
            # A model has some hundred objects for each layer, and every save looks through all of them.
            for name, child in _children(value, kind, classes):
                kind = kinds.get(type(child), _UNSURE)
                if kind == _UNSURE:
                    kind = classes.kind_of(child)
                if kind == _LEAF:
                    continue
                # Not counted: many small records that are met first would use up the search before the generators.
                if not (_DICT <= kind <= _ITEMS and classes.holds_leaves_only(child)):
                    queue.append((f"{path}.{name!s}", child, kind))
    return found


class _Classes:
    """What is known of classes during one search.

    Attributes:
        kinds: which of `_KINDS` the objects of a class are; `_UNSURE` where they may give another class for their own.
    """

    def __init__(self) -> None:
        self.kinds: dict[type, int] = {}
        self._leaves: set[type] = set()
        self._own_kinds: dict[type, int] = {}
        self._members: dict[type, list[tuple[str, Any]]] = {}

    def kind_of(self, value: object) -> int:
        """Which of `_KINDS` an object is. A stand-in that gives another class for its own counts as one of that."""
        cls = type(value)
        kind = self.own_kind(cls)
        if cls not in self.kinds:
            is_plain = cls.__getattribute__ is object.__getattribute__ and not any(
                "__class__" in base.__dict__ for base in cls.__mro__[:-1]
            )
            self.kinds[cls] = kind if is_plain or kind == _LEAF or cls in _BARE else _UNSURE
        if self.kinds[cls] != _UNSURE:
            return kind
        try:
            shown = value.__class__
        except ReferenceError:  # of a weak proxy whose object is gone
            return _LEAF
        except Exception:  # the user's
            return kind
        return min(kind, self.own_kind(shown)) if isinstance(shown, type) else kind

    def own_kind(self, cls: type) -> int:
        """Which of `_KINDS` the objects of a class are, whatever they say."""
        kind = self._own_kinds.get(cls)
        if kind is None:
            # `isinstance` of a `torch.Generator` is a function of torch's in python.
            matching = (number for number, bases in enumerate(_KINDS) if issubclass(cls, bases))
            kind = self._own_kinds[cls] = next(matching, _OTHER)
            if kind == _LEAF:
                self._leaves.add(cls)
        return kind

    def holds_leaves_only(self, value: Any) -> bool:
        """Whether a container has nothing in it that is to be entered, as far as can be seen at a glance.

        Most of a module's attributes are such: a dozen dictionaries of hooks, empty, and one of parameters.
        """
        cls = type(value)
        if cls is OrderedDict:
            if value.__dict__:
                return False
        elif cls not in _BARE:
            return False
        if len(value) > MAX_GLANCED:
            return False
        return self._leaves.issuperset(map(type, dict.values(value) if isinstance(value, dict) else value))

    def members(self, cls: type) -> list[tuple[str, Any]]:
        """The generators that a class and its bases hold, and the descriptors of their slots."""
        found = self._members.get(cls)
        if found is None:
            found = self._members[cls] = []
            for base in cls.__mro__:
                held = base.__dict__
                generators = (_SYSTEM, _GENERATOR)
                found += [(name, value) for name, value in held.items() if self.kind_of(value) in generators]
                if "__slots__" in held:
                    found += [(name, value) for name, value in held.items() if isinstance(value, _SLOT)]
        return found


def _children(value: Any, kind: int, classes: _Classes) -> Iterable[tuple[object, Any]]:
    """What an object holds. Nothing of the user's is called, but of stand-ins: no property, no `__getattr__`."""
    cls = type(value)
    if kind == classes.own_kind(cls):
        found = _contents(value, kind)
    else:
        try:
            found = list(islice(value.items(), MAX_ITEMS) if kind == _DICT else _contents(value, kind))
        except Exception:  # it is of the other class by name only
            found = ()
    return found if cls in _BARE else chain(found, _attributes(value, classes.members(cls)))


def _contents(value: Any, kind: int) -> Iterable[tuple[object, Any]]:
    if kind == _DICT:
        return islice(dict.items(value), MAX_ITEMS)
    if kind == _ITEMS:
        return enumerate(islice(value, MAX_ITEMS))
    if kind == _PARTIAL:
        return (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if kind == _METHOD:
        return (("self", value.__self__),)
    return _held_by_function(value) if kind == _FUNCTION else ()


def _held_by_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from (("defaults", function.__defaults__), ("defaults", function.__kwdefaults__))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents


def _attributes(value: Any, members: list[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    attributes = getattr(value, "__dict__", None)
    found = list(attributes.items()) if isinstance(attributes, dict) else []
    for name, member in members:
        if not isinstance(member, _SLOT):
            found.append((name, member))
            continue
        with contextlib.suppress(AttributeError):  # not assigned yet
            found.append((name, member.__get__(value)))
    return found


def _is_global(value: object) -> bool:
    """Whether it is one of the process's global streams, which are captured as such."""
    return (
        value is torch.default_generator or value is np.random.mtrand._rand or value is getattr(random, "_inst", None)
    )


def get_state(generator: Generator) -> Any:
    """The state, as an immutable value that `==` compares."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
        return state
    if isinstance(generator, np.random.RandomState):
        return freeze(generator.get_state(legacy=False))
    return freeze(generator.bit_generator.state)


def set_state(generator: Generator, state: Any) -> None:
    """The inverse of `get_state`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(thaw(state))
    else:
        generator.bit_generator.state = thaw(state)


def freeze(value: Any) -> Any:
    """A bit generator's state as nested tuples, which `==` compares."""
    if isinstance(value, Mapping):
        return ("dict", tuple((key, freeze(child)) for key, child in value.items()))
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.tobytes())
    return value


def thaw(value: Any) -> Any:
    """The inverse of `freeze`."""
    if isinstance(value, tuple) and value[0] == "dict":
        return {key: thaw(child) for key, child in value[1]}
    if isinstance(value, tuple) and value[0] == "array":
        return np.frombuffer(value[2], dtype=value[1]).copy()
    return value
