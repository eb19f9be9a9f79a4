"""Positional randomness of a loader: order and items follow from (seed, epoch, position), and from nothing else."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from training import Swallowing

from lightning_resume.data.loader import ResumableLoader
from lightning_resume.data.positional import Place, Positional, PositionalDataset, key_of, seed_streams
from lightning_resume.errors import StateMismatchError, UnsupportedSetupError, WorldSizeError

NUM_ITEMS = 22
READ: list[int] = []  # the items that this process has read


class Noisy(Dataset[Tensor]):
    """Item i is (i, a normal number from each global stream, the sum of three from its own generators)."""

    def __init__(self, num_items: int = NUM_ITEMS) -> None:
        self.num_items = num_items
        self.own = {"numpy": np.random.default_rng(), "python": random.Random(), "torch": torch.Generator()}

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> Tensor:
        READ.append(index)
        own = (
            self.own["numpy"].random()
            + self.own["python"].random()
            + float(torch.rand((), generator=self.own["torch"]))
        )
        return torch.tensor([index, random.gauss(0, 1), np.random.randn(), float(torch.randn(())), own])


class Bucketed(Sampler[list[int]]):
    """Draws from all global streams for every batch; its batches are of unequal sizes."""

    def __init__(self, num_items: int = NUM_ITEMS) -> None:
        self.num_items = num_items

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(self.num_items))
        while left:
            size = min(random.randint(1, 4), len(left))
            start = np.random.randint(len(left) - size + 1)
            torch.rand(2)
            yield left[start : start + size]
            del left[start : start + size]


def drawing_collate(items: list[Tensor]) -> Tensor:
    return torch.stack(items) + torch.rand(()) + random.random()


def make(
    dataset: Any = None,
    *,
    epoch: list[int] | None = None,
    seed: int = 7,
    rank: int = 0,
    world_size: int = 1,
    loader_class: Any = DataLoader,
    **rest: Any,
) -> ResumableLoader:
    """A loader by position; `epoch[0]` is the current epoch."""
    now = epoch if epoch is not None else [0]
    rest = rest if {"batch_sampler", "batch_size"} & set(rest) else {"batch_size": 4, **rest}
    dataset = dataset if dataset is not None else Noisy()
    return ResumableLoader(loader_class(dataset, **rest), Positional(seed, rank, world_size, lambda: now[0]))


def streams() -> tuple[Any, ...]:
    """The global streams, as values that `==` compares."""
    numpy_state = np.random.get_state(legacy=False)
    words = numpy_state["state"]
    return (
        random.getstate(),
        (words["key"].tobytes(), words["pos"], numpy_state["has_gauss"], numpy_state["gauss"]),
        torch.get_rng_state().numpy().tobytes(),
    )


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def indices(batches: list[Tensor]) -> list[int]:
    return torch.cat([batch[..., 0].reshape(-1) for batch in batches]).int().tolist()


LOADERS: dict[str, Any] = {
    "in_order": lambda **k: make(**k),
    "shuffled": lambda **k: make(shuffle=True, **k),
    "own_generator": lambda **k: make(shuffle=True, generator=torch.Generator().manual_seed(3), **k),
    "replacement": lambda **k: make(
        sampler=RandomSampler(range(22), replacement=True, num_samples=50, generator=torch.Generator()), **k
    ),
    "weighted": lambda **k: make(sampler=WeightedRandomSampler(range(1, 23), 22), **k),
    "subset": lambda **k: make(sampler=SubsetRandomSampler(range(5, 19)), **k),
    "bucketed": lambda **k: make(batch_sampler=Bucketed(), **k),
    "cut": lambda **k: make(batch_sampler=BatchSampler(SequentialSampler(range(22)), 5, True), **k),
    "not_batched": lambda **k: make(batch_size=None, shuffle=True, **k),
    "drawing_collate": lambda **k: make(collate_fn=drawing_collate, shuffle=True, **k),
    "torchdata": lambda **k: make(loader_class=StatefulDataLoader, shuffle=True, **k),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_workers_do_not_matter(kind: str) -> None:
    """Order and values of three epochs are the same without workers, with three, and with two that stay."""
    if kind == "torchdata":
        torch.manual_seed(1)
    told = []
    for workers in ({}, {"num_workers": 3}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}):
        torch.manual_seed(1)
        epoch = [0]
        loader = LOADERS[kind](epoch=epoch, **workers)
        passes = []
        for epoch[0] in range(3):
            passes.append(list(loader))
        told.append(passes)

    assert all(same(a, b) for other in told[1:] for a, b in zip(told[0], other, strict=True))
    assert not same(told[0][0], told[0][1]) and not same(told[0][1], told[0][2])


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("after", [0, 2])
def test_a_pass_goes_on_in_another_process_with_other_workers(kind: str, after: int) -> None:
    """After `load_state_dict` the rest of the pass, and the next one, are those of the uninterrupted loader."""
    torch.manual_seed(1)
    epoch = [0]
    loader = LOADERS[kind](epoch=epoch, num_workers=2 - after)
    list(loader)
    epoch[0] = 1
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = list(iterator)
    epoch[0] = 2
    following = list(loader)

    torch.manual_seed(2)
    epoch[0] = 1
    resumed = LOADERS[kind](epoch=epoch, num_workers=after, seed=8)
    resumed.load_state_dict(state)
    assert same(rest, list(resumed))
    epoch[0] = 2
    assert same(following, list(resumed))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}])
def test_no_stream_of_this_process_moves(workers: dict[str, Any]) -> None:
    """The global streams, numpy's kept normal number too, and the data set's generators stand still."""
    dataset = Noisy()
    loader = make(dataset, batch_sampler=Bucketed(), collate_fn=drawing_collate, **workers)
    np.random.randn()
    before, own = streams(), dataset.own["numpy"].bit_generator.state
    for _ in loader:
        assert streams() == before

    assert streams() == before
    assert dataset.own["numpy"].bit_generator.state == own


def test_streams_may_move_between_batches() -> None:
    """What this process draws between two batches is its own, and changes no item."""
    quiet = list(make(shuffle=True))
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    alone = [(random.random(), np.random.randn(), float(torch.rand(()))) for _ in quiet]

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    drawn, batches = [], []
    for batch in make(shuffle=True):
        batches.append(batch)
        drawn.append((random.random(), np.random.randn(), float(torch.rand(()))))

    assert same(quiet, batches)
    assert drawn == alone


def test_entering_a_pass_reads_no_item() -> None:
    """What was trained is passed over by its indices."""
    loader = make(shuffle=True)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    resumed = make(shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    READ.clear()

    rest = list(resumed)

    assert indices(rest) == READ
    assert len(READ) == NUM_ITEMS - 16


def test_batches_that_were_not_trained_are_handed_out_again() -> None:
    """The position is the number of batches trained."""
    loader = make(shuffle=True)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    resumed = make(shuffle=True)
    resumed.load_state_dict(loader.state_dict(1))

    assert torch.equal(next(iter(resumed)), batches[2])


def test_a_pass_that_ended_stays_ended() -> None:
    """A loader that was saved at the end of a pass hands out nothing more of it, and then the next one."""
    epoch = [0]
    loader = make(shuffle=True, epoch=epoch)
    list(loader)
    state = loader.state_dict()
    following = list(loader)
    resumed = make(shuffle=True, epoch=epoch)
    resumed.load_state_dict(state)

    assert list(resumed) == []
    assert same(list(resumed), following)


def test_a_pass_of_which_nothing_was_trained_is_no_turn() -> None:
    """Taken for a state between two passes, it lets the same pass begin."""
    loader = make(shuffle=True)
    first = next(iter(loader))
    resumed = make(shuffle=True)
    resumed.load_state_dict({**loader.state_dict(1), "is_iterating": False})

    assert torch.equal(next(iter(resumed)), first)


def test_workers_that_the_loader_had_before_are_not_used() -> None:
    """Persistent workers that read for the user's own loop know no positions; new ones are started."""
    loader = DataLoader(Noisy(), 4, shuffle=True, num_workers=1, persistent_workers=True)
    list(loader)
    wrapped = ResumableLoader(loader, Positional(7, 0, 1, lambda: 0))

    assert same(list(wrapped), list(make(shuffle=True)))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_pass_that_is_left_early_changes_nothing_later(workers: dict[str, Any]) -> None:
    """The next epoch is the same, however many batches of this one were read."""
    epoch = [0]
    left, whole = make(batch_sampler=Bucketed(), epoch=epoch, **workers), make(batch_sampler=Bucketed(), epoch=epoch)
    list(whole), next(iter(left))
    epoch[0] = 1

    assert same(list(left), list(whole))


def test_what_a_sampler_counts_goes_on() -> None:
    """Plain attributes that a sampler changes from epoch to epoch are restored with the pass."""
    epoch = [0]
    loader = make(sampler=Rotating(), epoch=epoch)
    list(loader)
    epoch[0] = 1
    iterator = iter(loader)
    next(iterator)
    resumed = make(sampler=Rotating(), epoch=epoch, num_workers=1)
    resumed.load_state_dict(loader.state_dict())

    assert same(list(resumed), list(iterator))


class Rotating(Sampler[int]):
    """Begins one item later in each iteration."""

    def __init__(self) -> None:
        self.num_iterations = 0

    def __iter__(self) -> Iterator[int]:
        self.num_iterations += 1
        return iter([(index + self.num_iterations) % NUM_ITEMS for index in range(NUM_ITEMS)])


def test_each_turn_of_an_epoch_is_another() -> None:
    """A loader that is begun again in the same epoch hands out other items in another order."""
    loader = make(shuffle=True)
    turns = [list(loader) for _ in range(3)]

    assert len({tuple(indices(turn)) for turn in turns}) == 3
    assert all(sorted(indices(turn)) == list(range(NUM_ITEMS)) for turn in turns)


def test_an_items_streams_follow_from_its_position() -> None:
    """The same item at the same position has the same values; elsewhere, in another epoch or run, it has others."""
    dataset = PositionalDataset(Noisy(), None, seed=1)
    read = dataset[Place(0, 0, 5, 1, 3)]

    assert torch.equal(read, dataset[Place(0, 0, 5, 1, 3)])
    assert torch.equal(read, dataset.__getitems__(Place(0, 0, 1, 2, [0, 1, 3]))[2])
    others = [Place(0, 0, 6, 1, 3), Place(1, 0, 5, 1, 3), Place(0, 1, 5, 1, 3)]
    values = [
        read,
        *(dataset[place] for place in others),
        PositionalDataset(Noisy(), None, seed=2)[Place(0, 0, 5, 1, 3)],
    ]
    assert len({float(value[column]) for value in values for column in (1, 2, 3, 4)}) == 20


def test_the_streams_are_the_same_in_every_version() -> None:
    """A key never changes its meaning: a checkpoint of an older version goes on exactly."""
    key = hashlib.blake2b(b"7/item/(1, 0, 42)", digest_size=32).digest()
    expected = (
        random.Random(int.from_bytes(key[:16], "little")).random(),
        np.random.RandomState(int.from_bytes(key[16:20], "little")).random_sample(),
        float(
            torch.rand((), generator=torch.Generator().manual_seed(int.from_bytes(key[20:28], "little", signed=True)))
        ),
    )

    seed_streams(key_of(7, "item", 1, 0, 42))

    assert key_of(7, "item", 1, 0, 42) == key
    assert (random.random(), np.random.random_sample(), float(torch.rand(()))) == expected


# -- ranks -------------------------------------------------------------------------------------------------------------


def dealt(rank: int, world_size: int, *, num_items: int = 24, seed: int = 7, **rest: Any) -> ResumableLoader:
    """One rank's loader of global batches of 8."""
    sampler = DistributedSampler(range(num_items), world_size, rank, seed=seed)
    rest = {"batch_size": 8 // world_size, **rest}
    return make(Noisy(num_items), sampler=sampler, rank=rank, world_size=world_size, seed=7, **rest)


@pytest.mark.parametrize("epoch", [0, 5])
@pytest.mark.parametrize("world_size", [2, 4])
def test_global_batches_are_the_same_for_any_number_of_ranks(world_size: int, epoch: int) -> None:
    """What one process reads by a plain shuffle is what several read together, position by position."""
    alone = list(make(Noisy(24), shuffle=True, batch_size=8, epoch=[epoch]))

    ranks = [list(dealt(rank, world_size, epoch=[epoch])) for rank in range(world_size)]

    together = [torch.stack(shares, 1).flatten(0, 1) for shares in zip(*ranks, strict=True)]
    assert same(alone, together)


@pytest.mark.parametrize("seed", [7, 3])
def test_another_number_of_ranks_goes_on_in_the_global_order(seed: int) -> None:
    """Saved on 2 and resumed on 1, and on 2 again: nothing lost, nothing twice, with the sampler's own seed."""
    uninterrupted = [list(dealt(rank, 2, seed=seed)) for rank in range(2)]
    expected = [torch.stack(shares, 1).flatten(0, 1) for shares in zip(*uninterrupted, strict=True)]
    first = dealt(0, 2, seed=seed)
    next(iter(first))

    alone = make(Noisy(24), shuffle=True, batch_size=8)
    alone.load_state_dict(first.state_dict())
    iterator = iter(alone)
    assert torch.equal(next(iterator), expected[1])
    for rank in range(2):
        back = dealt(rank, 2, seed=11)
        back.load_state_dict(alone.state_dict())
        assert same(list(back), uninterrupted[rank][2:])


REFUSED: dict[str, tuple[Any, str]] = {
    "global batch": (lambda: make(Noisy(24), shuffle=True, batch_size=4), "global batch size: 8 → 4"),
    "length": (lambda: make(Noisy(20), shuffle=True, batch_size=8), "items in an epoch: 24 → 20"),
    "in order": (lambda: make(Noisy(24), batch_size=8), "shuffle: True → False"),
    "own order": (lambda: make(batch_sampler=Bucketed()), "no own batch sampler"),
    "own generator": (
        lambda: make(Noisy(24), shuffle=True, batch_size=8, generator=torch.Generator()),
        "needs a plain DataLoader",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_another_global_order_is_refused_on_another_number_of_ranks(what: str) -> None:
    """The error names both numbers and what else has to be equal."""
    saved = dealt(0, 2)
    next(iter(saved))
    loader, reason = REFUSED[what]

    with pytest.raises(WorldSizeError) as refusal:
        loader().load_state_dict(saved.state_dict())

    assert (refusal.value.saved, refusal.value.current) == (2, 1)
    assert reason in str(refusal.value)


def test_ranks_of_unequal_length_are_refused_unless_the_rest_is_dropped() -> None:
    """25 items on 2 ranks are 26, one of them twice; without the last batch they are the same as on one."""
    uneven = dealt(0, 2, num_items=25)
    next(iter(uneven))
    with pytest.raises(WorldSizeError, match="items in an epoch: 26 → 25"):
        make(Noisy(25), shuffle=True, batch_size=8).load_state_dict(uneven.state_dict())

    dropped = [dealt(rank, 2, num_items=25, drop_last=True) for rank in range(2)]
    shares = [list(loader) for loader in dropped]
    assert same(
        list(make(Noisy(25), shuffle=True, batch_size=8, drop_last=True)),
        [torch.stack(pair, 1).flatten(0, 1) for pair in zip(*shares, strict=True)],
    )


# -- refusals ----------------------------------------------------------------------------------------------------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(8)


class OnlyBatches(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Endless()), "Endless is an iterable data set"),
        (DataLoader(OnlyBatches()), "OnlyBatches has no __getitem__"),
        ([1, 2], "list is no DataLoader"),
    ],
)
def test_items_without_positions_are_refused(loader: Any, reason: str) -> None:
    """The error names the loader and says why."""
    with pytest.raises(UnsupportedSetupError) as refusal:
        ResumableLoader(loader, Positional(1, 0, 1, lambda: 0))

    assert reason in str(refusal.value)
    assert repr(loader) in refusal.value.setup


def test_the_state_of_another_kind_of_loader_is_refused() -> None:
    """A state of a loader without positions says nothing about positions."""
    with pytest.raises(StateMismatchError) as refusal:
        make().load_state_dict(ResumableLoader(DataLoader(Noisy(), 4)).state_dict())

    assert (refusal.value.saved, refusal.value.current) == ("DataLoader", "positional")


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


def test_a_loader_that_hands_out_other_batches_than_it_reads_is_refused() -> None:
    """Its position in the order cannot be told from the batches that were trained."""
    loader = make(loader_class=Doubling)
    iterator = iter(loader)
    next(iterator), next(iterator)

    with pytest.raises(UnsupportedSetupError, match="has read 1 batches, or tried to, and handed out 2"):
        loader.state_dict()


class Broken(Noisy):
    def __getitem__(self, index: int) -> Tensor:
        if index == 4:
            raise OSError("no such sector")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_goes_on_after_a_batch_that_failed_is_refused(num_workers: int) -> None:
    """It was read, in vain, and nobody was handed it."""
    loader = make(Broken(), loader_class=Swallowing, num_workers=num_workers)
    num_handed_out = len(list(loader))

    with pytest.raises(UnsupportedSetupError, match=f"has read {num_handed_out + 1} batches, or tried to, and handed"):
        loader.state_dict()


def test_a_place_that_was_entered_is_kept_before_the_first_batch() -> None:
    """A save there says what the save said that was resumed from."""
    loader = make(shuffle=True)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    entered = make(shuffle=True)
    entered.load_state_dict(state)
    entered_iterator = iter(entered)

    again = entered.state_dict()

    resumed = make(shuffle=True)
    resumed.load_state_dict(again)
    assert again == state
    assert [str(batch) for batch in resumed] == [str(batch) for batch in entered_iterator]
