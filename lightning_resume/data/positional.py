"""Positional randomness: what an item's streams are follows from (seed, epoch, position in the global order) alone.

The order of the items follows from (seed, epoch). Nothing depends on worker processes, on how far they run ahead, or
on how many ranks share a global batch: item number i of rank r of n stands at position r + n * i, as
`DistributedSampler` deals items out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from lightning_resume.data.held import Generator, find_generators, freeze, get_state, set_state
from lightning_resume.data.sampler import advance, draws_once
from lightning_resume.data.streams import States, Streams

T = TypeVar("T")


@dataclass(frozen=True)
class Positional:
    """What the positions of a run are counted by.

    Attributes:
        seed: of the run; the same on every rank and after every resume.
        rank: of this process.
        world_size: number of processes.
        epoch: tells the current epoch.
    """

    seed: int
    rank: int
    world_size: int
    epoch: Callable[[], int]


class Place(NamedTuple):
    """An index, or a batch of indices, and where it stands: what travels to a worker process.

    Attributes:
        epoch: of the pass.
        turn: how often the loader had been begun in this epoch before (`max_size_cycle`, validation in mid-epoch).
        position: of the (first) index in the global order of the pass, counted in items.
        stride: from one index of the batch to the next.
        index: what the sampler gave.
    """

    epoch: int
    turn: int
    position: int
    stride: int
    index: Any


def key_of(seed: int, purpose: str, *numbers: int) -> bytes:
    """32 bytes that follow from the arguments alone, in every process and on every machine."""
    return hashlib.blake2b(f"{seed}/{purpose}/{numbers}".encode(), digest_size=32).digest()


def seed_streams(
    key: bytes, generators: Mapping[str, Generator] | None = None, salts: Mapping[str, str] | None = None
) -> None:
    """Sets python's, numpy's and torch's (CPU) global streams, and named generators, to what follows from `key`.

    Args:
        key: 32 bytes.
        generators: name → generator; a torch generator may belong to any device.
        salts: name → what its state shall depend on besides `key` and name.
    """
    random.seed(int.from_bytes(key[:16], "little"))
    np.random.seed(int.from_bytes(key[16:20], "little"))
    torch.default_generator.manual_seed(int.from_bytes(key[20:28], "little", signed=True))
    for name, generator in (generators or {}).items():
        text = f"{name}/{(salts or {}).get(name, '')}"
        digest = hashlib.blake2b(text.encode(), key=key, digest_size=16).digest()
        _seed(generator, int.from_bytes(digest, "little"))


def _seed(generator: Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed % 2**63)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        set_state(generator, freeze(type(generator.bit_generator)(seed).state))


def state_digest(generator: Generator) -> str:
    """A short text that tells one state of a generator from another."""
    return hashlib.blake2b(repr(get_state(generator)).encode(), digest_size=8).hexdigest()


class PositionalDataset(Dataset[Any]):
    """Reads items of a map-style data set, each from streams of its own; the collate function runs on a batch's own.

    The streams are left where the last read left them: the loop in this process has to put them back, a worker process
    has no other use for them. Generators that the data set and the collate function hold are set too.

    Args:
        dataset: the user's.
        collate_fn: the user's; looked through for generators.
        seed: of the run.
    """

    def __init__(self, dataset: Any, collate_fn: object, seed: int) -> None:
        self.dataset, self.collate_fn, self.seed = dataset, collate_fn, seed
        self._generators: dict[str, Generator] = {}
        self._pass: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        # The generators of another process are others.
        return {**self.__dict__, "_generators": {}, "_pass": None}

    def __getitem__(self, place: Place) -> Any:
        """The item (or whatever the data set makes of the index), where the loader does not form batches."""
        self._begin(place)
        self._set_streams("item", place, place.position)
        return self.dataset[place.index]

    def __getitems__(self, place: Place) -> list[Any]:
        """The items of a batch; what is drawn next, by the collate function, is drawn from the batch's own streams."""
        self._begin(place)
        items = []
        for number, index in enumerate(place.index):
            self._set_streams("item", place, place.position + number * place.stride)
            items.append(self.dataset[index])
        self._set_streams("collate", place, place.position)
        return items

    def _begin(self, place: Place) -> None:
        # In each process, and anew in each pass: a worker's start, or the pass before, may have made new ones.
        if self._pass != (place.epoch, place.turn):
            self._pass = (place.epoch, place.turn)
            self._generators = find_generators({"dataset": self.dataset, "collate_fn": self.collate_fn})

    def _set_streams(self, purpose: str, place: Place, position: int) -> None:
        seed_streams(key_of(self.seed, purpose, place.epoch, place.turn, position), self._generators)


class PositionalSampler(Sampler[Place]):
    """The order of a sampler or batch sampler, drawn from streams of its own, with the place of each index.

    Args:
        source: the sampler or batch sampler.
        streams: the global streams, and the generators that the source holds.
        salts: generator's name → what tells the user's seed of it.
        is_batched: whether each value is a batch of indices.
    """

    def __init__(
        self,
        source: Iterable[Any],
        streams: Streams,
        salts: Mapping[str, str],
        positional: Positional,
        is_batched: bool,
    ) -> None:
        self.source, self.streams, self.salts = source, streams, salts
        self.positional, self.is_batched = positional, is_batched
        self._begin = (0, 0, 0, 0)

    def begin(self, seed: int, epoch: int, turn: int, num_skipped: int) -> None:
        """Says what the next iteration is: which pass, and how many values of it are used already."""
        self._begin = (seed, epoch, turn, num_skipped)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.source, name)

    def __iter__(self) -> Iterator[Place]:
        # A generator: DataLoader asks for an iterator twice and drops the first before its first `next`.
        seed, epoch, turn, num_skipped = self._begin
        stride, end = self.positional.world_size, object()
        own = _OwnStreams(self.streams, key_of(seed, "order", epoch, turn), self.salts)
        iterator, count = own.draw(lambda: self._entered(num_skipped))
        is_quiet = draws_once(self.source) and not self.streams.generators
        value = own.draw(lambda: next(iterator, end))
        while value is not end:
            yield Place(epoch, turn, self.positional.rank + count * stride, stride, value)
            count += len(value) if self.is_batched else 1  # type: ignore[arg-type]
            value = next(iterator, end) if is_quiet else own.draw(lambda: next(iterator, end))

    def _entered(self, num_skipped: int) -> tuple[Iterator[Any], int]:
        """The source's iterator, that many values in, and how many indices these were."""
        if draws_once(self.source):
            size: int = self.source.batch_size if self.is_batched else 1  # type: ignore[attr-defined]
            return advance(self.source, num_skipped), num_skipped * size
        iterator, count = iter(self.source), 0
        for _ in range(num_skipped):
            count += len(next(iterator, ())) if self.is_batched else next(iterator, None) is not None
        return iterator, count


class _OwnStreams:
    """Streams that only one iteration draws from; everybody else finds theirs as they were."""

    def __init__(self, streams: Streams, key: bytes, salts: Mapping[str, str]) -> None:
        self.streams, self.key, self.salts = streams, key, salts
        self._states: States | None = None

    def draw(self, source: Callable[[], T]) -> T:
        """What `source` returns when it draws from these streams."""
        with self.streams.isolated():
            if self._states is None:
                seed_streams(self.key, self.streams.generators, self.salts)
            else:
                self.streams.restore(self._states)
            try:
                return source()
            finally:
                self._states = self.streams.capture()
