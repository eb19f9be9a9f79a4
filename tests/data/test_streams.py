"""`Streams` and `DrawLog`: drawing again what was drawn, while others draw from the same streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from training import Items, seed

from lightning_resume import ResumableLoader, RNGState, StateMismatchError
from lightning_resume.data.streams import DrawLog, Streams, pack, unpack


@pytest.fixture(autouse=True)
def bit_generator_of_before() -> Iterator[None]:
    """No other bit generator is left behind."""
    before = np.random.get_bit_generator()
    seed(1)
    yield
    np.random.set_bit_generator(before)


def draw() -> tuple[float, float, float]:
    """One number of each stream."""
    return random.random(), np.random.rand(), float(torch.rand(()))


def mixed() -> Callable[[], float]:
    """A source that draws from one stream, then another, and sometimes from none."""
    turns = iter([random.random, np.random.rand, lambda: 0.5, lambda: float(torch.rand(())), random.random, draw])
    return lambda: next(turns)()  # type: ignore[no-any-return, operator]


@pytest.mark.parametrize("bit_generator", [None, np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_captured_streams_survive_packing(bit_generator: Any) -> None:
    """Whatever numpy's global functions draw from: packed, unpacked and restored, all streams draw the same."""
    if bit_generator is not None:
        np.random.set_bit_generator(bit_generator(3))
    streams = Streams({"own": torch.Generator().manual_seed(2)})
    states = streams.capture()
    expected = [draw(), float(torch.rand((), generator=streams.generators["own"]))]

    seed(999)
    streams.restore(unpack(pack(states)))

    assert unpack(pack(states)) == states
    assert [draw(), float(torch.rand((), generator=streams.generators["own"]))] == expected


def test_a_loader_works_with_another_bit_generator_of_numpy() -> None:
    """A program that has put PCG64 under `numpy.random` can be resumed too."""
    np.random.set_bit_generator(np.random.PCG64(3))
    loader = ResumableLoader(DataLoader(Items(8), 2, shuffle=True))
    iterator = iter(loader)
    next(iterator)
    state, streams = loader.state_dict(), RNGState.capture()
    rest = [[part.tolist() for part in batch] for batch in iterator]

    np.random.seed(5)
    resumed = ResumableLoader(DataLoader(Items(8), 2, shuffle=True))
    resumed.load_state_dict(state)
    again = iter(resumed)
    streams.restore()

    assert [[part.tolist() for part in batch] for batch in again] == rest


def test_isolation_leaves_every_stream_as_it_was() -> None:
    """Also where what is inside fails."""
    before = RNGState.capture()

    with pytest.raises(RuntimeError, match="inside"), Streams().isolated():
        draw()
        raise RuntimeError("inside")

    assert RNGState.capture() == before


def test_a_generator_that_is_not_there_cannot_be_restored() -> None:
    """The error names the generator of the save, and those that there are."""
    streams = Streams({"here": torch.Generator()})

    with pytest.raises(StateMismatchError, match="random generators that the data holds") as caught:
        streams.restore({"gone": b""})

    assert (caught.value.saved, caught.value.current) == ("gone", ["here"])


@pytest.mark.parametrize("num_made", range(7))
def test_recorded_draws_are_made_again(num_made: int) -> None:
    """With others drawing in between, each draw of a source meets the streams as it met them the first time."""
    log, source, expected = DrawLog(Streams()), mixed(), []
    for _ in range(6):
        expected.append(log.draw(source))
        draw()
    state = log.state_dict()

    seed(999)
    again, source = DrawLog(Streams()), mixed()
    again.load_state_dict(state)
    again.replay(num_made, source)
    before = RNGState.capture()
    rest = [again.draw(source) for _ in range(6 - num_made)]

    assert rest == expected[num_made:]
    assert RNGState.capture() == before


def test_draws_beyond_the_record_are_live() -> None:
    """Once what was recorded has been made again, the source draws from the streams as they stand."""
    log = DrawLog(Streams())
    log.draw(random.random)
    state = log.state_dict()
    again = DrawLog(Streams())
    again.load_state_dict(state)

    seed(5)
    first, second = again.draw(random.random), again.draw(random.random)

    random.seed(5)
    assert second == random.random()
    random.seed(1)
    assert first == random.random()


def test_a_record_that_is_not_reproduced_is_refused() -> None:
    """A source that draws more, or from elsewhere, than it did arrives at another state: the error names the stream."""
    log = DrawLog(Streams())
    log.draw(random.random)
    again = DrawLog(Streams())
    again.load_state_dict(log.state_dict())

    with pytest.raises(StateMismatchError, match="the random stream 'python'"):
        again.replay(1, lambda: [random.random(), random.random()])


def test_a_failing_source_is_recorded_up_to_its_failure() -> None:
    """A draw that raises (a sampler's end) has drawn what it has drawn; the log stays usable."""
    log = DrawLog(Streams())

    def end() -> float:
        random.random()
        raise StopIteration

    with pytest.raises(StopIteration):
        log.draw(end)

    assert log.num_draws == 1
    assert [index for index, _ in log.state_dict()["entries"]] == [0]
