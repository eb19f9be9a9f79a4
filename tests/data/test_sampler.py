"""`FastForwardSampler` on its own: an order that can be entered anywhere, without reading an item."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from training import Buckets, EpochSampler, Items, OwnStream, Wandering, seed

from lightning_resume import FastForwardSampler, RNGState, StateMismatchError, read_checkpoint, write_checkpoint

NUM_ITEMS = 24
SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(range(NUM_ITEMS)),
    "random": lambda: RandomSampler(range(NUM_ITEMS)),
    "random, own generator": lambda: RandomSampler(range(NUM_ITEMS), generator=torch.Generator().manual_seed(3)),
    "replacement": lambda: RandomSampler(range(NUM_ITEMS), replacement=True),
    "more than there is": lambda: RandomSampler(range(10), num_samples=NUM_ITEMS),
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, 25.0), NUM_ITEMS),
    "subset": lambda: SubsetRandomSampler(range(0, 48, 2)),
    "distributed": lambda: DistributedSampler(range(48), num_replicas=2, rank=1, seed=4),
    "batches": lambda: BatchSampler(RandomSampler(range(NUM_ITEMS)), 5, drop_last=False),
    "batches, own generator": lambda: BatchSampler(
        RandomSampler(range(NUM_ITEMS), generator=torch.Generator().manual_seed(3)), 5, drop_last=True
    ),
    "batches of a wandering sampler": lambda: BatchSampler(Wandering(), 4, drop_last=True),
    "drawing before each batch": Buckets,
    "drawing each index": Wandering,
    "own generator": OwnStream,
    "epoch alone": EpochSampler,
    "list": lambda: list(range(NUM_ITEMS)),
}


def use(iterator: Iterator[Any], count: int | None = None) -> list[tuple[Any, float]]:
    """Takes values as a training loop does, which draws from the same streams in between."""
    used = []
    for value in iterator:
        used.append((value, random.random() + np.random.rand() + float(torch.rand(()))))
        if len(used) == count:
            break
    return used


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_order_is_the_wrapped_samplers(kind: str) -> None:
    """Law 3: two epochs through the wrapper draw what two epochs of the sampler draw, when it draws it."""
    seed(1)
    sampler = SAMPLERS[kind]()
    expected = [use(iter(sampler)), use(iter(sampler))]
    streams = RNGState.capture()
    seed(1)

    wrapped = FastForwardSampler(SAMPLERS[kind]())

    assert [use(iter(wrapped)), use(iter(wrapped))] == expected
    assert RNGState.capture() == streams


@pytest.mark.parametrize("kind", SAMPLERS)
def test_an_order_is_entered_at_any_position(kind: str, tmp_path: Path) -> None:
    """DAT-01, DAT-04: from every position of the second epoch on, in a new sampler with other seeds: the same."""
    seed(1)
    sampler = FastForwardSampler(SAMPLERS[kind]())
    use(iter(sampler))
    iterator, cuts = iter(sampler), []
    whole: list[tuple[Any, float]] = []
    while True:
        cuts.append((sampler.state_dict(), RNGState.capture()))
        more = use(iterator, 1)
        if not more:
            break
        whole += more

    for position, (state, streams) in enumerate(cuts):
        seed(999)
        resumed = FastForwardSampler(SAMPLERS[kind]())
        resumed.load_state_dict(state)
        streams.restore()
        assert (position, use(iter(resumed))) == (position, whole[position:])


def test_a_distributed_sampler_goes_on_with_its_seed_and_epoch() -> None:
    """Its order follows from seed and epoch: the seed comes from the state, the epoch from whoever sets it."""
    sampler: Any = FastForwardSampler(DistributedSampler(range(48), num_replicas=2, rank=0, seed=4))
    sampler.set_epoch(3)
    iterator = iter(sampler)
    next(iterator)
    state, rest = sampler.state_dict(), None
    rest = list(iterator)

    resumed: Any = FastForwardSampler(DistributedSampler(range(48), num_replicas=2, rank=0, seed=77))
    resumed.load_state_dict(state)
    resumed.set_epoch(3)

    assert list(resumed) == rest


def test_the_generator_goes_on_into_the_next_epoch() -> None:
    """A generator of the sampler's own is part of the state: the epochs after the resumed one are right too."""
    generator = torch.Generator().manual_seed(3)
    sampler = FastForwardSampler(RandomSampler(range(NUM_ITEMS), generator=generator))
    next(iterator := iter(sampler))
    state = sampler.state_dict()
    expected = [list(iterator), list(sampler), list(sampler)]

    resumed = FastForwardSampler(RandomSampler(range(NUM_ITEMS), generator=torch.Generator()))
    resumed.load_state_dict(state)

    assert [list(resumed), list(resumed), list(resumed)] == expected


def test_further_generators_can_be_named() -> None:
    """A sampler may keep its generator where nobody would look: the user says where."""

    class Hidden(Sampler[int]):
        def __init__(self) -> None:
            self.source = torch.Generator().manual_seed(3)

        def __iter__(self) -> Iterator[int]:
            while True:
                yield int(torch.randint(100, (), generator=self.source))

    def wrap() -> FastForwardSampler:
        sampler = Hidden()
        return FastForwardSampler(sampler, generators={"hidden": sampler.source})

    sampler = wrap()
    iterator = iter(sampler)
    use(iterator, 3)
    state, expected = sampler.state_dict(), [next(iterator) for _ in range(5)]
    resumed = wrap()
    resumed.load_state_dict(state)
    again = iter(resumed)

    assert [next(again) for _ in range(5)] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_hand_written_loop_resumes_with_it(num_workers: int, tmp_path: Path) -> None:
    """The position is the number of batches trained: what a DataLoader's workers have fetched ahead does not count."""
    seed(1)
    sampler = FastForwardSampler(BatchSampler(RandomSampler(range(NUM_ITEMS)), 4, drop_last=True))
    iterator = iter(DataLoader(torch.arange(NUM_ITEMS), batch_sampler=sampler, num_workers=num_workers))
    for _ in range(3):
        next(iterator)
    state = {"sampler": sampler.state_dict(position=3), "rng": RNGState.capture().state_dict()}
    write_checkpoint(tmp_path / "cut", state)
    rest = [batch.tolist() for batch in iterator]
    streams = RNGState.capture()

    seed(999)
    saved = read_checkpoint(tmp_path / "cut")
    resumed = FastForwardSampler(BatchSampler(RandomSampler(range(NUM_ITEMS)), 4, drop_last=True))
    resumed.load_state_dict(saved["sampler"])
    again = iter(DataLoader(torch.arange(NUM_ITEMS), batch_sampler=resumed, num_workers=num_workers))
    RNGState.from_state_dict(saved["rng"]).restore()

    assert [batch.tolist() for batch in again] == rest
    assert RNGState.capture() == streams


def test_no_item_is_read_on_the_way() -> None:
    """DAT-14: the sampler skips indices; the data set is asked for what comes after the position alone."""
    dataset = Items(NUM_ITEMS)
    sampler = FastForwardSampler(BatchSampler(SequentialSampler(dataset), 4, drop_last=True))
    for _ in zip(range(4), sampler, strict=False):
        pass
    state = sampler.state_dict(position=4)
    resumed = FastForwardSampler(BatchSampler(SequentialSampler(dataset), 4, drop_last=True))
    resumed.load_state_dict(state)

    list(DataLoader(dataset, batch_sampler=resumed))

    assert dataset.reads == list(range(16, 24))


def test_a_known_sampler_is_advanced_without_forming_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipping a million indices costs no million lists: PyTorch's BatchSampler is entered at its sampler."""
    sampler = FastForwardSampler(BatchSampler(SequentialSampler(range(1_000_000)), 4, drop_last=True))
    next(iter(sampler))
    state = {**sampler.state_dict(), "position": 249_999}
    formed = []
    stock = BatchSampler.__iter__

    def counted(self: Any) -> Iterator[list[int]]:
        for batch in stock(self):
            formed.append(batch)
            yield batch

    monkeypatch.setattr(BatchSampler, "__iter__", counted)
    resumed = FastForwardSampler(BatchSampler(SequentialSampler(range(1_000_000)), 4, drop_last=True))
    resumed.load_state_dict(state)

    assert list(resumed) == formed == [[999_996, 999_997, 999_998, 999_999]]


def test_attributes_and_length_are_the_wrapped_samplers() -> None:
    """Who asks for `batch_size`, `drop_last` or `set_epoch` gets the sampler's."""
    sampler: Any = FastForwardSampler(BatchSampler(EpochSampler(), 4, drop_last=True))

    sampler.sampler.sampler.set_epoch(2)

    assert (len(sampler), sampler.batch_size, sampler.drop_last) == (6, 4, True)
    with pytest.raises(AttributeError, match="no_such_thing"):
        sampler.no_such_thing  # noqa: B018


def test_known_samplers_keep_a_small_record() -> None:
    """A sampler that draws its order at once needs one state of the stream, however long it is used."""
    sampler = FastForwardSampler(RandomSampler(range(1000)))

    use(iter(sampler), 500)

    assert len(sampler.state_dict()["log"]["entries"]) == 1


def test_a_sampler_that_nobody_comes_between_keeps_a_small_record() -> None:
    """Draw by draw, a stream needs an entry only where somebody else has moved it."""
    alone, disturbed = FastForwardSampler(Wandering()), FastForwardSampler(Wandering())

    iterator = iter(alone)
    for _ in range(10):
        next(iterator)
    use(iter(disturbed), 10)

    assert len(alone.state_dict()["log"]["entries"]) == 1
    assert len(disturbed.state_dict()["log"]["entries"]) == 10


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("kind", list(SAMPLERS))
def test_a_closed_iteration_draws_nothing_more(kind: str, resumed: bool) -> None:
    """Workers that are asked for the rest of a pass get no further index, and every stream stays where it is."""
    seed(1)
    sampler = FastForwardSampler(SAMPLERS[kind]())
    if resumed:
        use(iter(sampler), 2)
        state, sampler = sampler.state_dict(), FastForwardSampler(SAMPLERS[kind]())
        sampler.load_state_dict(state)
    iterator = iter(sampler)
    next(iterator)
    before, streams = sampler.state_dict(), RNGState.capture()

    sampler.close()

    assert list(iterator) == []
    assert sampler.state_dict()["position"] == before["position"] == (3 if resumed else 1)
    assert RNGState.capture() == streams


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_stands_where_the_sampler_stands(copied: Any) -> None:
    """A data set that holds its sampler may be sent to a worker process in the middle of a pass."""
    sampler = FastForwardSampler(RandomSampler(range(NUM_ITEMS)))
    iterator = iter(sampler)
    use(iterator, 5)

    copy_of_it = copied(sampler)
    next(iterator)

    assert (copy_of_it.num_drawn, sampler.num_drawn) == (5, 6)
    copy_of_it.close()
    assert len(list(iterator)) == NUM_ITEMS - 6


@pytest.mark.parametrize("position", [-1, 4])
def test_a_position_that_was_not_reached_is_refused(position: int) -> None:
    """Nobody can have trained what was never drawn."""
    sampler = FastForwardSampler(SequentialSampler(range(NUM_ITEMS)))
    use(iter(sampler), 3)

    with pytest.raises(ValueError, match=f"position must be between 0 and the 3 values drawn, got {position}"):
        sampler.state_dict(position=position)


def test_a_position_behind_the_end_is_refused() -> None:
    """A shorter sampler is not the sampler of the save; the error tells both lengths."""
    sampler = FastForwardSampler(SequentialSampler(range(NUM_ITEMS)))
    use(iter(sampler), 20)
    shorter = FastForwardSampler(SequentialSampler(range(10)))

    with pytest.raises(StateMismatchError, match="sampler position") as caught:
        shorter.load_state_dict(sampler.state_dict())

    assert (caught.value.saved, caught.value.current) == (20, "a sampler of length 10")


def test_a_sampler_that_does_not_draw_the_same_twice_is_refused() -> None:
    """A replay that ends at another state of a stream has drawn another order: that is told before a value is used."""
    seed(1)
    sampler = FastForwardSampler(Wandering())
    use(iter(sampler), 5)
    state = sampler.state_dict()
    resumed = FastForwardSampler(Buckets())
    resumed.load_state_dict(state)

    with pytest.raises(StateMismatchError, match="does not draw the same twice"):
        next(iter(resumed))


def test_a_closed_iteration_ends() -> None:
    """After `close` nothing more is drawn, and the next iteration is whole."""
    sampler = FastForwardSampler(SequentialSampler(range(6)))
    iterator = iter(sampler)
    next(iterator)

    sampler.close()

    assert list(iterator) == []
    assert list(sampler) == [0, 1, 2, 3, 4, 5]


def test_an_iterator_that_is_dropped_unused_takes_no_position_along() -> None:
    """DataLoader asks a batch sampler for an iterator twice and drops the first: the second one goes on."""
    sampler = FastForwardSampler(SequentialSampler(range(6)))
    use(iter(sampler), 2)
    resumed = FastForwardSampler(SequentialSampler(range(6)))
    resumed.load_state_dict(sampler.state_dict())

    iter(resumed)

    assert list(resumed) == [2, 3, 4, 5]
