"""`ResumableLoader`: with it a pass is the stock pass, and a pass that was cut goes on as if it had not been."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from training import LOADERS, WORKER_LOADERS, Cut, Run, seed, train

from lightning_resume import ResumableLoader, RNGState, read_checkpoint, write_checkpoint

KINDS: dict[str, Callable[[], Any]] = {
    **LOADERS,
    **{f"{name}, workers": make for name, make in WORKER_LOADERS.items()},
}
# Before each batch, before what would be the batch after the last, and where an epoch is left early.
WORKER_CUTS = ((0, 0), (1, 2), (1, 4), (2, 0), (2, 3))
PAIRS = [
    ("unsized", lambda: KINDS["stream"]()),
    ("sized", lambda: KINDS["shuffle"]()),
    ("own generator", lambda: KINDS["own generator"]()),
    ("sampler drawing before each batch", lambda: KINDS["sampler drawing before each batch"]()),
    ("iterable", lambda: KINDS["iterable"]()),
    ("unsized, workers", lambda: KINDS["stream, workers"]()),
    ("persistent, workers", lambda: KINDS["persistent, workers"]()),
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata on a new torch
]


def cuts_of(kind: str) -> tuple[tuple[int, int], ...] | None:
    """Where to cut: everywhere, or at a few places where each resume starts worker processes."""
    return WORKER_CUTS if "workers" in kind else None


@cache
def whole_run(kind: str) -> Run:
    """The uninterrupted run through the wrapper, and what it saved on its way."""
    seed(1)
    return train(ResumableLoader(KINDS[kind]()), cut_at=cuts_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_an_uninterrupted_run_is_the_stock_run(kind: str) -> None:
    """Law 3: through the wrapper, its state asked for on the way, batches and draws are those of the loader."""
    seed(1)
    stock = train(KINDS[kind]())

    wrapped = whole_run(kind)

    assert wrapped.rows == stock.rows
    assert wrapped.streams == stock.streams


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_cut_goes_on_exactly(kind: str) -> None:
    """From each cut on, with a new loader and other seeds: the same items, jitter, worker numbers and draws."""
    whole = whole_run(kind)

    for place, cut in whole.cuts.items():
        seed(999)
        resumed = train(ResumableLoader(KINDS[kind]()), resume=cut)

        assert (place, resumed.rows) == (place, whole.rows_from(place))


@pytest.mark.parametrize(
    "kind", ["shuffle", "own generator", "stream", "iterable", "persistent, workers", "persistent stream, workers"]
)
def test_a_run_goes_on_from_the_end_of_an_epoch(kind: str) -> None:
    """Saved when the loader has said that there is no more: the resumed pass is empty, and the next epoch is right."""
    seed(1)
    whole = train(ResumableLoader(KINDS[kind]()), limits=(None, None))
    seed(1)
    first = ResumableLoader(KINDS[kind]())
    train(first, limits=(None,))
    cut = Cut(0, 6, first.state_dict(), RNGState.capture())

    seed(999)
    resumed = train(ResumableLoader(KINDS[kind]()), limits=(None, None), resume=cut)

    assert resumed.rows == whole.rows_from((1, 0))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "persistent stream, workers"])
def test_a_position_is_known_at_every_batch(kind: str) -> None:
    """There is no batch before which such a loader could not be saved."""
    whole = whole_run(kind)

    expected = WORKER_CUTS if "workers" in kind else {row[:2] for row in whole.rows}
    assert whole.unsaveable == []
    assert set(whole.cuts) >= set(expected)


def test_persistent_workers_of_a_stream_are_known_once_each_has_read_a_batch() -> None:
    """Where such a worker stands is told by its next batch: the first ones of the later epochs cannot be saved."""
    seed(1)

    run = train(ResumableLoader(KINDS["persistent stream, workers"]()), cut_at=None)

    assert run.unsaveable == [(1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    "kind", ["shuffle", "own generator", "sampler drawing each index", "stream", "list", "iterable"]
)
def test_a_resumed_run_can_be_cut_again(kind: str) -> None:
    """A job that is killed at every batch, one after the other, is still the uninterrupted run."""
    whole = whole_run(kind)
    rows = []

    cut: Cut | None = whole.cuts[0, 0]
    while cut is not None:
        seed(999 + len(rows))
        run = train(ResumableLoader(KINDS[kind]()), resume=cut, cut_at=None)
        rows.append(run.rows[0])
        cut = run.cuts[run.rows[1][:2]] if len(run.rows) > 1 else None

    assert rows == whole.rows


@pytest.mark.parametrize(
    "kind", ["shuffle, workers", "persistent, workers", "sampler drawing before each batch, workers"]
)
def test_a_resumed_run_with_workers_can_be_cut_again(kind: str) -> None:
    """Cut in the first epoch, again in the same epoch, and again in the one after it."""
    whole = whole_run(kind)

    first = train(ResumableLoader(KINDS[kind]()), resume=whole.cuts[0, 0], cut_at=[(0, 3)])
    seed(998)
    second = train(ResumableLoader(KINDS[kind]()), resume=first.cuts[0, 3], cut_at=[(0, 4), (1, 1)])
    seed(997)
    third = train(ResumableLoader(KINDS[kind]()), resume=second.cuts[1, 1])

    assert second.rows == whole.rows_from((0, 3))
    assert third.rows == whole.rows_from((1, 1))


@pytest.mark.parametrize(
    "kind",
    ["shuffle", "sampler drawing each index", "data set with own generators", "stream", "stateful stream", "iterable"],
)
def test_a_state_survives_the_disk(kind: str, tmp_path: Path) -> None:
    """Plain containers and tensors: written as a checkpoint and read again, a state is worth the same."""
    cut = whole_run(kind).cuts[1, 2]

    write_checkpoint(tmp_path / "cut", {"loader": cut.loader, "rng": cut.streams.state_dict()})
    read = read_checkpoint(tmp_path / "cut")
    seed(999)
    again = Cut(cut.epoch, cut.batch, read["loader"], RNGState.from_state_dict(read["rng"]))
    resumed = train(ResumableLoader(KINDS[kind]()), resume=again)

    assert resumed.rows == whole_run(kind).rows_from((1, 2))


def test_a_state_of_workers_survives_the_disk(tmp_path: Path) -> None:
    """The same with the stamps of worker processes in it."""
    cut = whole_run("persistent, workers").cuts[1, 2]

    write_checkpoint(tmp_path / "cut", {"loader": cut.loader})
    seed(999)
    again = Cut(cut.epoch, cut.batch, read_checkpoint(tmp_path / "cut")["loader"], cut.streams)
    resumed = train(ResumableLoader(KINDS["persistent, workers"]()), resume=again)

    assert resumed.rows == whole_run("persistent, workers").rows_from((1, 2))


@pytest.mark.parametrize(("kind", "make"), PAIRS, ids=[kind for kind, _ in PAIRS])
def test_batches_that_were_fetched_and_not_trained_are_fetched_again(kind: str, make: Callable[[], Any]) -> None:
    """The position is what was trained: with `num_ahead` batches in hand, a state leads back to the first of them."""
    seed(1)
    stock = train(make(), num_ahead=1)
    seed(1)
    cut_at = None if "workers" not in kind else WORKER_CUTS

    whole = train(ResumableLoader(make()), num_ahead=1, cut_at=cut_at)

    assert whole.rows == stock.rows
    for place, cut in whole.cuts.items():
        seed(999)
        resumed = train(ResumableLoader(make()), num_ahead=1, resume=cut)
        assert (place, resumed.rows) == (place, whole.rows_from(place))


@pytest.mark.parametrize("kind", ["shuffle", "own generator", "stream"])
def test_fetching_ahead_may_begin_in_the_middle_of_a_pass(kind: str) -> None:
    """A pass of which only the count was kept is looked at again from there on."""
    seed(1)
    stock = train(KINDS[kind](), num_ahead=1, ahead_from=3)
    seed(1)

    whole = train(ResumableLoader(KINDS[kind]()), num_ahead=1, ahead_from=3, cut_at=[(0, 4), (0, 5), (1, 4)])

    assert whole.rows == stock.rows
    for place, cut in whole.cuts.items():
        seed(999)
        resumed = train(ResumableLoader(KINDS[kind]()), num_ahead=1, ahead_from=3, resume=cut)
        assert (place, resumed.rows) == (place, whole.rows_from(place))


@pytest.mark.parametrize("kind", ["shuffle", "own generator", "stream", "iterable", "persistent, workers"])
def test_the_next_epoch_follows_the_last_one(kind: str) -> None:
    """Saved when training has ended, even in mid-epoch, and trained on: the next epoch is that of a longer run."""
    seed(1)
    whole = train(ResumableLoader(KINDS[kind]()), limits=(4, 3, 6))
    seed(1)
    first = ResumableLoader(KINDS[kind]())
    train(first, limits=(4, 3))
    first.finish_pass()
    state, streams = first.state_dict(), RNGState.capture()

    seed(999)
    second = ResumableLoader(KINDS[kind]())
    second.load_state_dict({**state, "is_iterating": False})
    streams.restore()
    rest = train(second, limits=(6,))

    assert [row[2:] for row in rest.rows] == [row[2:] for row in whole.rows_from((2, 0))]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "workers" in kind and "torchdata" not in kind])
def test_worker_processes_end_with_the_last_reference_to_their_loader(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not left to the garbage collector, under which torch waits for five seconds for each of them."""
    whole = whole_run(kind)
    made: list[weakref.ref[Any]] = []
    start = _MultiProcessingDataLoaderIter.__init__

    def note(self: Any, loader: Any) -> None:
        made.append(weakref.ref(self))
        start(self, loader)

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__init__", note)
    gc.disable()
    try:
        for cut in whole.cuts.values():
            train(ResumableLoader(KINDS[kind]()), resume=cut, limits=(None, None, 4))
        num_alive = sum(iterator() is not None for iterator in made)
    finally:
        gc.enable()

    assert len(made) >= len(whole.cuts)
    assert num_alive == 0
