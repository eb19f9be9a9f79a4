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
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

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


def find_generators(owners: Mapping[str, object], stop: Iterable[object] = ()) -> dict[str, Generator]:
    """The generators that can be reached from `owners`, by path; each object once, under its shortest path.

    Args:
        owners: name -> object to start from.
        stop: objects that are not entered.
    """
    found: dict[str, Generator] = {}
    seen = {id(value) for value in stop}
    queue = deque(owners.items())
    while queue and len(seen) < MAX_OBJECTS:
        path, value = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, random.SystemRandom):
            warnings.warn(f"{path} draws from the operating system: its numbers cannot be drawn again", stacklevel=2)
            continue
        if isinstance(value, Generator):
            if not _is_global(value):
                found[path] = value
            continue
        queue.extend((f"{path}.{name}", child) for name, child in _children(value))
    return found


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds. Nothing of the user's is called: no property, no `__getattr__`, no `__iter__`."""
    if isinstance(value, dict):
        yield from ((str(key), child) for key, child in islice(dict.items(value), MAX_ITEMS))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((str(index), child) for index, child in enumerate(islice(value, MAX_ITEMS)))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from (("defaults", value.__defaults__), ("defaults", value.__kwdefaults__))
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                yield name, cell.cell_contents
    if isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield from list(attributes.items())
    for cls in type(value).__mro__:
        yield from ((name, member) for name, member in cls.__dict__.items() if isinstance(member, Generator))
        for name, member in cls.__dict__.items() if "__slots__" in cls.__dict__ else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    yield name, member.__get__(value)


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
