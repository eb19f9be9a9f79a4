"""Counting: how far one pass over a loader has come, and where its worker processes stood on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_resume.data.streams import States, pack, unpack
from lightning_resume.data.workers import Stamped
from lightning_resume.errors import UnsupportedSetupError

MAX_AHEAD = 8
"""Batches that may be handed out before one is trained; Lightning's fetcher takes one."""


class WorkerTrail:
    """The last stamps of every worker of one pass.

    Args:
        num_workers: worker processes of the loader.
        starts: worker -> its streams when the pass began; missing where it starts from its seed.
        are_starts_known: False where persistent workers have moved on in a way that their stamps do not show.
    """

    def __init__(
        self, num_workers: int, starts: Mapping[int, States] | None = None, are_starts_known: bool = True
    ) -> None:
        self.num_workers = num_workers
        self.base_seed = 0
        self._do_items_draw = False
        self._undecided: set[int] = set()
        self.starts: dict[int, States] = dict(starts or {})
        self.are_starts_known = are_starts_known
        self.counts: dict[int, int] = {}
        self.first = 0
        self._stamps: dict[int, deque[tuple[int, States | None, Any]]] = {}
        self._recent: deque[tuple[int, int]] = deque(maxlen=MAX_AHEAD)

    @property
    def do_items_draw(self) -> bool:
        """Whether other workers would make other items; also where that is not known yet."""
        return self._do_items_draw or bool(self._undecided)

    def note(self, index: int, stamped: Stamped) -> None:
        """Takes the stamp off batch number `index` of this pass."""
        worker = stamped.worker
        if stamped.start is not None:
            self.starts[worker] = stamped.start
        stamps = self._stamps.setdefault(worker, deque(maxlen=MAX_AHEAD))
        before = stamps[-1][1] if stamps else self.starts.get(worker)
        stamps.append((index, before if stamped.states is None else stamped.states, stamped.dataset))
        if stamped.depends is None:
            self._undecided.add(worker)
        else:
            self._undecided.discard(worker)
            self._do_items_draw |= stamped.depends
        self.counts[worker] = self.counts.get(worker, 0) + 1
        self._recent.append((index, worker))

    def at(self, position: int) -> dict[str, Any]:
        """The workers as they stood when `position` batches had been handed out."""
        counts = dict(self.counts)
        first = self.first
        for index, worker in self._recent:
            if index < position:
                first = (worker + 1) % self.num_workers
            else:
                counts[worker] -= 1
        last = {worker: self._last_before(worker, position) for worker in range(self.num_workers)}
        states = {worker: stamp[1] if stamp else self.starts.get(worker) for worker, stamp in last.items()}
        return {
            "num_workers": self.num_workers,
            "base_seed": self.base_seed,
            "first": first,
            "states": {worker: state for worker, state in states.items() if state is not None},
            "counts": counts,
            "starts": self.starts,
            "datasets": {worker: stamp[2] for worker, stamp in last.items() if stamp and stamp[2] is not None},
        }

    def _last_before(self, worker: int, position: int) -> tuple[int, States | None, Any] | None:
        stamps = self._stamps.get(worker, ())
        return next((stamp for stamp in reversed(stamps) if stamp[0] < position), None)

    def is_known_at(self, position: int) -> bool:
        """Whether every worker's streams at `position` are known."""
        return self.are_starts_known or all(
            self._last_before(worker, position) is not None for worker in range(self.num_workers)
        )

    def resume(self, state: Mapping[str, Any], position: int) -> None:
        """Goes on from what `at` returned."""
        self.base_seed, self.first = state["base_seed"], state["first"]
        self.counts, self.starts = dict(state["counts"]), dict(state["starts"])
        for worker in {**state["states"], **state["datasets"]}:
            stamp = (position - 1, state["states"].get(worker), state["datasets"].get(worker))
            self._stamps[worker] = deque([stamp], maxlen=MAX_AHEAD)


def pack_workers(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `WorkerTrail.at` returned, as plain containers and tensors."""
    return {**state, **{key: {worker: pack(s) for worker, s in state[key].items()} for key in ("states", "starts")}}


def unpack_workers(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `pack_workers`."""
    return {**plain, **{key: {worker: unpack(s) for worker, s in plain[key].items()} for key in ("states", "starts")}}


class Pass:
    """Progress of one pass over a loader.

    Attributes:
        position: batches handed out, counted from the start of the epoch (not of the process).
        has_ended: the loader has said that there are no more.
    """

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.has_ended = False

    def count(self, iterator: Iterator[Any], owner: object = None) -> CountedIterator:
        """Counts what `iterator` hands out from now on; keeps `owner` alive as long."""
        return CountedIterator(iterator, self, owner)


def require_each_handed_out(loader_name: str, num_read: int, position: int) -> None:
    """Checks that the place in the order of batches is the number of those that were handed out.

    Raises:
        UnsupportedSetupError: it is not: a loader's `__iter__` drops batches, or goes on after one that failed.
    """
    if num_read != position:
        raise UnsupportedSetupError(
            f"the loader {loader_name}",
            f"its __iter__ has read {num_read} batches, or tried to, and handed out {position}",
            "Let it hand out one batch for each that it reads, and let the data set replace what cannot be read.",
        )


class CountedIterator:
    """A loader's iterator that counts what it hands out."""

    def __init__(self, iterator: Iterator[Any], progress: Pass, owner: object = None) -> None:
        self._iterator, self.progress, self._owner = iterator, progress, owner

    def __iter__(self) -> CountedIterator:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.progress.has_ended = True
            raise
        self.progress.position += 1
        return batch


def held_pass() -> Iterator[None]:
    """What a held loader yields: nothing that anybody trains on."""
    while True:
        yield None
