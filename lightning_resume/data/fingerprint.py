"""A data set's fingerprint: enough of its content to notice that it is not the data set of the save.

No item is read: reading may be slow, may draw, and may have side effects. What is looked at is what the data set
holds: its arrays, tensors, lists of files or labels (sampled, where they are large), and its public numbers, texts and
flags; likewise those of the data sets and dataclasses inside it (`Subset`, `ConcatDataset`, …). Hugging Face's
data sets have a `_fingerprint`, which is taken instead.

A data set that holds nothing to compare (it opens its files lazily, say) can say itself what it is:

    class Images(Dataset):
        def __fingerprint__(self) -> str:
            return self.manifest_sha256

What the data set changes while it is used (a counter, a cache) is no part of the fingerprint that is saved.
"""

from __future__ import annotations

import dataclasses
import time
import types
import weakref
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_resume.data.digest import DigestTimeoutError, attributes_of, describe, is_plain_text
from lightning_resume.data.held import find_generators
from lightning_resume.data.streams import Streams

TIME_LIMIT_SECONDS = 0.05  # of this thread's own work
MAX_PARTS = 32
MAX_MEMBERS = 8  # of a list of data sets: so many are looked into; a list of so many arrays is looked at one by one
MAX_DEPTH = 8
MAX_OWN_CHARS = 64

Parts = dict[str, str]
"""Path of an attribute ("dataset.tensors.0") -> short text that differs where the content does."""

_first_parts: dict[int, tuple[weakref.ref[Any], Parts]] = {}


def first_look(dataset: Any) -> str | None:
    """Remembers a data set as it is before it is used; to be called when training begins.

    Returns:
        None, or why its content cannot be compared: then only its type and length, and what numbers, texts and flags
        it has, can be.
    """
    parts, reason = _look(dataset)
    _first(dataset, parts)
    return reason


def fingerprint(dataset: Any) -> Parts:
    """The parts of the fingerprint as they are now, less numbers that have changed since the first look."""
    parts, _ = _look(dataset)
    first = _first(dataset, parts)
    return {path: text for path, text in parts.items() if not is_plain_text(text) or first.get(path, text) == text}


def lasting_fingerprint(dataset: Any) -> Parts:
    """The parts of the fingerprint that have not changed since the first look: what a checkpoint keeps."""
    parts, _ = _look(dataset)
    first = _first(dataset, parts)
    return {path: text for path, text in parts.items() if first.get(path) == text}


def _first(dataset: Any, parts: Parts) -> Parts:
    key = id(dataset)
    if key in _first_parts and _first_parts[key][0]() is dataset:
        return _first_parts[key][1]
    try:
        _first_parts[key] = weakref.ref(dataset, lambda _: _first_parts.pop(key, None)), parts
    except TypeError:  # a list, say
        return parts
    return parts


def _look(dataset: Any) -> tuple[Parts, str | None]:
    """The parts, and why there are none."""
    look = _Look()
    try:
        look.at("items" if isinstance(dataset, list | tuple | dict) else "", dataset, 0)
    except DigestTimeoutError:
        return {}, f"a look at what it holds takes more than {TIME_LIMIT_SECONDS * 1000:.0f} ms of work"
    except _NoFingerprintError as error:
        return {}, str(error)
    except Exception as error:  # of a data set that a thread of the user's fills, say: no reason to stop training
        return {}, f"a look at what it holds raised {error!r}"
    if all(is_plain_text(text) for text in look.parts.values()):
        return look.parts, "it holds no data that can be looked at without reading items"
    return look.parts, None


class _NoFingerprintError(Exception):
    """A data set's own fingerprint is none."""


class _Look:
    """Collects the parts of one fingerprint."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + TIME_LIMIT_SECONDS
        self.parts: Parts = {}
        self.seen: set[int] = set()

    def at(self, path: str, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH or len(self.parts) >= MAX_PARTS:
            return
        if text := self._own(value):
            self.parts[_join(path, "fingerprint")] = text
        elif members := _parts_of(value):
            self._enter(path, value, members, depth)
        elif (text := describe(value, self.deadline)) is not None:
            is_private = path.rpartition(".")[2].startswith("_")
            if not (is_private and is_plain_text(text)):
                self.parts[path] = text
        elif _is_entered(value) or depth == 0:
            self._enter(path, value, attributes_of(value), depth)

    def _enter(self, path: str, value: Any, members: Iterable[tuple[str, Any]], depth: int) -> None:
        if id(value) not in self.seen:
            self.seen.add(id(value))
            for name, member in members:
                self.at(_join(path, name), member, depth + 1)

    def _own(self, dataset: Any) -> str | None:
        """What the data set itself gives for its fingerprint."""
        hook = getattr(type(dataset), "__fingerprint__", None)
        if callable(hook):
            started = time.thread_time()
            text = _called(hook, dataset)
            self.deadline += time.thread_time() - started
            return _shortened(text)
        attributes = getattr(dataset, "__dict__", None)
        given = attributes.get("_fingerprint") if isinstance(attributes, dict) else None
        return _shortened(given) if isinstance(given, str) and given else None


def _called(hook: Callable[[Any], object], dataset: Any) -> str:
    with Streams(find_generators({"dataset": dataset})).isolated():
        try:
            text = hook(dataset)
        except Exception as error:
            raise _NoFingerprintError(f"its __fingerprint__() raised {error!r}") from error
    if not isinstance(text, str) or not text:
        raise _NoFingerprintError(f"its __fingerprint__() returned {text!r}, not a str")
    return text


def _shortened(text: str) -> str:
    if len(text) <= MAX_OWN_CHARS:
        return ascii(text)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_entered(value: Any) -> bool:
    if isinstance(value, type | nn.Module | types.ModuleType):
        return False
    return dataclasses.is_dataclass(value) or _is_data_set(value)


def _is_data_set(value: Any) -> bool:
    """Whether it is one, by its class or by what it can do."""
    cls = type(value)
    if isinstance(value, Dataset):
        return True
    return (
        hasattr(cls, "__getitem__") and hasattr(cls, "__len__") and isinstance(getattr(value, "__dict__", None), dict)
    )


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    """The members of a list or dictionary of data sets, or of a few arrays: parts of their own."""
    if type(value) in (list, tuple):
        named = [(str(index), member) for index, member in enumerate(value[:MAX_MEMBERS])]
    elif type(value) is dict:
        named = [(str(key), member) for key, member in islice(value.items(), MAX_MEMBERS)]
    else:
        return []
    if any(isinstance(member, Dataset) for _, member in named):
        return named
    are_arrays = any(isinstance(member, np.ndarray | torch.Tensor) for _, member in named)
    return named if are_arrays and len(value) <= MAX_MEMBERS else []
