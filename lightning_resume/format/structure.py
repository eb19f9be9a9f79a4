"""The structure of a state that a plan was made of, and the walk beside it through a state that may be built the same.

Numbers and texts that changed are encoded anew; a tensor is only collected here, see `runs`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_resume.format.blobs import Blob, BlobStore
from lightning_resume.format.codecs import PACKED_ITEMS
from lightning_resume.format.runs import DifferentError
from lightning_resume.format.skeleton import GROUP, NAME, TAG
from lightning_resume.format.strict_json import dump_json
from lightning_resume.format.tree import EncodeWalk, FindEncoder

TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_CONTAINERS = (dict, OrderedDict, list, tuple)
_PACKED_KINDS = ({int}, {float})
_CONSTANT = (int, str, bool)  # they do not change in place, and do not differ where they are equal, as 0.0 and -0.0 do


class DataFinder(Protocol):
    """Takes note of the data of a state, while its structure is."""

    def add_tensor(self, node: Any) -> None:
        """Takes note of the next tensor of the state."""

    def add_data(self, node: Any) -> Blob | None:
        """Takes note of another value's data, if it has any in a file."""


@dataclass(eq=False, slots=True)
class Leaf:
    """A value that is no container and no tensor: its node's place, its data if it has any, the levels above it.

    `last` is what it was last time.
    """

    holder: Any
    index: Any
    blob: Blob | None
    depth: int
    last: object = None

    @property
    def is_constant(self) -> bool:
        """Whether its node is the same for every state that fits."""
        return self.blob is not None

    def fill(self, value: Any, find_encoder: FindEncoder) -> Collection[Hashable]:
        """Encodes the value's successor; with data it has to differ in nothing but that. Returns what identifies it."""
        if type(value) in TENSORS or (type(value) in _CONTAINERS and self.blob is None):
            raise DifferentError
        store = BlobStore()
        node = EncodeWalk(find_encoder, store, self.depth).encode(value)
        blobs = [blob for group in store.groups.values() for blob in group]
        if self.blob is None:
            if blobs:
                raise DifferentError
            self.holder[self.index] = node
            self.last = value if type(value) in _CONSTANT else None
            return ()
        if len(blobs) != 1 or blobs[0].nodes[0] is not node:
            raise DifferentError
        before, now = self.blob, blobs[0]
        node[GROUP], node[NAME] = before.group, before.name
        is_same = (now.dtype, now.shape, now.source) == (before.dtype, before.shape, before.source)
        if not is_same or node != self.holder[self.index]:
            raise DifferentError
        before.owner = now.owner
        return store.identities


class Container:
    """A dict, list or tuple of the state: its type, its keys, and what is in it.

    Args:
        value: the container.
        node: what it was encoded to.
        finder: takes note of its tensors.
        depth: levels of the state that are above what is in it.
    """

    def __init__(self, value: Any, node: Any, finder: DataFinder, depth: int = 0) -> None:
        self.kind = type(value)
        if self.kind is OrderedDict and TAG in vars(value):  # would be taken for that of a node
            raise DifferentError
        self.keys = list(value) if isinstance(value, dict) else None
        if self.keys is not None and not {type(key) for key in self.keys} <= {str, int}:
            raise DifferentError
        self.key_kinds = list(map(type, self.keys)) if self.keys is not None else None
        items, holder = _items(value), node
        if _is_tagged(node):
            holder = node.get("v")
        if type(holder) not in (dict, list) or len(holder) != len(items):
            raise DifferentError
        self.children: list[Container | Leaf | None] = []
        self._places: list[tuple[Any, Any]] = []
        for index, item in zip(holder if type(holder) is dict else range(len(items)), items, strict=True):
            place, at = (holder, index) if self.keys is None or type(holder) is dict else (holder[index], 1)
            self.children.append(_child(item, place, at, finder, depth))
            self._places.append((place, at))
        self.has_tensors_only = not any(self.children)
        self._may_come_packed = self.keys is None and len(items) >= PACKED_ITEMS
        self.attributes = (
            Container(vars(value), node.get("attributes", {}), finder, depth) if self.kind is OrderedDict else None
        )
        self._has_constant_items: bool = all(child is None or child.is_constant for child in self.children)
        self.is_constant: bool = self._has_constant_items and (self.attributes is None or self.attributes.is_constant)

    def __bool__(self) -> bool:
        """True, as of a leaf: `children` is searched for what is no tensor."""
        return True

    def shorten(self, texts: list[bytes]) -> None:
        """Puts marks for the nodes of what is in it, where they are the same for every state; appends their texts."""
        for child, (holder, index) in zip(self.children, self._places, strict=True):
            if isinstance(child, Container):
                holder[index] = child.short(holder[index], texts)

    def short(self, node: Any, texts: list[bytes]) -> Any:
        """Its node with marks in it, or a mark for all of it."""
        if self.attributes is not None:
            self.attributes.shorten(texts)
        if not self._has_constant_items:
            self.shorten(texts)
            return node
        texts.append(dump_json(node["v"] if _is_tagged(node) else node))
        mark = {TAG: len(texts) - 1}
        return {**node, "v": mark} if _is_tagged(node) else mark

    def visit(self, value: Any, tensors: list[Any], leaves: list[tuple[Leaf, Any]]) -> None:
        """Collects the tensors, and the leaves that changed, of the container's successor."""
        if type(value) is not self.kind or len(value) != len(self.children):
            raise DifferentError
        if self.keys is not None and (list(value) != self.keys or list(map(type, value)) != self.key_kinds):
            raise DifferentError
        if self._may_come_packed and set(map(type, value)) in _PACKED_KINDS:  # would be data in a file
            raise DifferentError
        if self.has_tensors_only:
            tensors.extend(_items(value))
        else:
            for child, item in zip(self.children, _items(value), strict=True):
                if child is None:
                    tensors.append(item)
                elif isinstance(child, Container):
                    child.visit(item, tensors, leaves)
                elif isinstance(child, Leaf) and (item is None or not _is_same(child.last, item)):
                    leaves.append((child, item))
        if self.attributes is not None:
            self.attributes.visit(vars(value), tensors, leaves)


def _child(item: Any, holder: Any, index: Any, finder: DataFinder, depth: int) -> Container | Leaf | None:
    """What stands for an item of a container; None for a tensor."""
    if type(item) in TENSORS:
        finder.add_tensor(holder[index])
        return None
    blob = finder.add_data(holder[index])
    if type(item) in _CONTAINERS and blob is None:
        return Container(item, holder[index], finder, depth + 1)
    return Leaf(holder, index, blob, depth)


def _is_tagged(node: Any) -> bool:
    return type(node) is dict and TAG in node


def _items(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else value


def _is_same(last: object, item: object) -> bool:
    """Whether a leaf's node still stands for it."""
    return type(last) is type(item) and type(item) in _CONSTANT and last == item
