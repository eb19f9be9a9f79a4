"""Resuming with other worker processes: the order stays, draws that cannot stay the same are refused or allowed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_resume import ResumableLoader, RNGState, StateMismatchError

NUM_ITEMS, BATCH_SIZE = 24, 4


class Plain(Dataset[Any]):
    """Items that draw nothing."""

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, 0.0


class Drawing(Plain):
    """Items that draw from python's stream."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()


class CountingItems(Plain):
    """Items that depend on how many this copy of the data set has read."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.num_reads += 1
        return index, float(self.num_reads)


class SetUp(Plain):
    """Sets itself up when it is first read from."""

    def __init__(self) -> None:
        self.is_open = False

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.is_open = True
        return index, 0.0


class Buckets(Sampler[Any]):
    """A batch sampler that draws before every batch."""

    def __len__(self) -> int:
        return NUM_ITEMS // BATCH_SIZE

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield random.sample(range(NUM_ITEMS), BATCH_SIZE)


class Counting(IterableDataset[Any]):
    """A stream that workers read as it is."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_ITEMS))


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def values(batch: Any) -> Any:
    return [part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist()


def train(loader: Any, num_batches: int | None = None) -> tuple[list[Any], dict[str, Any], RNGState]:
    """Batches, with a draw of the training step after each; the loader's state and the streams at the end."""
    iterator, rows = iter(loader), []
    while len(rows) != num_batches and (batch := next(iterator, None)) is not None:
        rows.append((values(batch), random.random(), float(torch.rand(()))))
    return rows, loader.state_dict(), RNGState.capture()


def goes_on(before: DataLoader[Any], after: DataLoader[Any], position: int, allow: tuple[str, ...] = ()) -> Any:
    """Trains `position` batches with one loader and the rest with the other; returns rows and accepted differences."""
    seed(1)
    rows, state, streams = train(ResumableLoader(before), position)
    seed(999)
    loader = ResumableLoader(after)
    differences = loader.load_state_dict(state, allow)
    streams.restore()
    return rows + train(loader)[0], differences


@pytest.mark.parametrize("position", [0, 2, 5])
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3), (3, 2)])
def test_items_that_draw_nothing_are_exact_with_any_workers(before: int, after: int, position: int) -> None:
    """The order is that of the save, and nobody's draws move."""
    make = lambda workers: DataLoader(Plain(), BATCH_SIZE, shuffle=True, num_workers=workers)  # noqa: E731
    seed(1)
    whole = train(ResumableLoader(make(before)))[0]
    allow = ("num_workers_changed",) if position < 2 else ()  # what items do is not known yet

    rows, differences = goes_on(make(before), make(after), position, allow)

    assert rows == whole
    assert position < 2 or differences == []


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3)])
def test_items_that_draw_are_refused(before: int, after: int) -> None:
    """Their draws belong to the workers: with others they would be other draws, so the user has to say so."""
    make = lambda workers: DataLoader(Drawing(), BATCH_SIZE, shuffle=True, num_workers=workers)  # noqa: E731

    with pytest.raises(StateMismatchError, match="num_workers_changed") as caught:
        goes_on(make(before), make(after), 3)

    assert (caught.value.saved, caught.value.current) == (before, after)


@pytest.mark.parametrize("position", [2, 5])
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3)])
def test_items_that_depend_on_what_was_read_are_refused(before: int, after: int, position: int) -> None:
    """Each worker counts for itself: others would count otherwise."""
    make = lambda workers: DataLoader(CountingItems(), BATCH_SIZE, num_workers=workers)  # noqa: E731

    with pytest.raises(StateMismatchError, match="num_workers_changed") as caught:
        goes_on(make(before), make(after), position)

    assert (caught.value.saved, caught.value.current) == (before, after)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3)])
def test_a_data_set_that_sets_itself_up_is_exact_with_any_workers(before: int, after: int) -> None:
    """What each worker does once, at its first batch, is no dependence on who reads."""
    make = lambda workers: DataLoader(SetUp(), BATCH_SIZE, shuffle=True, num_workers=workers)  # noqa: E731
    seed(1)
    whole = train(ResumableLoader(make(before)))[0]

    rows, differences = goes_on(make(before), make(after), 4)

    assert (rows, differences) == (whole, [])


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 3)])
def test_items_that_draw_keep_their_order_where_it_is_allowed(before: int, after: int) -> None:
    """Allowed: the same items in the same batches; the difference is reported."""
    make = lambda workers: DataLoader(Drawing(), BATCH_SIZE, shuffle=True, num_workers=workers)  # noqa: E731
    seed(1)
    whole = train(ResumableLoader(make(before)))[0]

    rows, differences = goes_on(make(before), make(after), 3, ("num_workers_changed",))

    assert [row[0][0] for row in rows] == [row[0][0] for row in whole]
    assert differences == [f"num_workers: {before} → {after}, items draw other random numbers"]


def test_persistent_workers_belong_to_the_next_epochs_draws() -> None:
    """Workers that are started anew begin with other draws than workers that go on."""
    make = lambda persistent: DataLoader(Drawing(), BATCH_SIZE, num_workers=2, persistent_workers=persistent)  # noqa: E731

    with pytest.raises(StateMismatchError, match="persistent_workers of the loader"):
        goes_on(make(True), make(False), 3)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
@pytest.mark.parametrize("other", [{"prefetch_factor": 3}, {"pin_memory": True}], ids=str)
def test_another_prefetch_factor_or_pinning_is_exact(other: dict[str, Any]) -> None:
    """How far PyTorch's samplers are asked ahead, and where batches lie in memory, changes nothing."""
    make = lambda **rest: DataLoader(Drawing(), BATCH_SIZE, shuffle=True, num_workers=2, **rest)  # noqa: E731
    seed(1)
    whole = train(ResumableLoader(make()))[0]

    rows, differences = goes_on(make(), make(**other), 3)

    assert (rows, differences) == (whole, [])


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_a_sampler_that_draws_as_it_goes_is_refused(before: int, after: int) -> None:
    """Its order depends on when it is asked: no word lets that pass."""
    make = lambda workers: DataLoader(Plain(), batch_sampler=Buckets(), num_workers=workers)  # noqa: E731

    with pytest.raises(StateMismatchError, match=r"num_workers of the loader \(its order depends on it\) differs"):
        goes_on(make(before), make(after), 3, ("num_workers_changed",))


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 3), (2, 0)])
def test_a_stream_is_refused_in_mid_epoch(before: int, after: int) -> None:
    """The number of workers decides who reads what: no word lets that pass."""
    make = lambda workers: DataLoader(Counting(), BATCH_SIZE, num_workers=workers)  # noqa: E731

    with pytest.raises(StateMismatchError, match="num_workers of the loader with an iterable data set differs"):
        goes_on(make(before), make(after), 3, ("num_workers_changed",))
