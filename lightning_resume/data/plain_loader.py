"""Passes over a loader that is no DataLoader: lists, user's own iterables. Entered by reading again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from lightning_resume.data.evolving import EvolvingAttributes, data_owners
from lightning_resume.data.held import find_generators
from lightning_resume.data.position import CountedIterator, Pass, held_pass
from lightning_resume.data.streams import DrawLog, Streams
from lightning_resume.errors import StateMismatchError


class IterableEngine:
    """Iterates any iterable and keeps what `ResumableLoader.state_dict` reports."""

    is_persistent = False

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.held = False
        self.streams = Streams(find_generators({"loader": loader}))
        self.evolving = EvolvingAttributes(data_owners("loader", loader))
        self.current: _IterablePass | None = None
        self._pending: dict[str, Any] | None = None

    def iterate(self) -> Iterator[Any]:
        """The next pass, as an iterator over its batches."""
        if self.held:
            return held_pass()
        state, self._pending = self._pending, None
        position = state["position"] if state is not None else 0
        reads = DrawLog(self.streams)
        self.current = progress = _IterablePass(position, reads, self.evolving.changed())
        if state is None:
            iterator = reads.draw(lambda: iter(self.loader))
        else:
            progress.has_ended, progress.attributes = state["has_ended"], state["attributes"]["start"]
            self.evolving.restore(state["attributes"]["now"] if progress.has_ended else progress.attributes)
            iterator = self._entered(state, reads)
        return CountedIterator(_drawn(reads, iterator), progress)

    def _entered(self, state: Mapping[str, Any], reads: DrawLog) -> Iterator[Any]:
        if state["has_ended"]:
            return iter(())
        reads.load_state_dict(state["reads"])
        begun: list[Iterator[Any]] = []
        what = f"reading {state['position']} batches again"
        reads.replay(state["position"] + 1, lambda: next(begun[0]) if begun else begun.append(iter(self.loader)), what)
        return begun[0]

    def expect_ahead(self) -> None:
        """Each draw is recorded, whoever comes first."""

    def finish_pass(self) -> None:
        """Nothing runs ahead here."""

    def is_saveable(self, num_ahead: int) -> bool:
        """See `ResumableLoader.is_saveable`."""
        return True

    def state_dict(self, num_ahead: int) -> dict[str, Any]:
        """See `ResumableLoader.state_dict`."""
        if self._pending is not None:
            return self._pending
        progress = self.current
        state: dict[str, Any] = {
            "kind": "iterable",
            "is_iterating": progress is not None,
            "attributes": {"now": self.evolving.changed()},
        }
        if progress is not None:
            state["position"] = progress.position - num_ahead
            state["has_ended"] = progress.has_ended and num_ahead == 0
            state["reads"] = progress.reads.state_dict()
            state["attributes"]["start"] = progress.attributes
        return state

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str], name: str) -> list[str]:
        """See `ResumableLoader.load_state_dict`."""
        self.held = False
        if state["kind"] != "iterable":
            raise StateMismatchError(f"kind of {name}", state["kind"], type(self.loader).__name__)
        if state["is_iterating"]:
            self._pending = dict(state)
        elif "attributes" in state:
            self.evolving.restore(state["attributes"]["now"])
        return []


class _IterablePass(Pass):
    """One pass over an iterable.

    Attributes:
        reads: what reading drew.
        attributes: the iterable's own attributes that had changed when the pass began.
    """

    def __init__(self, position: int, reads: DrawLog, attributes: Mapping[str, Any]) -> None:
        super().__init__(position)
        self.reads, self.attributes = reads, attributes


def _drawn(reads: DrawLog, iterator: Iterator[Any]) -> Iterator[Any]:
    end = object()
    while (value := reads.draw(lambda: next(iterator, end))) is not end:
        yield value
