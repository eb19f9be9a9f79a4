"""The random streams that a loader's parts can draw from, and what it takes to draw the same again.

A sampler or a data set is replayed by running it once more from its start. Where it draws from a stream that the
training step draws from too, running it once more is not enough: each of its draws has to meet the stream as it
stood then. `DrawLog` keeps these moments, and only these: a stream that nobody moved in between needs no entry.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # comes with Lightning

from lightning_resume.data import numpy_stream
from lightning_resume.data.evolving import Snapshot
from lightning_resume.data.held import Generator, freeze, get_state, set_state, thaw
from lightning_resume.errors import StateMismatchError

T = TypeVar("T")
States = dict[str, Any]
"""Stream name -> its state, as an immutable value that `==` compares."""


GLOBAL_STREAMS = frozenset({"python", "numpy", "torch"})


class Streams:
    """Python's, numpy's and torch's global streams of this process, and named generators that the user holds."""

    def __init__(self, generators: Mapping[str, Generator] | None = None) -> None:
        self.generators = dict(generators or {})

    def capture(self) -> States:
        """Reads all streams; draws nothing."""
        states: States = {
            "python": random.getstate(),
            "numpy": freeze(np.random.get_state(legacy=False)),
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        states.update(self.capture_generators())
        return states

    def capture_generators(self) -> States:
        """Reads the loader's own generators only."""
        return {name: get_state(generator) for name, generator in self.generators.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Sets the streams named in `states`; the others stay as they are."""
        for name, state in states.items():
            if name == "python":
                random.setstate(state)
            elif name == "numpy":
                np.random.set_state(thaw(state))
            elif name == "torch":
                torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            elif name in self.generators:
                set_state(self.generators[name], state)
            else:
                raise StateMismatchError(
                    "random generators that the data holds", name, sorted(self.generators) or "none"
                )

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Leaves every stream behind as it was found, whatever is drawn inside."""
        # As `capture` and `restore`, without the detour over values that `==` compares: this runs for every batch.
        python, cpu, generators = random.getstate(), torch.get_rng_state(), self.capture_generators()
        put_numpy_back = numpy_stream.put_aside()
        try:
            yield
        finally:
            random.setstate(python)
            put_numpy_back()
            torch.set_rng_state(cpu)
            self.restore(generators)


class DrawLog:
    """Records the draws of one iteration so that they can be made again, exactly, in another process.

    Attributes:
        num_draws: draws made, or skipped.
        has_moved: whether the last recorded draw moved a stream.

    Args:
        streams: the streams that may be drawn from.
        only_first: where given, the source is known to touch the global streams in this many first draws alone
            (PyTorch's samplers do); later draws are then neither recorded nor slowed.
        recent: keep the entries of this many draws only, and keep them always (for a source that is skipped by
            index, where only draws that ran ahead have to be made again).
    """

    def __init__(self, streams: Streams, *, only_first: int | None = None, recent: int | None = None) -> None:
        self.streams, self.only_first, self.recent = streams, only_first, recent
        self.num_draws = 0
        self.has_moved = False
        self._entries: dict[int, States] = {}
        self._after: States = {}
        self._num_recorded = 0  # draws of an earlier process: below it a draw is made again, from there on it is new
        self._expected: States = {}

    @property
    def is_over(self) -> bool:
        """Whether no further draw is recorded, or made again: they are only counted."""
        return self.only_first is not None and self.num_draws >= max(self.only_first, self._num_recorded)

    def draw(self, source: Callable[[], T]) -> T:
        """Makes the next draw: again as recorded (no stream moves), or live and recorded."""
        if self.num_draws < self._num_recorded:
            with self.streams.isolated():
                return self._again(source)
        if self.is_over:
            self.num_draws += 1
            return source()
        before = self.streams.capture()
        try:
            return source()
        finally:
            self._record(before, self.streams.capture())

    def _record(self, before: States, after: States) -> None:
        moved = [name for name in before if before[name] != after[name]]
        self.has_moved = bool(moved)
        entry = {name: before[name] for name in moved if self.recent or self._after.get(name) != before[name]}
        if entry:
            self._entries[self.num_draws] = entry
        self._after.update({name: after[name] for name in moved})
        self.num_draws += 1
        if self.recent:
            self._entries.pop(self.num_draws - 1 - self.recent, None)

    def replay(self, num_draws: int, source: Callable[[], object], what: str | None = None) -> None:
        """Makes the first `num_draws` recorded draws again; the streams are left as found.

        Args:
            num_draws: how many.
            source: makes the next draw.
            what: shown in a progress bar where this takes longer than a moment; None: no bar.
        """
        with self.streams.isolated():
            for index in tqdm(range(num_draws), what, disable=what is None, delay=2.0, leave=False):
                if index in self._entries:
                    self.streams.restore(self._entries[index])
                source()
            self.skip(num_draws)

    def skip(self, num_draws: int) -> None:
        """Counts draws as made: the caller has moved the source past them; the streams stand where that left them."""
        # Only streams that these draws moved, each first move of which has an entry: of another the next draw may be
        # the first, and must not be taken for a continuation.
        moved = {name for index, entry in self._entries.items() if index < num_draws for name in entry}
        self._after = {name: state for name, state in self.streams.capture().items() if name in moved}
        self.num_draws = num_draws
        if num_draws == self._num_recorded:
            self._check()

    def first_states(self) -> States:
        """The streams as the source met them when it began."""
        first = min(self._entries, default=None)
        return {} if first is None else self._entries[first]

    def _again(self, source: Callable[[], T]) -> T:
        self.streams.restore({**self._after, **self._entries.get(self.num_draws, {})})
        before = self.streams.capture()
        try:
            return source()
        finally:
            after = self.streams.capture()
            self._after.update({name: after[name] for name in after if after[name] != before[name]})
            self.num_draws += 1
            if self.num_draws == self._num_recorded:
                self._check()

    def _check(self) -> None:
        for name, state in self._expected.items():
            if self._after.get(name) != state:
                raise StateMismatchError(
                    f"the random stream {name!r} after drawing the epoch's first {self.num_draws} batches again",
                    "the state at the save",
                    "another state: the sampler or data set does not draw the same twice",
                )

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""
        return {
            "num_draws": self.num_draws,
            "entries": [(index, pack(states)) for index, states in self._entries.items()],
            "after": pack(self._after),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Starts from the first draw again, with the record of an earlier process."""
        self.num_draws, self._after = 0, {}
        self._entries = {index: unpack(states) for index, states in state["entries"]}
        self._num_recorded = state["num_draws"]
        self._expected = {} if self.only_first is not None or self.recent else unpack(state["after"])


def pack(states: Mapping[str, Any]) -> dict[str, Any]:
    """`States` as plain containers and tensors."""
    return {name: _pack(state) for name, state in states.items()}


def unpack(plain: Mapping[str, Any]) -> States:
    """The inverse of `pack`."""
    return {name: _unpack(state) for name, state in plain.items()}


def _pack(value: Any) -> Any:
    if isinstance(value, Snapshot):
        return {"attributes": value.changes}
    if isinstance(value, bytes):
        return {"bytes": torch.frombuffer(bytearray(value), dtype=torch.uint8)}
    if isinstance(value, tuple):
        if len(value) > 64:  # python's Mersenne Twister: 624 words and a position
            return {"words": torch.tensor(value, dtype=torch.int64)}
        return tuple(_pack(child) for child in value)
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "attributes" in value:
            return Snapshot(value["attributes"])
        if "bytes" in value:
            return value["bytes"].numpy().tobytes()
        return tuple(value["words"].tolist())
    return tuple(_unpack(child) for child in value) if isinstance(value, tuple) else value
