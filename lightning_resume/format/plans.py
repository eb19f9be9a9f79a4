"""A plan that is kept between saves: what 10^4 tensors are called and where they go does not change from step to step.

The model and the optimizers of the next save are walked beside those of the last one. As long as every container has
the same type and keys and every tensor the same type, dtype, shape, strides and flags, the plan is taken again, with
the new tensors in it; numbers and texts are encoded anew. At the first difference the state is encoded from the start.

All else that a state has is small, and changes from save to save: losses, names of checkpoints, places in loops. It is
encoded each time, and has files of its own.

The tensors are only collected here. They are looked at when they are copied (see `runs`), and a difference that is
found then leads to the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

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

MIN_TENSORS = 100  # fewer are encoded in 2 ms, with nothing in the processor's cache
MAX_MISSES = 3  # one behind the other: a state that is never the same costs no more than these

Planned = Sequence[PlannedFile]
_MARK = re.compile(rb'\{"\$":([0-9]+)\}')  # no tag is a number, and the quotes of a text are escaped


class PlanCache:
    """Keeps the plan of a sequence of saves, whose states are prepared one after the other.

    Attributes:
        version: how many states were prepared. What was prepared before is void, unless it was copied or written.
    """

    def __init__(self) -> None:
        """Knows no plan yet."""
        self.version = 0
        self._plan: Plan | None = None
        self._num_misses = 0
        self._is_missed = self._is_again = False

    def find(
        self, key: object, state: Mapping[str, Any], find_encoder: FindEncoder
    ) -> tuple[Plan, list[PlannedFile]] | None:
        """The plan with a state in it, and the files of that, if it is built as the last one was.

        Args:
            key: whatever else the plan depends on.
            state: top-level key → what is planned.
            find_encoder: the encoder of a type.
        """
        self.version += 1
        self._is_missed, self._is_again = self._is_again, False
        plan, self._plan = self._plan, None
        if plan is None or plan.key != key:
            return None
        try:
            files = plan.fill(state, find_encoder)
        except (DifferentError, UnsupportedStateError, AttributeError, RuntimeError):
            self._miss()  # what is wrong with the state, if anything, is told by encoding it
            return None
        self._plan = plan
        return plan, files

    def keep(
        self, key: object, state: Mapping[str, Any], nodes: dict[str, Any], blobs: Sequence[Blob], files: Planned
    ) -> None:
        """Keeps what a state was encoded to, where the next one may profit from it. The nodes are the plan's then.

        Args:
            key: whatever else the plan depends on.
            state: top-level key → what is planned.
            nodes: top-level key → what that was encoded to.
            blobs: all data in it.
            files: where that goes.
        """
        if len(blobs) < MIN_TENSORS or self._num_misses >= MAX_MISSES:
            return
        try:
            self._plan = Plan(key, state, nodes, blobs, files)
        except (DifferentError, RuntimeError):
            self._miss()

    def require_distinct(self) -> None:
        """To be called when all tensors of the state that was prepared last were looked at.

        Raises:
            DifferentError: one piece of memory has two names in it.
        """
        if self._plan is not None:
            self._plan.require_distinct()

    def reject(self) -> None:
        """The state for which a plan was found does not fit after all, and is encoded from the start."""
        self._plan = None
        self._miss()

    def drop(self) -> None:
        """The state that was prepared last does not fit after all: what is prepared next is the same state again."""
        self.reject()
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


class Plan:
    """Structure, skeleton and files of the model and the optimizers of a state.

    Args:
        key: whatever else they depend on.
        state: what was encoded.
        nodes: what it was encoded to.
        blobs: all data in it.
        files: where the data goes.

    Attributes:
        key: as given.
        nodes: top-level key → what the state that was filled in is encoded to, in short: see `text`.

    Raises:
        DifferentError: not all of the data is of plain tensors, each in one place.
    """

    def __init__(
        self,
        key: object,
        state: Mapping[str, Any],
        nodes: dict[str, Any],
        blobs: Sequence[Blob],
        files: Planned,
    ) -> None:
        self.key, self.nodes = key, nodes
        self._tensors: list[Blob] = []
        self._others: list[Blob] = []
        self._by_node = {id(blob.nodes[0]): blob for blob in blobs}
        if TAG in nodes:  # would be taken for that of a node
            raise DifferentError
        self._top = Container(dict(state), nodes, self)
        if len(self._tensors) + len(self._others) != len(blobs):
            raise DifferentError
        self._num_tensors = len(self._tensors)
        self._places: set[int] | None = None  # of the state that was filled in last
        self._places_beside: set[int] = set()
        self._identities: set[Hashable] = set()  # of its data that is in no tensor
        self._by_node = {}
        positions = {id(blob): position for position, blob in enumerate(self._tensors)}
        self._planned = [(replace(file, parts=[]), _parts(file.parts, positions)) for file in files]
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

    def fill(self, state: Mapping[str, Any], find_encoder: FindEncoder) -> list[PlannedFile]:
        """The files of another state.

        Raises:
            DifferentError: it is not built the same.
        """
        tensors: list[Any] = []
        leaves: list[tuple[Leaf, Any]] = []
        self._top.visit(dict(state), tensors, leaves)
        if not set(map(type, tensors)) <= TENSORS:
            raise DifferentError
        places: set[int] = set()
        files = []
        for file, planned in self._planned:
            parts: list[Part] = []
            for part, take in planned:
                if isinstance(part, Row):
                    parts.append(Run(part, take(tensors), places))
                else:
                    parts.append(part)
            files.append(replace(file, parts=parts))
        identities = [found for leaf, value in leaves for found in leaf.fill(value, find_encoder)]
        self._identities = set(identities)
        if len(self._identities) != len(identities):  # one array or list under two names
            raise DifferentError
        self._places, self._places_beside = places, set()
        return files

    def note_beside(self, store: BlobStore) -> None:
        """Takes note of the data of the rest of the state: what both have is written once, under one name.

        Raises:
            DifferentError: there is such, found without looking at the tensors of the plan.
        """
        if not self._identities.isdisjoint(store.identities):
            raise DifferentError
        owners = [blob.owner for group in store.groups.values() for blob in group]
        self._places_beside = {
            owner.data_ptr() for owner in owners if isinstance(owner, torch.Tensor) and owner.numel()
        }

    @property
    def is_filled(self) -> bool:
        """Whether another state than its own was put in."""
        return self._places is not None

    def require_distinct(self) -> None:
        """Raises `DifferentError` if not every tensor that was looked at has memory of its own, in all of the state."""
        if self._places is None:
            return
        if len(self._places) != self._num_tensors or not self._places.isdisjoint(self._places_beside):
            raise DifferentError

    def text(self, nodes: Mapping[str, Any]) -> bytes:
        """The text of a skeleton that has the plan's nodes in it.

        Args:
            nodes: top-level key → node, of the whole state.

        Raises:
            DifferentError: it is too long, if the state is the same.
        """
        try:
            text = _MARK.sub(lambda mark: self._texts[int(mark[1])], state_to_bytes(nodes))
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
