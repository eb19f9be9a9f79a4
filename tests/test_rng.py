"""`RNGState`: python's, numpy's, torch's and every CUDA device's stream, captured and restored as one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_resume import (
    MissingStateError,
    RNGState,
    StateMismatchError,
    read_checkpoint,
    write_checkpoint,
)

BIT_GENERATORS = [np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64, np.random.MT19937]


@pytest.fixture(autouse=True)
def streams_of_their_own() -> Iterator[None]:
    """Each test starts from the same seeds, and leaves no other bit generator behind."""
    before = np.random.get_bit_generator()
    seed(1)
    yield
    np.random.set_bit_generator(before)


def seed(number: int) -> None:
    """Seeds all streams."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw() -> list[float]:
    """A few numbers of each stream. The odd number of gaussians leaves one pending in python and numpy."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(100),
        np.random.rand(),
        np.random.randn(),
        int(np.random.randint(1000)),
        float(torch.rand(())),
        float(torch.randn(())),
        *torch.randperm(5).tolist(),
    ]


def through_plain(state: RNGState, tmp_path: Path) -> RNGState:
    """The state after a trip through plain containers."""
    return RNGState.from_state_dict(state.state_dict())


def through_disk(state: RNGState, tmp_path: Path) -> RNGState:
    """The state after a trip through a checkpoint."""
    write_checkpoint(tmp_path / "streams", {"rng": state.state_dict()})
    return RNGState.from_state_dict(read_checkpoint(tmp_path / "streams")["rng"])


WAYS = [lambda state, tmp_path: state, through_plain, through_disk]
ways = pytest.mark.parametrize("way", WAYS, ids=["kept", "plain", "disk"])


@ways
def test_restored_streams_draw_what_they_drew_before(way: Callable[..., RNGState], tmp_path: Path) -> None:
    """RNG-01, RNG-13: after a restore every stream goes on as it went on after the capture, wherever it was kept."""
    state = RNGState.capture()
    expected = draw()
    seed(999)

    way(state, tmp_path).restore()

    assert draw() == expected


@ways
def test_a_pending_gaussian_is_part_of_the_state(way: Callable[..., RNGState], tmp_path: Path) -> None:
    """Python and numpy make gaussians in pairs; the second one of a pair is kept for the next call, and so by us."""
    draw()
    assert random.getstate()[2] is not None
    assert np.random.get_state(legacy=False)["has_gauss"] == 1  # type: ignore[call-overload]
    state = RNGState.capture()
    expected = [random.gauss(0, 1), np.random.randn(), *draw()]
    seed(999)

    way(state, tmp_path).restore()

    assert [random.gauss(0, 1), np.random.randn(), *draw()] == expected


@ways
@pytest.mark.parametrize("bit_generator", BIT_GENERATORS, ids=lambda cls: cls.__name__)
def test_numpys_other_bit_generators_are_restored(
    bit_generator: Any, way: Callable[..., RNGState], tmp_path: Path
) -> None:
    """A program may put another bit generator under numpy's global functions; its words and big integers survive."""
    np.random.set_bit_generator(bit_generator(7))
    np.random.randint(10, dtype=np.uint32)
    state = RNGState.capture()
    expected = np.random.randint(0, 2**32, size=9, dtype=np.uint32).tolist() + draw()
    np.random.set_bit_generator(bit_generator(8))

    way(state, tmp_path).restore()

    assert np.random.randint(0, 2**32, size=9, dtype=np.uint32).tolist() + draw() == expected


def test_a_plain_state_keeps_the_types_that_the_libraries_demand() -> None:
    """RNG-13: python's state comes back as nested tuples of ints, as `random.setstate` insists."""
    draw()
    state = RNGState.capture()

    again = RNGState.from_state_dict(state.state_dict())

    assert again.python == random.getstate()
    assert [type(part) for part in again.python] == [int, tuple, float]
    assert again == state


def test_the_state_dict_holds_plain_containers_and_tensors_only() -> None:
    """What goes into a checkpoint needs no pickle: nothing but dicts, lists, tensors, numbers, strings and None."""
    np.random.set_bit_generator(np.random.SFC64(3))

    pending = [RNGState.capture().state_dict()]

    leaves = []
    while pending:
        value = pending.pop()
        if type(value) is dict:
            pending.extend(value.values())
        elif type(value) is list:
            pending.extend(value)
        else:
            leaves.append(type(value))
    assert set(leaves) <= {torch.Tensor, int, float, str, type(None)}
    assert torch.Tensor in leaves


def test_capturing_draws_nothing() -> None:
    """Law 3: a program that captures in between draws what it draws without."""
    expected = [draw(), draw()]
    seed(1)

    first = draw()
    RNGState.capture().state_dict()

    assert [first, draw()] == expected


def test_a_captured_state_does_not_move_with_the_streams() -> None:
    """What was captured is a copy: numbers drawn later do not change it."""
    state = RNGState.capture()
    plain = state.state_dict()

    draw()

    assert state == RNGState.from_state_dict(plain)
    assert state != RNGState.capture()


@pytest.mark.parametrize("stream", ["python", "numpy", "torch", "cuda"])
def test_a_missing_stream_is_refused_by_name(stream: str) -> None:
    """RNG-11: a state without one of the streams is refused, and the error says which; no stream is touched."""
    plain = RNGState.capture().state_dict()
    del plain[stream]
    draw()
    before = RNGState.capture()

    with pytest.raises(MissingStateError, match=f"random stream '{stream}'") as caught:
        RNGState.from_state_dict(plain)

    assert caught.value.field == f"random stream '{stream}'"
    assert RNGState.capture() == before


def _without_python(state: RNGState) -> RNGState:
    return RNGState((3, (1, 2, 3), None), state.numpy, state.torch, state.cuda)


def _with_other_numpy(state: RNGState) -> RNGState:
    other = np.random.Philox(1)
    return RNGState(state.python, {**other.state, "has_gauss": 0, "gauss": 0.0}, state.torch, state.cuda)


def _with_short_torch(state: RNGState) -> RNGState:
    return RNGState(state.python, state.numpy, state.torch[:100], state.cuda)


@pytest.mark.parametrize("spoil", [_without_python, _with_other_numpy, _with_short_torch])
def test_nothing_is_restored_halfway(spoil: Callable[[RNGState], RNGState]) -> None:
    """A state that does not fit one stream, first or last, leaves all of them where they stood."""
    spoiled = spoil(RNGState.capture())
    draw()
    before = RNGState.capture()

    with pytest.raises(StateMismatchError, match="random streams differ\n"):
        spoiled.restore()

    assert RNGState.capture() == before


class FakeCUDA:
    """What torch.cuda answers on a machine with some devices; `states` are their streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_devices: int, *, is_initialized: bool = True) -> None:
        self.states = [torch.full((16,), index, dtype=torch.uint8) for index in range(num_devices)]
        self.num_sets = 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone() for state in self.states])
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", self._set)

    def _set(self, states: list[torch.Tensor]) -> None:
        self.states = [state.clone() for state in states]
        self.num_sets += 1


@ways
def test_every_cuda_device_has_its_stream_restored(
    way: Callable[..., RNGState], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """RNG-07, as far as it can be told without a device: the functions that read and set its streams are faked."""
    cuda = FakeCUDA(monkeypatch, 3)
    state = RNGState.capture()
    cuda.states = [torch.full((16,), 99, dtype=torch.uint8)] * 3

    way(state, tmp_path).restore()

    assert [int(stream[0]) for stream in cuda.states] == [0, 1, 2]


def test_cuda_is_not_initialised_by_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has not used CUDA has no CUDA stream to keep, and a capture does not start CUDA for it."""
    FakeCUDA(monkeypatch, 2, is_initialized=False)

    state = RNGState.capture()

    assert state.cuda == ()


def test_a_state_without_cuda_leaves_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a CPU run restores the CPU's streams and none of a device."""
    state = RNGState.capture()
    cuda = FakeCUDA(monkeypatch, 2)

    state.restore()

    assert cuda.num_sets == 0


@pytest.mark.parametrize("num_devices", [0, 1, 3])
def test_another_number_of_cuda_devices_is_refused(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of two devices fit two devices: with fewer or more nothing is restored, and both numbers are told."""
    FakeCUDA(monkeypatch, 2)
    state = RNGState.capture()
    cuda = FakeCUDA(monkeypatch, num_devices)
    draw()
    before = RNGState.capture()

    with pytest.raises(StateMismatchError, match="CUDA devices differ\n") as caught:
        state.restore()

    assert (caught.value.saved, caught.value.current) == (2, num_devices)
    assert RNGState.capture() == before
    assert cuda.num_sets == 0


def test_a_failing_cuda_device_leaves_the_other_streams_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is set last; when it refuses, the streams that were set before it are put back."""
    cuda = FakeCUDA(monkeypatch, 1)
    state = RNGState.capture()
    draw()
    before = RNGState.capture()
    fake_set = torch.cuda.set_rng_state_all

    def refuse_once(states: list[torch.Tensor]) -> None:
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", fake_set)
        raise RuntimeError("RNG state is wrong size")

    monkeypatch.setattr(torch.cuda, "set_rng_state_all", refuse_once)

    with pytest.raises(StateMismatchError, match="RNG state is wrong size"):
        state.restore()

    assert RNGState.capture() == before
    assert cuda.num_sets == 1


def test_states_are_equal_by_value() -> None:
    """Two captures with nothing drawn between them are equal; a state is equal to nothing else and cannot be a key."""
    first, second = RNGState.capture(), RNGState.capture()

    assert first == second
    assert first != "a state"
    with pytest.raises(TypeError, match="unhashable"):
        hash(first)
