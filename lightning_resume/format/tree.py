"""Nested state ↔ typed JSON skeleton + data: the two walks, which know how to descend but no type but the containers'.

What stands for each type is in `codecs` (python and numpy), `tensors` (torch) and `registry` (the user's own).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from operator import itemgetter
from typing import Any, NoReturn

import torch

from lightning_resume.errors import CorruptCheckpointError, ResumeError, UnsupportedStateError
from lightning_resume.format.blobs import BlobStore, join_key_path
from lightning_resume.format.skeleton import GROUP, MAX_DEPTH, NAME, NUM_PLAIN_FIELDS, TAG, TENSOR, Reference

Encoder = Callable[[Any, "EncodeWalk"], Any]
Decoder = Callable[[dict[str, Any], "DecodeWalk"], Any]
FindEncoder = Callable[[type], "Encoder | None"]
_LEAVES = frozenset({int, float, str, torch.Tensor, torch.nn.Parameter})  # cannot contain themselves; most of a state
_fields = itemgetter(TAG, GROUP, NAME)


class EncodeWalk:
    """Turns values into skeleton nodes; their data goes to the blob store.

    Attributes:
        path: keys and positions from the top of the state to the value being encoded.
        blobs: where data goes.
        group: the group of files that data goes to now.
    """

    def __init__(self, find_encoder: FindEncoder, blobs: BlobStore, depth: int = 0) -> None:
        """Starts at the top of a state.

        Args:
            find_encoder: the encoder of a type, or None.
            blobs: where data goes.
            depth: levels of the state that are above, if it does not start at the top.
        """
        self.path: list[object] = []
        self.blobs = blobs
        self.group = ""
        self._find_encoder = find_encoder
        self._active: set[int] = set()
        self._max_active = MAX_DEPTH - depth

    @property
    def key_path(self) -> str:
        """Where the value being encoded is, as text."""
        return join_key_path(self.path)

    def child(self, key: object, value: Any) -> Any:
        """The node of a value that is found under `key` in the value being encoded."""
        self.path.append(key)
        node = self.encode(value)
        self.path.pop()  # left as it is when an error passes: the error names the path
        return node

    def encode(self, value: Any) -> Any:
        """The node of a value.

        Raises:
            UnsupportedStateError: the value, or one inside it, has no exact encoding.
        """
        kind = type(value)
        if value is None or kind is bool:
            return value
        encoder = self._find_encoder(kind)
        if encoder is None:
            self.refuse(f"there is no exact encoding for the type {kind.__module__}.{kind.__qualname__}")
        if len(self._active) >= self._max_active:
            self.refuse(f"it is nested more than {MAX_DEPTH} levels deep")
        if kind in _LEAVES:
            return encoder(value, self)
        if id(value) in self._active:
            self.refuse("it contains itself")
        self._active.add(id(value))
        node = encoder(value, self)
        self._active.discard(id(value))
        return node

    def refer(
        self,
        tag: str,
        identity: Hashable,
        dtype: str,
        shape: tuple[int, ...],
        source: Callable[[Any], memoryview],
        owner: object,
    ) -> dict[str, Any]:
        """A node for the value being encoded that refers to data in a file; see `BlobStore.refer`."""
        return self.blobs.refer(tag, self.group, tuple(self.path), identity, dtype, shape, source, owner)

    def refuse(self, reason: str) -> NoReturn:
        """Raises `UnsupportedStateError` for the value being encoded."""
        raise UnsupportedStateError(self.key_path, reason)


class DecodeWalk:
    """Turns skeleton nodes into values.

    Attributes:
        path: keys and positions from the top of the state to the node being decoded.
        shared: objects that are to be the same under several names.
    """

    def __init__(self, decoders: Mapping[str, Decoder], load: Callable[[str], Mapping[str, torch.Tensor]]) -> None:
        """Starts at the top of a state.

        Args:
            decoders: tag → decoder.
            load: group of files → its tensors.
        """
        self.path: list[object] = []
        self.shared: dict[object, Any] = {}
        self._decoders = decoders
        self._load = load

    def child(self, key: object, node: Any) -> Any:
        """The value of a node that is found under `key` in the node being decoded."""
        self.path.append(key)
        value = self.decode(node)
        self.path.pop()
        return value

    def decode(self, node: Any) -> Any:
        """The value of a node; raises whatever a malformed one leads to."""
        kind = type(node)
        if kind is dict:
            if TAG not in node:
                return self.items(node)
            tag = node[TAG]
            if type(tag) is not str or tag not in self._decoders:
                shown = repr(tag[:40]) if type(tag) is str else f"of type {type(tag).__name__}"
                raise ValueError(f"the unknown tag {shown}")
            return self._decoders[tag](node, self)
        if kind is list:
            return [self.child(number, item) for number, item in enumerate(node)]
        return node

    def items(self, nodes: dict[str, Any]) -> dict[str, Any]:
        """Key → value of its node."""
        tensors = self._plain_tensors(nodes.values())
        if tensors is not None:
            return dict(zip(nodes, tensors, strict=True))
        return {key: self.child(key, node) for key, node in nodes.items()}

    def _plain_tensors(self, nodes: Collection[Any]) -> list[torch.Tensor] | None:
        """The tensors of nodes of which each is nothing but a reference, into one group; None: there are others.

        Most of a state is found here. By loops in C, as there may be 10^5 of them.
        """
        try:
            tags, groups, names = zip(*map(_fields, nodes), strict=True)
            if set(map(len, nodes)) != {NUM_PLAIN_FIELDS} or set(tags) != {TENSOR} or len(set(groups)) != 1:
                return None
            return list(map(self._load(groups[0]).__getitem__, names))
        except (KeyError, TypeError, ValueError):  # also a malformed one: the error is to say which
            return None

    def tensor(self, node: dict[str, Any]) -> torch.Tensor:
        """The tensor that holds a node's data: one object for all nodes that refer to it."""
        return self._load(node[GROUP])[node[NAME]]

    def data(self, node: dict[str, Any]) -> tuple[Reference, torch.Tensor]:
        """Where a node's data is, and the tensor that holds it."""
        reference = Reference(node[GROUP], node[NAME])
        return reference, self._load(reference.group)[reference.name]


def decode_state(walk: DecodeWalk, state: Mapping[str, Any], path: Any, file: str) -> dict[str, Any]:
    """Values of top-level nodes, every failure as a typed error.

    Args:
        walk: a walk at its beginning.
        state: top-level key → node.
        path: the checkpoint's path, for messages.
        file: name of the file that the nodes come from, for messages.

    Raises:
        CorruptCheckpointError: a node is malformed.
        UnsupportedStateError: a value is of a type that is not registered here.
    """
    try:
        return {key: walk.child(key, node) for key, node in state.items()}
    except ResumeError:
        raise
    except (Exception, RecursionError) as error:
        where = join_key_path(walk.path[:20]) or "the state"
        found = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise CorruptCheckpointError(path, file, f"a well-formed value for {where!r}", found) from error
