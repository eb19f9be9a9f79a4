"""A plan that is kept between saves: what 10^4 tensors are called and where they go does not change from step to step.

The state of the next save is walked beside that of the last one. As long as every container has the same type and keys
and every tensor the same type, dtype, shape, strides and flags, the plan is taken again, with the new tensors in it;
numbers and texts are encoded anew. At the first difference the state is encoded from the start.

The tensors are only collected here. They are looked at when they are copied (see `runs`), and a difference that is
found then leads to the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from lightning_resume.errors import UnsupportedStateError
from lightning_resume.format import blocks
from lightning_resume.format.blobs import Blob, BlobStore
from lightning_resume.format.gather import Part, part_bytes
from lightning_resume.format.planned import PlannedFile
from lightning_resume.format.runs import MAX_TENSORS, DifferentError, Row, Run
from lightning_resume.format.skeleton import MAX_STATE_BYTES, TAG, state_to_bytes
from lightning_resume.format.structure import TENSORS, Container, Leaf
from lightning_resume.format.tensors import bytes_in_place
from lightning_resume.format.tree import FindEncoder

MIN_TENSORS = 500  # fewer are encoded in 2 ms
MAX_MISSES = 3  # one behind the other: a state that is never the same costs no more than these

_MARK = re.compile(rb'\{"\$":([0-9]+)\}')  # no tag is a number, and the quotes of a text are escaped


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
        self._is_missed = self._is_again = False

    def find(
        self, key: object, state: Mapping[str, Any], find_encoder: FindEncoder
    ) -> tuple[bytes, list[PlannedFile]] | None:
        """The text of the skeleton and the files of a state, if it is built as the last one was.

        Args:
            key: whatever else the plan depends on.
            state: the state.
            find_encoder: the encoder of a type.
        """
        self.version += 1
        self._is_missed, self._is_again = self._is_again, False
        plan, self._plan = self._plan, None
        if plan is None or plan.key != key:
            return None
        try:
            found = plan.fill(state, find_encoder)
        except (DifferentError, UnsupportedStateError, AttributeError, RuntimeError):
            self._miss()  # what is wrong with the state, if anything, is told by encoding it
            return None
        self._plan = plan
        return found

    def keep(
        self, key: object, state: Mapping[str, Any], nodes: dict[str, Any], store: BlobStore, files: list[PlannedFile]
    ) -> None:
        """Keeps what a state was encoded to, where the next one may profit from it. The nodes are the plan's then."""
        blobs = {id(blob.nodes[0]): blob for group in store.groups.values() for blob in group}
        if len(blobs) < MIN_TENSORS or self._num_misses >= MAX_MISSES:
            return
        try:
            self._plan = _Plan(key, state, nodes, blobs, files)
        except (DifferentError, RuntimeError):
            self._miss()

    def require_distinct(self) -> None:
        """To be called when all tensors of the state that was prepared last were looked at.

        Raises:
            DifferentError: one piece of memory has two names in it.
        """
        if self._plan is not None:
            self._plan.require_distinct()

    def drop(self) -> None:
        """The state that was prepared last does not fit after all: what comes next is the same state again."""
        self._plan = None
        self._miss()
        self._is_again = True

    def _miss(self) -> None:
        self._num_misses += not self._is_missed  # once for each state
        self._is_missed = True

    def release(self) -> None:
        """Lets go of the tensors: they were copied, or written."""
        if self._plan is not None:
            self._plan.empty()
            if self._plan.is_filled:  # and all of it was found to fit
                self._num_misses = 0


class _Plan:
    """Structure, skeleton and files of a state.

    Args:
        key: whatever else they depend on.
        state: what was encoded.
        nodes: what it was encoded to.
        blobs: id of the node → its data.
        files: where the data goes.

    Raises:
        DifferentError: not all of the data is of plain tensors, each in one place.
    """

    def __init__(
        self,
        key: object,
        state: Mapping[str, Any],
        nodes: dict[str, Any],
        blobs: Mapping[int, Blob],
        files: list[PlannedFile],
    ) -> None:
        self.key, self._nodes = key, nodes
        self._tensors: list[Blob] = []
        self._others: list[Blob] = []
        self._by_node = blobs
        if TAG in nodes:  # would be taken for that of a node
            raise DifferentError
        self._top = Container(dict(state), nodes, self)
        if len(self._tensors) + len(self._others) != len(blobs):
            raise DifferentError
        self._num_tensors = len(self._tensors)
        self._places: set[int] | None = None  # of the state that was filled in last
        self._by_node = {}
        positions = {id(blob): position for position, blob in enumerate(self._tensors)}
        self._files = [(replace(file, parts=[]), _parts(file.parts, positions)) for file in files]
        self._texts: list[bytes] = []
        self._top.shorten(self._texts)

    def add_tensor(self, node: Any) -> None:
        """Takes note of the next tensor of the state."""
        blob = self._by_node.get(id(node))
        if blob is None or blob.source is not bytes_in_place or len(blob.nodes) > 1 or not blob.num_bytes:
            raise DifferentError
        self._tensors.append(blob)

    def add_data(self, node: Any) -> Blob | None:
        """Takes note of another value's data, if it has any in a file."""
        blob = self._by_node.get(id(node))
        if blob is not None:
            if len(blob.nodes) > 1:
                raise DifferentError
            self._others.append(blob)
        return blob

    def fill(self, state: Mapping[str, Any], find_encoder: FindEncoder) -> tuple[bytes, list[PlannedFile]]:
        """The text and the files of another state.

        Raises:
            DifferentError: it is not built the same.
        """
        tensors: list[Any] = []
        leaves: list[tuple[Leaf, Any]] = []
        self._top.visit(dict(state), tensors, leaves)
        if not set(map(type, tensors)) <= TENSORS:
            raise DifferentError
        places: set[int] = set()
        self._places = places
        files = []
        for file, planned in self._files:
            parts: list[Part] = []
            for part, take in planned:
                if isinstance(part, Row):
                    parts.append(Run(part, take(tensors), places))
                else:
                    parts.append(part)
            files.append(replace(file, parts=parts))
        with_data = [id(value) for leaf, value in leaves if leaf.blob is not None]
        if len(set(with_data)) != len(with_data):  # one array or list under two names
            raise DifferentError
        for leaf, value in leaves:
            leaf.fill(value, find_encoder)
        return self._text(), files

    @property
    def is_filled(self) -> bool:
        """Whether another state than its own was put in."""
        return self._places is not None

    def require_distinct(self) -> None:
        """Raises `DifferentError` if not every tensor that was looked at has memory of its own."""
        if self._places is not None and len(self._places) != self._num_tensors:
            raise DifferentError

    def _text(self) -> bytes:
        try:
            text = _MARK.sub(lambda mark: self._texts[int(mark[1])], state_to_bytes(self._nodes))
        except ValueError as error:
            raise DifferentError from error
        if len(text) > MAX_STATE_BYTES:
            raise DifferentError
        return text

    def empty(self) -> None:
        """Lets go of all data."""
        for blob in (*self._tensors, *self._others):
            blob.owner = None
        self._tensors = []  # from the second state on they are in no file


def _parts(parts: Sequence[Part], positions: Mapping[int, int]) -> list[tuple[Part | Row, Callable[[list[Any]], Any]]]:
    """The parts of a file, its tensors as rows, and how a row's tensors are taken out of all.

    A row lies in one block of the file or has one tensor only: then none has to be cut when the blocks are gathered.

    Args:
        parts: its contents.
        positions: id of a tensor's blob → where the tensor stands among those of the state.
    """
    result: list[tuple[Part | Row, Callable[[list[Any]], Any]]] = []
    row: list[Blob] = []
    end = limit = 0

    def finish_row() -> None:
        if row:
            result.append((Row(row.copy()), _getter([positions[id(blob)] for blob in row])))
            row.clear()

    for part in parts:
        begin, end = end, end + part_bytes(part)
        if not isinstance(part, Blob) or id(part) not in positions:
            finish_row()
            result.append((part, list))
            continue
        if len(row) == MAX_TENSORS or end > limit:
            finish_row()
        if not row:
            limit = (begin // blocks.BLOCK_BYTES + 1) * blocks.BLOCK_BYTES
        row.append(part)
    finish_row()
    return result


def _getter(positions: list[int]) -> Callable[[list[Any]], Any]:
    if positions == list(range(positions[0], positions[-1] + 1)):
        return itemgetter(slice(positions[0], positions[-1] + 1))
    return itemgetter(*positions)
