"""What the tests of loaders share: loaders of every kind, and a training loop that can be cut and gone on with.

The loop stands for a training job: after each batch it draws from the three global streams, as dropout would. A row is
(epoch, batch, values of the batch, numbers drawn); rows that are equal are equal to the last bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from lightning_resume import ResumableLoader, RNGState

NUM_ITEMS, BATCH_SIZE = 24, 4
LIMITS = (None, 4, None)
"""Batches of each epoch: all six, four (the epoch is left early), all six."""
Row = tuple[int, int, Any, tuple[float, ...]]


class Reads(list[int]):
    """Indices that were read, in this process alone: in a plain list they would be part of the run."""


class Items(Dataset[list[Tensor]]):
    """Item i: i, jitter from all three global streams, and the number and seed of the worker that read it."""

    def __init__(self, num_items: int = NUM_ITEMS) -> None:
        self.num_items = num_items
        self.reads = Reads()

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> list[Tensor]:
        self.reads.append(index)
        worker = get_worker_info()
        jitter = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)
        reader = torch.tensor([-1, -1] if worker is None else [worker.id, worker.seed])
        return [torch.tensor(index), jitter, reader]


class Stream(IterableDataset[list[Tensor]]):
    """Unsized, in an order drawn from python's stream, split over the workers."""

    def __init__(self, num_items: int = NUM_ITEMS) -> None:
        self.items = Items(num_items)

    def __iter__(self) -> Iterator[list[Tensor]]:
        worker = get_worker_info()
        assert worker is None or worker.dataset is self  # a worker sees the user's data set
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        order = list(range(first, len(self.items), stride))
        random.shuffle(order)
        for index in order:
            yield self.items[index]


class StatefulStream(IterableDataset[list[Tensor]]):
    """An iterable data set that says where it stands."""

    def __init__(self) -> None:
        self.items, self.next = Items(), 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        while self.next < NUM_ITEMS:
            self.next += 1
            yield self.items[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Buckets(Sampler[list[int]]):
    """A batch sampler that draws from python's global stream before every batch."""

    def __len__(self) -> int:
        return NUM_ITEMS // BATCH_SIZE

    def __iter__(self) -> Iterator[list[int]]:
        pool = list(range(NUM_ITEMS))
        for _ in range(len(self)):
            random.shuffle(pool)
            yield [pool.pop() for _ in range(BATCH_SIZE)]


class Wandering(Sampler[int]):
    """Draws every index from numpy's and torch's global streams, one by one."""

    def __len__(self) -> int:
        return NUM_ITEMS

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_ITEMS):
            yield (int(np.random.randint(NUM_ITEMS)) + int(torch.randint(NUM_ITEMS, ()))) % NUM_ITEMS


class OwnStream(Sampler[int]):
    """Draws every index from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(17)

    def __len__(self) -> int:
        return NUM_ITEMS

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_ITEMS):
            yield int(torch.randint(NUM_ITEMS, (), generator=self.generator))


class EpochSampler(Sampler[int]):
    """Its order follows from `set_epoch` alone."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return NUM_ITEMS

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM_ITEMS, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Scaled(DataLoader[Any]):
    """A user's loader: init arguments of its own, which no code outside can guess."""

    def __init__(self, factor: float, /, **kwargs: Any) -> None:
        super().__init__(Items(), BATCH_SIZE, shuffle=True, **kwargs)
        self.factor = factor


class Rescaled(Scaled):
    """And an `__iter__` of its own, which draws."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for index, jitter, reader in super().__iter__():
            yield index, jitter * self.factor + random.random(), reader


class Reshuffled:
    """A user's loader that is no DataLoader: an iterable that can be iterated again, and draws as it goes."""

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(6).tolist()
        for number in order:
            yield torch.tensor(number), torch.randn(3)


class OwnRandom(Items):
    """Keeps generators of its own, of every kind, which are in no global stream."""

    def __init__(self) -> None:
        super().__init__()
        self.own = {"numpy": np.random.default_rng(0), "torch": torch.Generator().manual_seed(0)}
        self.old = [random.Random(0), np.random.RandomState(0)]

    def __getitem__(self, index: int) -> list[Tensor]:
        draws = [
            self.own["numpy"].random(),
            float(torch.rand((), generator=self.own["torch"])),
            self.old[0].gauss(0, 1),
            self.old[1].rand(),
        ]
        return [*super().__getitem__(index), torch.tensor(draws, dtype=torch.float64)]


def noisy_collate(items: Any) -> Any:
    """A collate function that draws."""
    return [*default_collate(items), torch.rand(2)]


def torchdata_loader(dataset: Any, **kwargs: Any) -> DataLoader[Any]:
    """Returns torchdata's loader, which has a `state_dict` of its own."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, BATCH_SIZE, **kwargs)


def _items(**kwargs: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(Items(), BATCH_SIZE, **kwargs)


def _own_generator(**kwargs: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(Items(), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(5), **kwargs)


LOADERS: dict[str, Callable[[], Any]] = {
    "sequential": _items(),
    "shuffle": _items(shuffle=True),
    "ragged": lambda: DataLoader(Items(22), BATCH_SIZE, shuffle=True),
    "drop last": lambda: DataLoader(Items(26), BATCH_SIZE, shuffle=True, drop_last=True),
    "own generator": _own_generator(),
    "weighted": _items(sampler=WeightedRandomSampler(torch.arange(1.0, NUM_ITEMS + 1), NUM_ITEMS)),
    "replacement": _items(sampler=RandomSampler(range(NUM_ITEMS), replacement=True, num_samples=NUM_ITEMS)),
    "subset": _items(sampler=SubsetRandomSampler(range(NUM_ITEMS))),
    "batch sampler": lambda: DataLoader(Items(), batch_sampler=BatchSampler(RandomSampler(Items()), BATCH_SIZE, True)),
    "sampler drawing before each batch": lambda: DataLoader(Items(), batch_sampler=Buckets()),
    "sampler drawing each index": _items(sampler=Wandering()),
    "sampler with own generator": lambda: DataLoader(Items(), BATCH_SIZE, sampler=OwnStream()),
    "epoch sampler": lambda: DataLoader(Items(), BATCH_SIZE, sampler=EpochSampler()),
    "unbatched": lambda: DataLoader(Items(6), batch_size=None, shuffle=True),
    "drawing collate": _items(shuffle=True, collate_fn=noisy_collate),
    "data set with own generators": lambda: DataLoader(OwnRandom(), BATCH_SIZE, shuffle=True),
    "stream": lambda: DataLoader(Stream(), BATCH_SIZE),
    "unbatched stream": lambda: DataLoader(Stream(num_items=7), batch_size=None),
    "stateful stream": lambda: DataLoader(StatefulStream(), BATCH_SIZE),
    "torchdata": lambda: torchdata_loader(Items(), shuffle=True),
    "torchdata stream": lambda: torchdata_loader(StatefulStream()),
    "subclass": lambda: Scaled(3.0),
    "subclass with own iter": lambda: Rescaled(3.0),
    "list": lambda: [torch.tensor(number) for number in range(6)],
    "iterable": Reshuffled,
}
WORKERS = {"num_workers": 2}
WORKER_LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": _items(shuffle=True, **WORKERS),
    "ragged": lambda: DataLoader(Items(22), BATCH_SIZE, shuffle=True, prefetch_factor=3, **WORKERS),
    "persistent": _items(shuffle=True, persistent_workers=True, **WORKERS),
    "own generator": _own_generator(**WORKERS),
    "sampler drawing before each batch": lambda: DataLoader(Items(), batch_sampler=Buckets(), **WORKERS),
    "epoch sampler": lambda: DataLoader(Items(), BATCH_SIZE, sampler=EpochSampler(), **WORKERS),
    "drawing collate": _items(shuffle=True, collate_fn=noisy_collate, **WORKERS),
    "data set with own generators": lambda: DataLoader(OwnRandom(), BATCH_SIZE, persistent_workers=True, **WORKERS),
    "stream": lambda: DataLoader(Stream(), BATCH_SIZE, **WORKERS),
    "persistent stream": lambda: DataLoader(Stream(), BATCH_SIZE, persistent_workers=True, **WORKERS),
    "torchdata": lambda: torchdata_loader(Items(), shuffle=True, **WORKERS),
    "subclass with own iter": lambda: Rescaled(3.0, **WORKERS),
    "persistent, own iter": lambda: Rescaled(3.0, persistent_workers=True, **WORKERS),
}


def seed(number: int) -> None:
    """Seeds all streams."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@dataclass(frozen=True)
class Cut:
    """What a checkpoint would hold: where the run stands, its loader's state, and the streams."""

    epoch: int
    batch: int
    loader: dict[str, Any]
    streams: RNGState


class Swallowing(DataLoader[Any]):
    """A user's loader that goes on after a batch that could not be read."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        iterator = super().__iter__()
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                return
            except OSError:
                continue


@dataclass
class Run:
    """What came of a run.

    Attributes:
        rows: one of each batch.
        streams: the global streams at the end.
        cuts: (epoch, batch) → what was saved before that batch.
        unsaveable: the places at which nothing could be saved.
    """

    rows: list[Row] = field(default_factory=list)
    streams: RNGState | None = None
    cuts: dict[tuple[int, int], Cut] = field(default_factory=dict)
    unsaveable: list[tuple[int, int]] = field(default_factory=list)

    def rows_from(self, place: tuple[int, int]) -> list[Row]:
        """The rows of this batch and of all that come after it."""
        return [row for row in self.rows if row[:2] >= place]


def train(
    loader: Any,
    *,
    limits: Sequence[int | None] = LIMITS,
    cut_at: Collection[tuple[int, int]] | None = (),
    num_ahead: int = 0,
    ahead_from: int = 0,
    resume: Cut | None = None,
) -> Run:
    """Trains from the start, or from a cut, to the end.

    Args:
        loader: the user's own, or a ResumableLoader.
        limits: how many batches of each epoch to train; None: all.
        cut_at: before which batches to save; None: before each.
        num_ahead: how many batches to fetch before one is trained, as Lightning does where there is no length.
        ahead_from: the batch of an epoch before which that begins.
        resume: where to go on.
    """
    run = Run()
    if resume is not None:
        loader.load_state_dict(resume.loader)
    for epoch in range(resume.epoch if resume else 0, len(limits)):
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        iterator, batch = iter(loader), 0
        if resume is not None:
            resume.streams.restore()
            batch, resume = resume.batch, None
        first, fetched = batch, list[Any]()
        while True:
            if num_ahead and batch == max(first, ahead_from):
                if isinstance(loader, ResumableLoader):
                    loader.expect_ahead()
                fetched = _fetch(iterator, num_ahead)
            if cut_at is None or (epoch, batch) in cut_at:
                _save(run, loader, epoch, batch, len(fetched))
            if batch == limits[epoch]:
                break
            fetched += _fetch(iterator, 1)
            if not fetched:
                break
            run.rows.append((epoch, batch, _values(fetched.pop(0)), _draws()))
            batch += 1
    run.streams = RNGState.capture()
    return run


def _fetch(iterator: Iterator[Any], count: int) -> list[Any]:
    return list(islice(iterator, count))


def _save(run: Run, loader: Any, epoch: int, batch: int, num_ahead: int) -> None:
    if loader.is_saveable(num_ahead):
        run.cuts[epoch, batch] = Cut(epoch, batch, loader.state_dict(num_ahead), RNGState.capture())
    else:
        run.unsaveable.append((epoch, batch))


def _draws() -> tuple[float, ...]:
    return random.random(), np.random.rand(), float(torch.rand(()))


def _values(batch: Any) -> Any:
    return [_values(part) for part in batch] if isinstance(batch, (list, tuple)) else batch.tolist()
