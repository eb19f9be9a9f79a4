"""`RNGState`: all streams at one moment, kept and put back whole or not at all."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy import stream_digests

from lightning_resume import RNGState, read_checkpoint, write_checkpoint
from lightning_resume.errors import MissingStateError, StateMismatchError


def test_the_streams_of_every_cuda_device_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA is initialised, each device's stream is in the state and survives a checkpoint (RNG-07).

    The devices are faked, since the tests run without one: what is shown is that both states are asked for and kept.
    """
    states = [torch.arange(16, dtype=torch.uint8), torch.arange(16, 32, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)

    captured = RNGState.capture()
    again = RNGState.from_state_dict(captured.state_dict())

    assert [state.tolist() for state in again.cuda] == [state.tolist() for state in states]
    assert again == captured


def test_the_streams_of_every_cuda_device_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device gets its own state back (RNG-07, with faked devices)."""
    devices: list[torch.Tensor] = [torch.zeros(16, dtype=torch.uint8)] * 2
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(devices))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: devices.__setitem__(slice(None), states))
    saved = replace(RNGState.capture(), cuda=(torch.full((16,), 1), torch.full((16,), 2)))

    saved.restore()

    assert [device[0].item() for device in devices] == [1, 2]


def test_another_number_of_cuda_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of two devices is not restored on a machine with one; no stream is moved (RNG-07, faked)."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    state = torch.zeros(16, dtype=torch.uint8)
    saved = replace(RNGState.capture(), cuda=(state, state))
    random.random(), np.random.rand(), torch.rand(())
    before = stream_digests()

    with pytest.raises(StateMismatchError) as caught:
        saved.restore()

    assert (caught.value.field, caught.value.saved, caught.value.current) == ("CUDA devices", 2, 1)
    assert stream_digests() == before


@pytest.mark.parametrize("name", ["python", "numpy", "torch", "cuda"])
def test_a_state_that_lacks_a_stream_is_no_state(name: str) -> None:
    """`RNGState.from_state_dict` names what is missing and touches no stream (RNG-11)."""
    state = RNGState.capture().state_dict()
    del state[name]
    before = stream_digests()

    with pytest.raises(MissingStateError, match=f"random stream '{name}'") as caught:
        RNGState.from_state_dict(state)

    assert caught.value.field == f"random stream {name!r}"
    assert stream_digests() == before


def sequences() -> list[Any]:
    """Numbers of every kind from the global streams; the gaussian ones keep one number back."""
    return [
        [random.random() for _ in range(10)],
        [random.gauss(0, 1) for _ in range(3)],
        random.getrandbits(200),
        np.random.rand(10).tolist(),
        np.random.randn(3).tolist(),
        torch.randn(10).tolist(),
        torch.randperm(10).tolist(),
    ]


def test_the_streams_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    """Python's state is a tuple again, with its pending gaussian, and all sequences go on (RNG-13)."""
    random.gauss(0, 1)
    np.random.randn()
    saved = RNGState.capture()
    python_state = random.getstate()

    write_checkpoint(tmp_path / "checkpoint", {"rng": saved.state_dict()})
    expected = sequences()
    RNGState.from_state_dict(read_checkpoint(tmp_path / "checkpoint")["rng"]).restore()

    assert random.getstate() == python_state
    assert type(random.getstate()[1]) is tuple
    assert sequences() == expected
