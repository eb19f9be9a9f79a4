"""`FastForwardSampler`: starts a sampler in mid-epoch by its indices, without reading an item."""

from __future__ import annotations

import sys
import weakref
from collections import abc, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress, islice, repeat
from operator import length_hint
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import SubsetRandomSampler

from lightning_resume.data.evolving import EvolvingAttributes
from lightning_resume.data.held import Generator, find_generators
from lightning_resume.data.streams import DrawLog, Streams, pack, unpack
from lightning_resume.errors import StateMismatchError

# These draw from a global stream in their first `next` at most (checked on torch 2.6 and 2.13).
_DRAW_ONCE = (SequentialSampler, RandomSampler, WeightedRandomSampler, SubsetRandomSampler, DistributedSampler)

Iteration = abc.Generator[Any, None, None]


class FastForwardSampler(Sampler[Any]):
    """Wraps a sampler or batch sampler; its order can be entered at any position.

    An uninterrupted iteration draws exactly what the wrapped sampler draws, when it would. `state_dict` tells
    where an iteration stands together with the random streams that it began with; after `load_state_dict`, in any
    process, the next iteration goes on from there: it runs the wrapped sampler from those streams, drops the
    indices before the position, and leaves the process's streams as it found them.

    Dropping indices reads no item. PyTorch's own samplers are advanced without forming batches.

    Args:
        sampler: any sampler or batch sampler. One that draws from python's, numpy's or torch's global stream batch
            by batch is recorded draw by draw (about 3 to 8 KB per draw that another part of the program came between).
        generators: name -> generator (torch, numpy or `random.Random`) that the sampler draws from; by default those
            that its attributes lead to, except through its data set.
        attributes: the sampler's attributes as they were when the process had just built it; by default as they are.
        others: attributes of the data, of which some may be the sampler's, too; running it again leaves them alone.

    Attributes:
        num_begun: iterations from which a value was asked, since somebody has set this to 0.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        generators: Mapping[str, Generator] | None = None,
        attributes: EvolvingAttributes | None = None,
        others: EvolvingAttributes | None = None,
    ) -> None:
        self.sampler = sampler
        self._streams = Streams(generators if generators is not None else find_sampler_generators(sampler))
        self._log = self._new_log()
        self._evolving = attributes if attributes is not None else watch_sampler(sampler)
        self._attributes = self._evolving.changed()
        self._others = others
        self._iteration: weakref.ref[Iteration] | None = None
        self._position = 0  # when counting was left to the tally
        self._tally = Tally()
        self.num_begun = 0
        self._pending: dict[str, Any] | None = None

    def _new_log(self) -> DrawLog:
        # `iter()` is the first draw, the first `next` the second.
        return DrawLog(self._streams, only_first=2 if draws_once(self.sampler) else None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iteration": None}  # a copy has begun none

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __iter__(self) -> Iterator[Any]:
        iteration = self._resumed() if self._pending is not None else self._from_start()
        self._iteration = weakref.ref(iteration)
        return iteration

    def _from_start(self) -> Iteration:
        self._log = log = self._new_log()
        self._position, self._tally, self._attributes = 0, Tally(), self._evolving.changed()
        iterator = log.draw(lambda: iter(self.sampler))
        return self._live(log, iterator)

    def _live(self, log: DrawLog, iterator: Iterator[Any]) -> Iteration:
        end, tally = object(), self._tally
        self.num_begun += 1
        while not log.is_over:
            if (value := log.draw(lambda: next(iterator, end))) is end:
                return
            self._position += 1
            yield value
        yield from tally.over(iterator)
        log.num_draws += 1  # the one that found the end; the tally has the others

    def forget(self) -> None:
        """Drops a loaded state that no iteration has used: the next one begins at the start."""
        self._pending = None

    def close(self) -> None:
        """Ends the current iteration: it yields no more, and nothing more is drawn."""
        iteration = self._iteration() if self._iteration is not None else None
        if iteration is not None:
            iteration.close()

    def _resumed(self) -> Iteration:
        # A generator: DataLoader asks for an iterator twice and drops the first before its first `next`.
        state, self._pending = self._pending, None
        if state is None:
            yield from self._from_start()
            return
        self._log = log = self._new_log()
        log.load_state_dict(state["log"])
        self._position, self._tally, self._attributes = state["position"], Tally(), state["attributes"]
        iterator = self._started_from(state, log)
        # Only now: DataLoader has drawn its base seed, perhaps from the same generator.
        self._streams.restore(unpack(state["generators"]))
        yield from self._live(log, iterator)

    def _started_from(self, state: Mapping[str, Any], log: DrawLog) -> Iterator[Any]:
        """The wrapped sampler's iterator, run from the attributes that it began with; then they are as at the save."""
        others = self._others.changed() if self._others is not None else {}
        self._evolving.restore(self._attributes)
        self._set_seeds(state)
        iterator = self._started(log, self._position)
        if draws_once(self.sampler) or state.get("num_drawn") == self._position:
            self._evolving.restore(state["idle"])
            self._set_seeds(state)
        # Else it had run ahead, and what it changed in itself on the way will be changed again.
        if self._others is not None:
            self._others.restore(others)
        return iterator

    def _started(self, log: DrawLog, position: int) -> Iterator[Any]:
        """The wrapped sampler's iterator, `position` values in."""
        if log.only_first is None:
            begun: list[Iterator[Any]] = []
            log.replay(position + 1, lambda: next(begun[0]) if begun else begun.append(iter(self.sampler)))
            return begun[0]
        with self._streams.isolated():
            self._streams.restore(log.first_states())
            iterator = advance(self.sampler, position)
            log.skip(position + 1)
        return iterator

    def state_dict(self, position: int | None = None) -> dict[str, Any]:
        """Where the current iteration stands, as plain containers and tensors.

        Args:
            position: how many values of this iteration count as used; by default all that were drawn. With worker
                processes the loader draws ahead of training: pass the number of batches trained.
        """
        if self._pending is not None:
            return self._pending
        num_drawn = self.num_drawn
        if position is not None and not 0 <= position <= num_drawn:
            raise ValueError(f"position must be between 0 and the {num_drawn} values drawn, got {position}")
        return {
            "position": num_drawn if position is None else position,
            "num_drawn": num_drawn,
            "log": {**self._log.state_dict(), "num_draws": self._log.num_draws + self._tally.count},
            "generators": pack(self._streams.capture_generators()),
            "attributes": self._attributes,
            "idle": self._evolving.changed(),
            "seeds": {name: sampler.seed for name, sampler in _seeded(self.sampler).items()},
        }

    def has_drawn(self, num_values: int) -> bool:
        """Whether so many values were drawn in the current iteration, or will be when it has gone on from a state."""
        return self._pending is not None or num_values <= self.num_drawn

    @property
    def num_drawn(self) -> int:
        """Values drawn in the current iteration, from the start of the epoch on."""
        return self._position + self._tally.count if self._pending is None else int(self._pending["position"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration go on from `state`.

        Raises:
            StateMismatchError: the position lies behind this sampler's end.
        """
        length = _length(self.sampler)
        if length is not None and state["position"] > length:
            remedy = "Resume with the batch size and the data of the save, or from a checkpoint between two epochs."
            raise StateMismatchError("sampler position", state["position"], f"a sampler of length {length}", remedy)
        self._set_seeds(state)
        self._pending = dict(state)

    def _set_seeds(self, state: Mapping[str, Any]) -> None:
        for name, sampler in _seeded(self.sampler).items():
            sampler.seed = state["seeds"][name]


class Tally:
    """Counts what an iterator yields; no Python code runs for a value."""

    def __init__(self, count: int = 0) -> None:
        self._left = repeat(True, sys.maxsize - count)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tally, (self.count,)

    def over(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """What `iterator` yields."""
        return compress(iterator, self._left)  # takes one of what is left for each value, and none at the end

    @property
    def count(self) -> int:
        """Values so far."""
        return sys.maxsize - length_hint(self._left)


def advance(sampler: Iterable[Any], position: int) -> Iterator[Any]:
    """Runs a known sampler `position` values ahead; indices are dropped in C, batches are not formed."""
    if type(sampler) is BatchSampler:
        indices = iter(sampler.sampler)
        _drop(indices, position * sampler.batch_size)
        return iter(BatchSampler(_Begun(indices), sampler.batch_size, sampler.drop_last))
    iterator = iter(sampler)
    _drop(iterator, position)
    return iterator


def _drop(iterator: Iterator[Any], count: int) -> None:
    deque(islice(iterator, count), maxlen=0)


class _Begun(Sampler[Any]):
    """A sampler that is already on its way."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator


def draws_once(sampler: object) -> bool:
    """Whether the sampler is known to touch the global streams in its first draw alone."""
    if type(sampler) is BatchSampler:
        return type(sampler.sampler) in _DRAW_ONCE
    return type(sampler) in _DRAW_ONCE


def find_sampler_generators(sampler: object) -> dict[str, Generator]:
    """The generators that a sampler holds; those of its data set are the data set's."""
    inner = getattr(sampler, "sampler", None)
    datasets = [getattr(owner, name, None) for owner in (sampler, inner) for name in ("data_source", "dataset")]
    # Lightning's distributed wrapper keeps a sampler where others keep their data set.
    return find_generators(
        {"sampler": sampler}, stop=[d for d in datasets if d is not None and not hasattr(d, "_sampler")]
    )


def _seeded(sampler: object) -> dict[str, DistributedSampler[Any]]:
    """The samplers, of this one and the one inside it, whose order follows from a seed and the epoch."""
    return {name: owner for name, owner in _chain(sampler).items() if isinstance(owner, DistributedSampler)}


def load_idle(sampler: object, state: Mapping[str, Any]) -> None:
    """Brings a sampler that nobody iterates to where it stood between two iterations."""
    watch_sampler(sampler).restore(state["idle"])


def watch_sampler(sampler: object) -> EvolvingAttributes:
    """Notes a sampler's attributes, and those of the samplers inside it, to see later which have changed."""
    return EvolvingAttributes(_chain(sampler), max_elements=1_000_000)


def _chain(sampler: object) -> dict[str, object]:
    """A sampler, the one inside it, and so on."""
    chain: dict[str, object] = {}
    name = "sampler"
    while sampler is not None and all(sampler is not owner for owner in chain.values()):
        chain[name], name = sampler, f"{name}.sampler"
        inner = getattr(sampler, "sampler", None)
        # Lightning's distributed wrapper keeps a sampler where others keep their data set.
        sampler = inner if inner is not None else getattr(getattr(sampler, "dataset", None), "_sampler", None)
    return chain


def _length(sampler: object) -> int | None:
    try:
        return len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
