"""`ResumableLoader`: what is seen through it, what it reads, and what it refuses."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from training import BATCH_SIZE, LOADERS, EpochSampler, Items, Scaled, Stream, Swallowing, seed, train

from lightning_resume import ResumableLoader, RNGState, StateMismatchError, UnsupportedSetupError


def cut_of(loader: ResumableLoader, batch: int) -> tuple[dict[str, Any], RNGState]:
    """What a checkpoint before this batch of the first epoch would hold."""
    cut = train(loader, limits=(batch,), cut_at=[(0, batch)]).cuts[0, batch]
    return cut.loader, cut.streams


def test_the_items_before_the_position_are_not_read() -> None:
    """DAT-14: going on before the last two of six batches reads their eight items, and none before."""
    seed(1)
    state, _ = cut_of(ResumableLoader(LOADERS["shuffle"]()), 4)
    loader = LOADERS["shuffle"]()
    resumed = ResumableLoader(loader)
    resumed.load_state_dict(state)

    batches = list(resumed)

    assert len(batches) == 2
    assert len(loader.dataset.reads) == 8
    assert loader.dataset.reads == torch.cat([batch[0] for batch in batches]).tolist()


def test_asking_for_the_state_reads_nothing() -> None:
    """A save between two batches fetches no item."""
    loader = LOADERS["shuffle"]()
    resumable = ResumableLoader(loader)
    next(iter(resumable))

    resumable.state_dict()

    assert len(loader.dataset.reads) == BATCH_SIZE


def test_a_stream_is_read_again_up_to_the_position() -> None:
    """DAT-18: a data set without a length is read from its start, once, so that its own state is right."""
    seed(1)
    state, _ = cut_of(ResumableLoader(LOADERS["stream"]()), 4)
    loader = LOADERS["stream"]()
    resumed = ResumableLoader(loader)
    resumed.load_state_dict(state)

    batches = list(resumed)

    assert len(batches) == 2
    assert len(loader.dataset.items.reads) == 24


def test_the_users_loader_is_seen_through_the_wrapper() -> None:
    """Attributes, length and class are the loader's own; what is set through the wrapper arrives at the loader."""
    loader = Scaled(3.0)
    resumable: Any = ResumableLoader(loader)

    resumable.factor = 4.0

    assert isinstance(resumable, Scaled)
    assert isinstance(resumable, DataLoader)
    assert type(resumable) is ResumableLoader
    assert (resumable.factor, loader.factor) == (4.0, 4.0)
    assert (resumable.batch_size, resumable.dataset, len(resumable)) == (BATCH_SIZE, loader.dataset, 6)
    assert repr(resumable) == f"ResumableLoader({loader!r})"
    with pytest.raises(AttributeError, match="no_such_thing"):
        resumable.no_such_thing  # noqa: B018


def test_the_users_loader_is_not_changed() -> None:
    """After a pass its sampler, data set, collate function and worker start are the objects that they were."""
    loader = LOADERS["batch sampler"]()
    before = dict(vars(loader))

    list(ResumableLoader(loader))

    assert {name: vars(loader)[name] for name in before} == before


def test_a_sampler_can_be_told_the_epoch_through_the_wrapper() -> None:
    """Lightning calls `set_epoch` on what it finds at `loader.sampler`: that is the user's sampler."""
    sampler = EpochSampler()
    resumable: Any = ResumableLoader(DataLoader(Items(), BATCH_SIZE, sampler=sampler))

    resumable.sampler.set_epoch(5)

    assert resumable.sampler is sampler
    assert torch.cat([batch[0] for batch in resumable]).tolist() == list(sampler)


def test_a_held_loader_touches_nothing() -> None:
    """Frameworks prefetch long before a resume is complete: until then there is None to fetch, and no draw is made."""
    loader = LOADERS["shuffle"]()
    resumable = ResumableLoader(loader)
    resumable.hold()
    before = RNGState.capture()

    iterator = iter(resumable)
    fetched = [next(iterator), next(iterator)]

    assert fetched == [None, None]
    assert loader.dataset.reads == []
    assert RNGState.capture() == before


def test_a_state_ends_the_hold() -> None:
    """The next pass after `load_state_dict` is the real one."""
    seed(1)
    state, streams = cut_of(ResumableLoader(LOADERS["shuffle"]()), 4)
    resumable = ResumableLoader(LOADERS["shuffle"]())
    resumable.hold()
    next(iter(resumable))

    resumable.load_state_dict(state)
    streams.restore()

    assert len(list(resumable)) == 2


def test_entering_a_pass_leaves_the_streams_alone() -> None:
    """Whoever restores the streams may do so before or after the pass is entered: it moves none of them."""
    seed(1)
    state, _ = cut_of(ResumableLoader(LOADERS["sampler drawing each index"]()), 3)
    resumed = ResumableLoader(LOADERS["sampler drawing each index"]())
    resumed.load_state_dict(state)
    seed(999)
    before = RNGState.capture()

    iter(resumed)

    assert RNGState.capture() == before


def test_a_pending_state_is_told_as_it_was_given() -> None:
    """Saved again before the pass was entered, a loaded state is the state."""
    seed(1)
    state, _ = cut_of(ResumableLoader(LOADERS["shuffle"]()), 3)
    resumed = ResumableLoader(LOADERS["shuffle"]())
    resumed.load_state_dict(state)

    again = resumed.state_dict()

    assert again == state


def test_a_new_loader_starts_at_its_first_batch() -> None:
    """The state of a loader of which no pass was ever begun is that of a pass not begun."""
    state = ResumableLoader(LOADERS["shuffle"]()).state_dict()
    loader = ResumableLoader(LOADERS["shuffle"]())

    loader.load_state_dict(state)

    assert state["is_iterating"] is False
    assert len(list(loader)) == 6


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_is_dropped_is_freed(num_workers: int) -> None:
    """The wrapper makes no cycle that would keep data sets, or worker processes, alive."""
    loader = ResumableLoader(
        DataLoader(Items(), BATCH_SIZE, num_workers=num_workers, persistent_workers=num_workers > 0)
    )
    list(loader)
    dataset = weakref.ref(loader.dataset)

    del loader

    assert dataset() is None


def test_the_users_worker_start_sees_the_old_workers_number() -> None:
    """`worker_init_fn` of a resumed loader gets the number of the worker that its process continues."""

    def start(worker_id: int) -> None:
        torch.utils.data.get_worker_info().dataset.started_as = worker_id

    class Started(Items):
        started_as = -1

        def __getitem__(self, index: int) -> Any:
            return torch.tensor([index, self.started_as, torch.utils.data.get_worker_info().id])

    def make() -> ResumableLoader:
        return ResumableLoader(DataLoader(Started(), BATCH_SIZE, num_workers=2, worker_init_fn=start))

    whole = [batch.tolist() for batch in make()]
    state, _ = cut_of(make(), 3)
    resumed = make()
    resumed.load_state_dict(state)

    assert [batch.tolist() for batch in resumed] == whole[3:]
    assert {row[1] for batch in whole[3:] for row in batch} == {0, 1}


def test_a_data_set_of_workers_that_were_spawned_is_resumed() -> None:
    """Workers need not be forked: what travels to them can be sent to a new interpreter."""

    def make(context: str) -> DataLoader[Any]:
        return DataLoader(Items(8), 2, shuffle=True, num_workers=1, multiprocessing_context=context)

    seed(1)
    whole = train(ResumableLoader(make("fork")), limits=(None,), cut_at=[(0, 2)])
    seed(999)
    resumed = train(ResumableLoader(make("spawn")), limits=(None,), resume=whole.cuts[0, 2])

    assert resumed.rows == whole.rows[2:]


class Dropping(DataLoader[Any]):
    """A user's loader that hands out every other batch."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from list(super().__iter__())[::2]


def test_a_loader_that_drops_batches_is_refused_at_the_save() -> None:
    """Its position cannot be told from the batches that it hands out; the error names its class."""
    loader = ResumableLoader(Dropping(Items(), BATCH_SIZE))
    next(iter(loader))

    told = r"Dropping.*has read 6 batches, or tried to, and handed out 1"
    with pytest.raises(UnsupportedSetupError, match=told) as caught:
        loader.state_dict()

    assert caught.value.setup == "the loader Dropping"


class Broken(Items):
    """A data set one item of which cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 2 * BATCH_SIZE:
            raise OSError("no such sector")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_goes_on_after_a_batch_that_failed_is_refused_from_there_on(num_workers: int) -> None:
    """The batches that are trained lie one further in the order than their number says."""
    loader = ResumableLoader(Swallowing(Broken(), BATCH_SIZE, num_workers=num_workers))
    iterator = iter(loader)
    next(iterator), next(iterator)
    before = loader.state_dict()

    next(iterator)

    assert before["position"] == 2
    with pytest.raises(UnsupportedSetupError, match=r"Swallowing.*has read 4 batches, or tried to, and handed out 3"):
        loader.state_dict()


def test_torch_reads_alone_when_nothing_more_is_to_be_learnt() -> None:
    """Each batch after the second costs a count; whoever begins to fetch ahead is looked at again."""
    loader = ResumableLoader(DataLoader(Items(), BATCH_SIZE))
    iterator: Any = iter(loader)
    hooked = []
    for _ in range(4):
        next(iterator)
        hooked.append("_next_data" in vars(iterator._iterator))

    loader.expect_ahead()

    assert hooked == [True, False, False, False]
    assert "_next_data" in vars(iterator._iterator)
    assert loader.state_dict()["position"] == 4


@pytest.mark.parametrize("is_followed_first", [False, True])
def test_each_pass_of_a_loader_is_looked_at_when_fetching_ahead_begins(is_followed_first: bool) -> None:
    """Somebody may have looked into the loader since the pass began that is trained from."""
    loader = ResumableLoader(DataLoader(Items(), BATCH_SIZE))
    trained: Any = iter(loader)
    next(trained), next(trained), next(trained)
    look: Any = iter(loader)
    next(look)

    if is_followed_first:
        loader.follow(trained)
    loader.expect_ahead()

    assert "_next_data" in vars(trained._iterator)


class Geometric(Sampler[Any]):
    """Draws before each batch, and before the end, too."""

    def __iter__(self) -> Iterator[Any]:
        while float(torch.rand(())) < 0.8:
            yield torch.randint(20, (BATCH_SIZE,)).tolist()


def test_an_end_that_was_fetched_ahead_is_not_drawn_again() -> None:
    """The random streams have moved for it already."""
    torch.manual_seed(3)
    loader = ResumableLoader(DataLoader(Items(), batch_sampler=Geometric()))
    loader.expect_ahead()
    batches = list(loader)
    state, stream = loader.state_dict(1), torch.get_rng_state()
    resumed = ResumableLoader(DataLoader(Items(), batch_sampler=Geometric()))
    resumed.expect_ahead()
    resumed.load_state_dict(state)

    rest = list(resumed)

    assert len(batches) > 2
    assert [batch[0].tolist() for batch in rest] == [batches[-1][0].tolist()]
    assert torch.equal(torch.get_rng_state(), stream)


class Ending(Items):
    """A data set that ends a pass by itself."""

    def __getitem__(self, index: int) -> Any:
        if index >= 4 * BATCH_SIZE:
            raise StopIteration
        return super().__getitem__(index)


def test_a_data_set_may_end_a_pass() -> None:
    """The index that it ended at is no batch that was read."""
    loader = ResumableLoader(DataLoader(Ending(), BATCH_SIZE))
    num_batches = len(list(loader))

    state = loader.state_dict()

    assert (num_batches, state["position"], state["has_ended"]) == (4, 4, True)


class LooksAhead(_SingleProcessDataLoaderIter):
    """An iterator of a user's own that knows the next index, to warm a cache."""

    upcoming: Any = None

    def _next_index(self) -> Any:
        index = super()._next_index() if self.upcoming is None else self.upcoming
        if index == "end":
            raise StopIteration
        try:
            self.upcoming = super()._next_index()
        except StopIteration:
            self.upcoming = "end"
        return index


class LookingAhead(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return LooksAhead(self)


def test_an_iterator_may_ask_for_an_index_before_it_reads() -> None:
    """Batches are counted where they are read, unless torch's own iterator reads them."""
    torch.manual_seed(1)
    loader = ResumableLoader(LookingAhead(Items(), BATCH_SIZE, shuffle=True))
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    rest = [batch[0].tolist() for batch in iterator]
    resumed = ResumableLoader(LookingAhead(Items(), BATCH_SIZE, shuffle=True))
    resumed.load_state_dict(state)

    assert [batch[0].tolist() for batch in resumed] == rest
    assert len(rest) == len(loader) - 4


class Lazy(DataLoader[Any]):
    """A loader that makes its iterator with its first batch."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_place_that_was_entered_is_kept_before_the_first_batch(num_workers: int) -> None:
    """A save there says what the save said that was resumed from."""
    torch.manual_seed(1)
    state, _ = cut_of(ResumableLoader(Lazy(Items(), BATCH_SIZE, shuffle=True, num_workers=num_workers)), 4)
    entered = ResumableLoader(Lazy(Items(), BATCH_SIZE, shuffle=True, num_workers=num_workers))
    entered.load_state_dict(state)
    iterator = iter(entered)

    again = entered.state_dict()

    resumed = ResumableLoader(Lazy(Items(), BATCH_SIZE, shuffle=True, num_workers=num_workers))
    resumed.load_state_dict(again)
    rest = [batch[0].tolist() for batch in resumed]
    assert len(rest) == 2
    assert rest == [batch[0].tolist() for batch in iterator]


class ByItself(DataLoader[Any]):
    """A loader that reads its items without torch's iterator."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for indices in self.batch_sampler:
            yield self.collate_fn([self.dataset[index] for index in indices])


def test_a_loader_that_reads_by_itself_is_refused_in_mid_pass() -> None:
    """Nobody knows where it stands; between two passes it stands nowhere."""
    loader = ResumableLoader(ByItself(Items(), BATCH_SIZE))
    iterator = iter(loader)
    before = loader.state_dict()
    next(iterator)

    with pytest.raises(UnsupportedSetupError, match=r"ByItself.*has read 0 batches, or tried to, and handed out 1"):
        loader.state_dict()

    for _ in iterator:
        pass
    assert not before["is_iterating"]
    assert not loader.state_dict()["is_iterating"]


class LookingThrough(DataLoader[Any]):
    """A loader that counts its batches before it reads them."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        list(self.batch_sampler)
        yield from super().__iter__()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_looks_through_its_sampler_is_refused(num_workers: int) -> None:
    """The look takes the place that a resume has put there, and the pass would begin at its start."""
    loader = ResumableLoader(LookingThrough(Items(), BATCH_SIZE, shuffle=True, num_workers=num_workers))
    iterator = iter(loader)
    next(iterator), next(iterator)

    with pytest.raises(UnsupportedSetupError, match=r"LookingThrough.*looks through its sampler besides reading"):
        loader.state_dict()

    state, _ = cut_of(ResumableLoader(DataLoader(Items(), BATCH_SIZE, shuffle=True, num_workers=num_workers)), 2)
    resumed = ResumableLoader(LookingThrough(Items(), BATCH_SIZE, shuffle=True, num_workers=num_workers))
    resumed.load_state_dict(state)
    with pytest.raises(UnsupportedSetupError, match=r"LookingThrough.*looks through its sampler besides reading"):
        next(iter(resumed))


class Repeating(DataLoader[Any]):
    """A user's loader that goes over its data twice in one pass."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(2):
            yield from super().__iter__()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_makes_two_iterators_in_a_pass_is_refused(workers: int) -> None:
    """In the second one at the save; entered in the first one, where the second would stand at the position too."""
    loader = ResumableLoader(Repeating(Items(), BATCH_SIZE, shuffle=True, num_workers=workers))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    for _ in range(6):
        next(batches)
    resumed = ResumableLoader(Repeating(Items(), BATCH_SIZE, shuffle=True, num_workers=workers))
    resumed.load_state_dict(state)

    with pytest.raises(UnsupportedSetupError, match=r"Repeating.*makes 2 iterators in one pass"):
        loader.state_dict()
    with pytest.raises(UnsupportedSetupError, match=r"Repeating.*makes 2 iterators in one pass"):
        list(resumed)
    assert len(list(batches)) == 5


def test_persistent_workers_that_go_round_twice_in_a_pass_are_refused_in_the_second_round() -> None:
    """Torch makes no second iterator for them; in the first round the place is known."""
    loader = ResumableLoader(Repeating(Items(), BATCH_SIZE, shuffle=True, num_workers=1, persistent_workers=True))
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    position = loader.state_dict()["position"]
    next(batches)

    with pytest.raises(UnsupportedSetupError, match=r"Repeating.*7 batches, more than its sampler gave"):
        loader.state_dict()
    assert position == 6


@pytest.mark.parametrize(("saved", "current", "name"), [("shuffle", "list", "list"), ("list", "shuffle", "DataLoader")])
def test_a_loader_of_another_kind_is_refused(saved: str, current: str, name: str) -> None:
    """A DataLoader's state does not fit a list, nor the other way round."""
    state = ResumableLoader(LOADERS[saved]()).state_dict()
    loader = ResumableLoader(LOADERS[current]())

    with pytest.raises(StateMismatchError, match="kind of the loader") as caught:
        loader.load_state_dict(state)

    assert caught.value.current == name


def test_a_generator_that_is_gone_is_refused() -> None:
    """Saved with `generator=`, resumed without: the order would be drawn from somewhere else."""
    seed(1)
    state, _ = cut_of(ResumableLoader(LOADERS["own generator"]()), 2)
    loader = ResumableLoader(LOADERS["shuffle"]())

    with pytest.raises(StateMismatchError, match="random generators that the data holds") as caught:
        loader.load_state_dict(state)

    assert caught.value.current == "none"


def test_a_shorter_data_set_is_refused() -> None:
    """A position behind the end of the data is no position."""
    seed(1)
    state, _ = cut_of(ResumableLoader(DataLoader(Items(24), BATCH_SIZE, shuffle=True)), 5)
    loader = ResumableLoader(DataLoader(Items(8), BATCH_SIZE, shuffle=True))
    loader.load_state_dict(state)

    with pytest.raises(StateMismatchError, match="sampler position") as caught:
        iter(loader)

    assert (caught.value.saved, caught.value.current) == (5, "a sampler of length 2")


class Forgetful(IterableDataset[torch.Tensor]):
    """Draws more the second time that it is made."""

    num_draws = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        Forgetful.num_draws += 1
        for _ in range(10):
            yield torch.tensor([random.random() for _ in range(Forgetful.num_draws)])


@pytest.mark.parametrize(("num_workers", "error"), [(0, StateMismatchError), (1, RuntimeError)])
def test_a_stream_that_does_not_read_the_same_twice_is_refused(num_workers: int, error: type[Exception]) -> None:
    """Reading again has to end where reading ended; if not, the resume stops before its first batch.

    PyTorch brings an error out of a worker process as a RuntimeError with the text of the error.
    """
    Forgetful.num_draws = 0
    state, _ = cut_of(ResumableLoader(DataLoader(Forgetful(), 2, num_workers=num_workers)), 3)
    Forgetful.num_draws = 5
    loader = ResumableLoader(DataLoader(Forgetful(), 2, num_workers=num_workers))
    loader.load_state_dict(state)

    with pytest.raises(error, match=r"does not (draw|read) the same twice"):
        next(iter(loader))


def test_a_sampler_that_is_replaced_between_two_epochs_is_used() -> None:
    """Users put another sampler in for the next epoch; the wrapper takes what is there when the epoch begins."""
    loader = DataLoader(Items(), batch_sampler=BatchSampler(RandomSampler(Items()), BATCH_SIZE, True))
    resumable = ResumableLoader(loader)
    list(resumable)

    loader.__dict__["batch_sampler"] = BatchSampler(range(8), BATCH_SIZE, True)

    assert [batch[0].tolist() for batch in resumable] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_exhausted_pass_is_resumed_as_exhausted() -> None:
    """Saved after the last batch, a pass has no more; the one after it is whole."""
    seed(1)
    loader = ResumableLoader(LOADERS["stream"]())
    list(loader)
    state = loader.state_dict()

    resumed = ResumableLoader(LOADERS["stream"]())
    resumed.load_state_dict(state)

    assert list(resumed) == []
    assert len(list(resumed)) == 6


def test_two_passes_at_once_are_counted_apart() -> None:
    """A second iterator over the same loader begins a pass of its own; the state is that of the newest."""
    loader = ResumableLoader(DataLoader(Stream(), BATCH_SIZE))
    first = iter(loader)
    next(first)

    second = iter(loader)
    next(second)
    next(second)

    assert loader.state_dict()["position"] == 2
