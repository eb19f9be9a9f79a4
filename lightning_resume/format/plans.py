"""A plan that is kept between saves: what 10^4 tensors are called and where they go does not change from step to step.

The state of the next save is walked beside that of the last one. As long as every container has the same type and keys
and every tensor the same type, dtype, shape, strides and flags, the plan is taken again, with the new tensors in it;
numbers and texts are encoded anew. At the first difference the state is encoded from the start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from lightning_resume.errors import UnsupportedStateError
from lightning_resume.format.blobs import Blob, BlobStore
from lightning_resume.format.planned import PlannedFile
from lightning_resume.format.skeleton import GROUP, NAME, TAG
from lightning_resume.format.tensors import bytes_in_place
from lightning_resume.format.tree import EncodeWalk, FindEncoder

MIN_TENSORS = 500  # fewer are encoded in 2 ms
MAX_MISSES = 3  # one behind the other: a state that is never the same costs no more than these

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (dict, OrderedDict, list, tuple)
_CONSTANT = (int, str, bool)  # they do not change in place, and do not differ where they are equal, as 0.0 and -0.0 do
_flags = attrgetter("dtype", "shape", "layout", "is_cpu", "is_nested", "is_quantized", "requires_grad")


class _DifferentError(Exception):
    """The state does not fit the plan, or no plan can be made of it."""


class PlanCache:
    """Keeps the plan of a sequence of saves, whose states are prepared one after the other.

    Attributes:
        version: how many states were prepared. What was prepared before is void, unless it was copied or written.
    """

    def __init__(self) -> None:
        """Knows no plan yet."""
        self.version = 0
        self._plan: _Plan | None = None
        self._num_misses = 0
        self._is_missed = False

    def find(
        self, key: object, state: Mapping[str, Any], find_encoder: FindEncoder
    ) -> tuple[dict[str, Any], list[PlannedFile]] | None:
        """The skeleton and the files of a state, if it is built as the last one was.

        Args:
            key: whatever else the plan depends on.
            state: the state.
            find_encoder: the encoder of a type.
        """
        self.version += 1
        self._is_missed = False
        plan, self._plan = self._plan, None
        if plan is None or plan.key != key:
            return None
        try:
            plan.fill(state, find_encoder)
        except (_DifferentError, UnsupportedStateError, AttributeError, RuntimeError):
            self._miss()  # what is wrong with the state, if anything, is told by encoding it
            return None
        self._plan, self._num_misses = plan, 0
        return plan.nodes, [replace(file) for file in plan.files]

    def keep(
        self, key: object, state: Mapping[str, Any], nodes: dict[str, Any], store: BlobStore, files: list[PlannedFile]
    ) -> None:
        """Keeps what a state was encoded to, where the next one may profit from it."""
        blobs = {id(blob.nodes[0]): blob for group in store.groups.values() for blob in group}
        if len(blobs) < MIN_TENSORS or self._num_misses >= MAX_MISSES:
            return
        try:
            self._plan = _Plan(key, state, nodes, blobs, files)
        except _DifferentError:
            self._miss()

    def _miss(self) -> None:
        self._num_misses += not self._is_missed  # once for each state
        self._is_missed = True

    def release(self) -> None:
        """Lets go of the tensors: they were copied, or written."""
        if self._plan is not None:
            self._plan.empty()


@dataclass(eq=False, slots=True)
class _Leaf:
    """A value that is no container and no tensor: its node's place, its data if it has any, what it was last time."""

    holder: Any
    index: Any
    blob: Blob | None
    last: object = None

    def fill(self, value: Any, find_encoder: FindEncoder) -> None:
        """Encodes the value's successor; with data it has to differ in nothing but that."""
        if type(value) in _TENSORS or (type(value) in _CONTAINERS and self.blob is None):
            raise _DifferentError
        store = BlobStore()
        node = EncodeWalk(find_encoder, store).encode(value)
        blobs = [blob for group in store.groups.values() for blob in group]
        if self.blob is None:
            if blobs:
                raise _DifferentError
            self.holder[self.index] = node
            self.last = value if type(value) in _CONSTANT else None
            return
        if len(blobs) != 1 or blobs[0].nodes[0] is not node:
            raise _DifferentError
        before, now = self.blob, blobs[0]
        node[GROUP], node[NAME] = before.group, before.name
        is_same = (now.dtype, now.shape, now.source) == (before.dtype, before.shape, before.source)
        if not is_same or node != self.holder[self.index]:
            raise _DifferentError
        before.owner = now.owner


class _Plan:
    """Structure, skeleton and files of a state.

    Args:
        key: whatever else they depend on.
        state: what was encoded.
        nodes: what it was encoded to.
        blobs: id of the node → its data.
        files: where the data goes.

    Raises:
        _DifferentError: not all of the data is of plain tensors, each in one place.
    """

    def __init__(
        self,
        key: object,
        state: Mapping[str, Any],
        nodes: dict[str, Any],
        blobs: Mapping[int, Blob],
        files: list[PlannedFile],
    ) -> None:
        self.key, self.nodes, self.files = key, nodes, [replace(file) for file in files]
        self._tensors: list[Blob] = []
        self._others: list[Blob] = []
        self._by_node = blobs
        self._top = _Container(dict(state), nodes, self)
        if len(self._tensors) + len(self._others) != len(blobs):
            raise _DifferentError
        self._by_node = {}
        self._signature = _sign([blob.owner for blob in self._tensors])

    def add_tensor(self, node: Any) -> None:
        """Takes note of the next tensor of the state."""
        blob = self._by_node.get(id(node))
        if blob is None or blob.source is not bytes_in_place or len(blob.nodes) > 1 or not blob.num_bytes:
            raise _DifferentError
        self._tensors.append(blob)

    def add_data(self, node: Any) -> Blob | None:
        """Takes note of another value's data, if it has any in a file."""
        blob = self._by_node.get(id(node))
        if blob is not None:
            if len(blob.nodes) > 1:
                raise _DifferentError
            self._others.append(blob)
        return blob

    def fill(self, state: Mapping[str, Any], find_encoder: FindEncoder) -> None:
        """Puts another state's tensors and values in.

        Raises:
            _DifferentError: it is not built the same.
        """
        tensors: list[Any] = []
        leaves: list[tuple[_Leaf, Any]] = []
        self._top.visit(dict(state), tensors, leaves)
        if _sign(tensors) != self._signature:
            raise _DifferentError
        for leaf, value in leaves:
            leaf.fill(value, find_encoder)
        for blob, tensor in zip(self._tensors, tensors, strict=True):
            blob.owner = tensor

    def empty(self) -> None:
        """Lets go of all data."""
        for blob in (*self._tensors, *self._others):
            blob.owner = None


def _sign(tensors: Sequence[Any]) -> list[Any]:
    """All that a node and a header say of a tensor, and all that says that its bytes can be taken as they lie."""
    if not set(map(type, tensors)) <= set(_TENSORS):
        raise _DifferentError
    places: set[int] = set()
    signature = []
    for tensor in tensors:  # all at once: then it is in the processor's cache
        if tensor.is_conj() or tensor.is_neg():
            raise _DifferentError
        places.add(tensor.data_ptr())
        signature.append((type(tensor), tensor.stride(), *_flags(tensor)))
    if len(places) != len(tensors):  # two names for one piece of memory
        raise _DifferentError
    return signature


class _Container:
    """A dict, list or tuple of the state: its type, its keys, and what is in it.

    Args:
        value: the container.
        node: what it was encoded to.
        plan: takes note of its tensors.
    """

    def __init__(self, value: Any, node: Any, plan: _Plan) -> None:
        self.kind = type(value)
        self.keys = list(value) if isinstance(value, dict) else None
        if self.keys is not None and not {type(key) for key in self.keys} <= {str, int}:
            raise _DifferentError
        self.key_kinds = list(map(type, self.keys)) if self.keys is not None else None
        items, holder = _items(value), node
        if type(holder) is dict and TAG in holder:
            holder = holder.get("v")
        if type(holder) not in (dict, list) or len(holder) != len(items):
            raise _DifferentError
        self.children: list[_Container | _Leaf | None] = []
        for index, item in zip(holder if type(holder) is dict else range(len(items)), items, strict=True):
            place, at = (holder, index) if self.keys is None or type(holder) is dict else (holder[index], 1)
            self.children.append(_child(item, place, at, plan))
        self.has_tensors_only = not any(self.children)
        self.attributes = (
            _Container(vars(value), node.get("attributes", {}), plan) if self.kind is OrderedDict else None
        )

    def __bool__(self) -> bool:
        """True, as of a leaf: `children` is searched for what is no tensor."""
        return True

    def visit(self, value: Any, tensors: list[Any], leaves: list[tuple[_Leaf, Any]]) -> None:
        """Collects the tensors, and the leaves that changed, of the container's successor."""
        if type(value) is not self.kind or len(value) != len(self.children):
            raise _DifferentError
        if self.keys is not None and (list(value) != self.keys or list(map(type, value)) != self.key_kinds):
            raise _DifferentError
        if self.has_tensors_only:
            tensors.extend(_items(value))
        else:
            for child, item in zip(self.children, _items(value), strict=True):
                if child is None:
                    tensors.append(item)
                elif isinstance(child, _Container):
                    child.visit(item, tensors, leaves)
                elif isinstance(child, _Leaf) and (item is None or not _is_same(child.last, item)):
                    leaves.append((child, item))
        if self.attributes is not None:
            self.attributes.visit(vars(value), tensors, leaves)


def _child(item: Any, holder: Any, index: Any, plan: _Plan) -> _Container | _Leaf | None:
    """What stands for an item of a container; None for a tensor."""
    if type(item) in _TENSORS:
        plan.add_tensor(holder[index])
        return None
    blob = plan.add_data(holder[index])
    if type(item) in _CONTAINERS and blob is None:
        return _Container(item, holder[index], plan)
    return _Leaf(holder, index, blob)


def _items(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else value


def _is_same(last: object, item: object) -> bool:
    """Whether a leaf's node still stands for it."""
    return type(last) is type(item) and type(item) in _CONSTANT and last == item
