"""A short text for a value of any size: what it is, and a digest of its content, sampled where there is much of it.

The same content gives the same text in every process. Nothing of the user's is called: values are read through the
methods of the built-in containers, of numpy and of torch.
"""

from __future__ import annotations

import enum
import os
import time
import types
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

MAX_WHOLE_BYTES = 2**18
"""Arrays of up to this size are digested whole."""
MAX_SAMPLES = 4096
"""Elements that are read of a larger one; of one on disk (a memory map) or inside a container, one in 64 of it."""
MAX_MEMBERS = 256
"""Members that are looked at of a container; of a container inside it, 16."""
MAX_NODES = 2048
"""Members that are looked at in all, at every depth."""
MAX_PLAIN_CHARS = 64
_SEQUENCES = (list, tuple, deque)
_CONTAINERS = (*_SEQUENCES, dict, set, frozenset)
_FREQUENT = (str, int, float, bool, torch.Tensor, np.ndarray)
_NOT_ENTERED = (type, types.ModuleType, types.FunctionType, torch.nn.Module)
_RAW = {1: torch.uint8, 2: torch.int16}


class DigestTimeoutError(Exception):
    """The deadline has passed."""


def describe(value: Any, deadline: float) -> str | None:
    """A number, text or flag as ``= value``, data as its kind and digest, and None where there is nothing to compare.

    Args:
        value: anything; objects of unknown classes have nothing to compare, nor have containers of nothing else and
            absolute paths (data may be moved).
        deadline: moment of `time.thread_time` at which to give up: a busy machine makes no difference.

    Raises:
        DigestTimeoutError: the deadline has passed.
    """
    if isinstance(value, str | os.PathLike) and _is_location(value):
        return None
    if _is_plain(value):
        return f"= {_plain_text(value)}"
    if isinstance(value, str | bytes | bytearray | array) and len(value):
        kind = f"{type(value).__name__} of {len(value)}"
    elif isinstance(value, np.ndarray):
        kind = f"{value.dtype} {value.shape}"
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    elif isinstance(value, _CONTAINERS) and _length(value):
        kind = f"{type(value).__name__} of {_length(value)}"
    else:
        return None
    digest = _Digest(deadline)
    text = digest.of(value)
    return f"{kind} {text}" if digest.has_content else None


def is_plain_text(text: str) -> bool:
    """Whether `describe` said this of a number, text or flag."""
    return text.startswith("= ")


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_PLAIN_CHARS
    if isinstance(value, int) and not isinstance(value, bool | enum.Enum):
        return value.bit_length() <= 256
    kinds = (bool, float, complex, enum.Enum, range, np.generic, torch.dtype, torch.device, os.PathLike)
    return isinstance(value, kinds)


def _plain_text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    return repr(value.item() if isinstance(value, np.generic) else value)


def _is_location(value: str | os.PathLike[str]) -> bool:
    text = value if isinstance(value, str) else os.fspath(value)
    return isinstance(text, str) and len(text) < 4096 and (os.path.isabs(text) or "://" in text)


def _length(value: Any) -> int:
    kind: Any = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
    return 0 if kind is None else kind.__len__(value)  # a subclass may have another idea of it


def spread(count: int, limit: int) -> NDArray[np.int64]:
    """Up to `limit` places out of `count`: the first, the last, and one in each of as many equal stretches between.

    Evenly spaced ones would meet the same column of a table again and again: inside its stretch each stands somewhere
    else (multiples of an odd number near 2**32 / the golden ratio).
    """
    if count <= limit:
        return np.arange(count)
    numbers = np.arange(limit)
    bounds = np.arange(limit + 1) * count // limit
    places = bounds[:-1] + numbers * 2654435761 % np.diff(bounds)
    places[0], places[-1] = 0, count - 1
    return places


def _members(value: Any, limit: int) -> Iterator[Any]:
    """Some members of a container: a list's all over it, a dictionary's from its beginning."""
    if isinstance(value, list | tuple):
        get: Any = list.__getitem__ if isinstance(value, list) else tuple.__getitem__
        return (get(value, place) for place in spread(_length(value), limit).tolist())
    if isinstance(value, dict):
        return islice(dict.items(value), limit)
    return islice(deque.__iter__(value), limit)


class _Digest:
    """Feeds a value and what is in it to a hash."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.num_nodes = 0
        self.has_content = False
        self.hash = blake2b(digest_size=8)
        self.folder = ""

    def of(self, value: Any) -> str:
        if isinstance(value, _CONTAINERS):
            self.folder = _common_folder(_members(value, MAX_MEMBERS) if not _is_set(value) else ())
        self.feed(value, 0)
        return self.hash.hexdigest()

    def feed(self, value: Any, depth: int) -> None:
        if self.num_nodes % 16 == 0 and time.thread_time() > self.deadline:
            raise DigestTimeoutError
        self.num_nodes += 1
        kind = type(value)
        self._say(kind.__name__)
        if kind not in _FREQUENT and not _is_known(value):
            self._feed_members(value, depth)
            return
        if value is None:
            return
        self.has_content = True
        if kind is float:
            self._say(repr(value))
        elif isinstance(value, str):
            self._feed_text(value, depth)
        elif isinstance(value, bytes | bytearray | array):
            self._feed_buffer(memoryview(value), depth)
        elif isinstance(value, int) and not isinstance(value, enum.Enum):
            self._say(hex(value))
        elif isinstance(value, os.PathLike):
            self._feed_text(str(os.fspath(value)), depth)
        elif _is_plain(value):
            self._say(_plain_text(value))
        elif isinstance(value, np.ndarray):
            self._feed_array(value, depth)
        else:
            self._feed_tensor(value, depth)

    def _say(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self.hash.update(b"%d:" % len(data) + data)

    def _feed_text(self, text: str, depth: int) -> None:
        if self.folder and text.startswith(self.folder):
            text = text[len(self.folder) :]
        self._say(str(len(text)))
        limit = 64 if depth else MAX_SAMPLES
        if len(text) > 16 * limit:
            text = "".join(text[place : place + 16] for place in spread(len(text), limit).tolist())
        self._say(text)

    def _feed_buffer(self, data: memoryview, depth: int) -> None:
        if len(data):
            self._feed_array(np.frombuffer(data, np.uint8), depth)

    def _feed_array(self, values: np.ndarray[Any, Any], depth: int) -> None:
        self._say(f"{values.dtype.str} {values.shape}")
        is_near = depth == 0 and not isinstance(values, np.memmap)
        limit = MAX_SAMPLES if is_near else MAX_SAMPLES // 64
        values = np.asarray(values)
        if values.dtype.hasobject:
            for place in spread(values.size, 16 if depth else MAX_MEMBERS).tolist():
                self.feed(values.flat[place], depth + 1)
        elif values.nbytes <= (MAX_WHOLE_BYTES if is_near else MAX_WHOLE_BYTES // 64):
            self.hash.update(np.ascontiguousarray(values).tobytes())
        else:
            self.hash.update(values.flat[spread(values.size, limit)].tobytes())

    def _feed_tensor(self, values: torch.Tensor, depth: int) -> None:
        self._say(f"{values.dtype} {tuple(values.shape)}")
        if values.is_meta or values.layout is not torch.strided:
            return  # kind and shape have to do
        values = values.detach()
        try:
            if values.device.type != "cpu":
                places = spread(values.numel(), MAX_SAMPLES)
                values = values.reshape(-1)[torch.from_numpy(places).to(values.device)].cpu()
            numbers = _numbers(values)
        except (RuntimeError, TypeError, NotImplementedError, KeyError):
            return  # quantized, conjugated, …: likewise
        self._feed_array(numbers, depth)

    def _feed_members(self, value: Any, depth: int) -> None:
        if depth > 6 or self.num_nodes >= MAX_NODES:
            return
        if not isinstance(value, _CONTAINERS):
            if isinstance(value, _NOT_ENTERED):
                return
            members: Iterable[Any] = islice(attributes_of(value), 16)
        elif _is_set(value):
            self._say(str(_length(value)))
            members = self._unordered(value) if _length(value) <= MAX_MEMBERS else ()
            self.has_content |= _length(value) > MAX_MEMBERS
        else:
            self._say(str(_length(value)))
            members = _members(value, 16 if depth else MAX_MEMBERS)
        are_named = isinstance(value, dict) or not isinstance(value, _CONTAINERS)
        for member in members:
            if self.num_nodes < MAX_NODES and are_named:
                self._feed_named(member[0], member[1], depth + 1)
            elif self.num_nodes < MAX_NODES:
                self.feed(member, depth + 1)

    def _feed_named(self, name: Any, value: Any, depth: int) -> None:
        """A name alone is no content."""
        has_content = self.has_content
        self.feed(name, depth)
        self.has_content = has_content
        self.feed(value, depth)

    def _unordered(self, members: Any) -> list[str]:
        """Of a set, whose order differs from process to process."""
        kind = set if isinstance(members, set) else frozenset
        digests = [_Digest(self.deadline) for _ in range(_length(members))]
        texts = sorted(digest.of(member) for digest, member in zip(digests, kind.__iter__(members), strict=True))
        return texts if any(digest.has_content for digest in digests) else []


def _is_known(value: Any) -> bool:
    if value is None or isinstance(value, str | bytes | bytearray | int | array | np.ndarray):
        return True
    return _is_plain(value) or type(value) in (torch.Tensor, torch.nn.Parameter)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, in `__dict__` and slots; no property is read."""
    if isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield from list(attributes.items())
    for cls in type(value).__mro__:
        for name, member in cls.__dict__.items() if "__slots__" in cls.__dict__ else ():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # not assigned
                    continue


def _is_set(value: Any) -> bool:
    return isinstance(value, set | frozenset)


def _numbers(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as an array; of a dtype that numpy lacks (bfloat16, float8) as the bits of integers."""
    try:
        return values.numpy()
    except TypeError:
        return values.view(_RAW[values.element_size()]).numpy()


def _common_folder(members: Iterable[Any]) -> str:
    """The folder that all absolute paths among the members share: data may be moved as a whole."""
    folders = {os.path.dirname(path) for path in _paths(members)}
    folder = os.path.commonpath(folders) if folders else ""
    return folder if folder.endswith(os.sep) or not folder else folder + os.sep


def _paths(members: Iterable[Any]) -> Iterator[str]:
    for member in members:
        inner = _members(member, 16) if isinstance(member, list | tuple | dict) else (member,)
        for value in inner:
            text = value if isinstance(value, str) else os.fspath(value) if isinstance(value, os.PathLike) else None
            if isinstance(text, str) and len(text) < 4096 and os.path.isabs(text):
                yield text
