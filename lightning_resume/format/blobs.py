"""The data beside the skeleton: what is to be written, once for each piece of memory, and under which name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from lightning_resume.errors import UnsupportedStateError
from lightning_resume.format.header import DTYPE_BYTES
from lightning_resume.format.skeleton import GROUP, NAME, TAG

MAX_NAME_CHARS = 4096


def join_key_path(keys: Iterable[object]) -> str:
    """Keys and positions as one text: ``optimizer_states.0.state.3.exp_avg``."""
    return ".".join(str.__str__(key) if isinstance(key, str) else repr(key) for key in keys)


@dataclass(eq=False, slots=True)
class Blob:
    """One piece of data.

    Attributes:
        group: the group of files that it goes to.
        path: keys and positions down to where it was met first.
        wanted: the name that it should have in its file.
        is_direct: whether it is an entry of the model's state dict itself, whose name readers rely on.
        dtype: its safetensors dtype.
        shape: its shape in the file.
        num_bytes: size of the data.
        source: gives the owner's bytes, when they are to be written; may copy.
        owner: keeps the memory alive, and with it the identity that `BlobStore` compares.
        nodes: skeleton nodes that refer to it.
        aliases: further names in the model's state dict.
        name: its name in the file.
    """

    group: str
    path: tuple[object, ...]
    wanted: str
    is_direct: bool
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    source: Callable[[Any], memoryview]
    owner: Any
    nodes: list[dict[str, Any]]
    aliases: list[str] | None = None
    name: str = ""

    @property
    def key_path(self) -> str:
        """Where it was met first, as text."""
        return join_key_path(self.path)

    def data(self) -> memoryview:
        """Its bytes.

        Raises:
            UnsupportedStateError: the value changed its size since it was planned.
        """
        data = self.source(self.owner)
        if len(data) != self.num_bytes:
            self.refuse_change()
        return data

    def refuse_change(self) -> NoReturn:
        """Raises `UnsupportedStateError`: the header that was planned would contradict the data."""
        raise UnsupportedStateError(self.key_path, "it changed while it was saved", "Save a copy of it.")


class BlobStore:
    """Collects blobs in the order in which they are met; data that is met again is not stored again."""

    def __init__(self, model_key: str | None = None) -> None:
        """Starts empty.

        Args:
            model_key: the top-level key of the model's state dict, whose entries keep their names.
        """
        self.groups: dict[str, list[Blob]] = {}
        self._model_key = model_key
        self._known: dict[Hashable, Blob] = {}

    @property
    def identities(self) -> Collection[Hashable]:
        """Of all data that was met."""
        return self._known.keys()

    def refer(
        self,
        tag: str,
        group: str,
        path: tuple[object, ...],
        identity: Hashable,
        dtype: str,
        shape: tuple[int, ...],
        source: Callable[[Any], memoryview],
        owner: object,
    ) -> dict[str, Any]:
        """A skeleton node that refers to data; its name is filled in by `assign_names`.

        Args:
            tag: the node's tag.
            group: the group of files that new data goes to.
            path: keys and positions down to the value.
            identity: equal for equal memory.
            dtype: safetensors dtype.
            shape: shape in the file.
            source: gives the owner's bytes.
            owner: the object that holds the memory.
        """
        blob = self._known.get(identity)
        if blob is None:
            is_direct, wanted = self._wanted_name(group, path)
            node: dict[str, Any] = {TAG: tag, GROUP: group, NAME: ""}
            num_bytes = DTYPE_BYTES[dtype] * math.prod(shape)
            blob = Blob(group, path, wanted, is_direct, dtype, shape, num_bytes, source, owner, [node])
            self._known[identity] = blob
            self.groups.setdefault(group, []).append(blob)
            return node
        is_direct, wanted = self._wanted_name(group, path)
        if is_direct and blob.group == group:
            if blob.is_direct:
                blob.aliases = [*(blob.aliases or ()), wanted]
            else:
                blob.wanted, blob.is_direct = wanted, True
        node = {TAG: tag, GROUP: blob.group, NAME: ""}
        blob.nodes.append(node)
        return node

    def _wanted_name(self, group: str, path: tuple[object, ...]) -> tuple[bool, str]:
        if len(path) == 2 and path[0] == self._model_key and type(path[1]) is str:
            return True, path[1]
        in_group = path[1:] if group in ("model", "optimizer") else path
        return False, join_key_path(in_group) or "value"

    def assign_names(self) -> None:
        """Gives every blob a name that is unique in its group, and tells the nodes."""
        for blobs in self.groups.values():
            taken: set[str] = set()
            suffixes: dict[str, int] = {}
            for blob in blobs:
                if blob.is_direct and _file_name(blob.wanted) == blob.wanted:
                    blob.name = blob.wanted
                    taken.add(blob.name)
            for blob in blobs:
                if not blob.name:
                    blob.name = _unique(_file_name(blob.wanted), taken, suffixes)
                for node in blob.nodes:
                    node[NAME] = blob.name


def _unique(name: str, taken: set[str], suffixes: dict[str, int]) -> str:
    candidate = name
    while candidate in taken:
        suffixes[name] = suffixes.get(name, 1) + 1
        candidate = f"{name}#{suffixes[name]}"
    taken.add(candidate)
    return candidate


def _file_name(name: str) -> str:
    if name == "__metadata__":  # the one name that the file format keeps for itself
        return "__metadata__#"
    if len(name) > MAX_NAME_CHARS:
        name = name[:MAX_NAME_CHARS] + "…"
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode("utf-8")
