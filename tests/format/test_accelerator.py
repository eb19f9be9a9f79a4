"""Copies from a GPU: what is asked of CUDA, in which order. The driver is a recorder; no GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resume.format import gather, prepared
from lightning_resume.format.checkpoint import read_checkpoint
from lightning_resume.format.image import Image
from lightning_resume.format.prepared import prepare_checkpoint

DEVICE = torch.device("cuda", 0)


class Driver:
    """Stands for `torch.cuda`, and notes what is asked of it."""

    def __init__(self, is_refusing: bool = False) -> None:
        self.calls: list[str] = []
        self.registered: dict[int, int] = {}
        self.is_refusing = is_refusing

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, "side")

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self, "training")

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.calls.append(f"enter {stream.name}")
        yield
        self.calls.append(f"leave {stream.name}")

    def cudart(self) -> Driver:
        return self

    def is_initialized(self) -> bool:
        return True

    def cudaHostRegister(self, place: int, num_bytes: int, flags: int) -> int:
        self.registered[place] = num_bytes
        return int(self.is_refusing)

    def cudaHostUnregister(self, place: int) -> None:
        del self.registered[place]


class Stream:
    """A stream of the driver's."""

    def __init__(self, driver: Driver, name: str) -> None:
        self.driver, self.name = driver, name

    def wait_stream(self, other: Stream) -> None:
        self.driver.calls.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.driver.calls.append(f"synchronize {self.name}")


@pytest.fixture
def driver(monkeypatch: Any) -> Driver:
    """A machine on which every tensor counts as a GPU's."""
    driver = Driver()
    real_copy = torch._foreach_copy_

    def copy(targets: Any, sources: Any, non_blocking: bool = False) -> None:
        driver.calls.append(f"copy {len(sources)}, non_blocking={non_blocking}")
        real_copy(targets, sources)

    monkeypatch.setattr(torch, "cuda", driver)
    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    monkeypatch.setattr(prepared, "cuda_devices", lambda parts: {DEVICE} if list(parts) else set())
    monkeypatch.setattr(gather, "is_in_place", lambda part: False)
    monkeypatch.setattr(gather, "bytes_of", gather.bytes_in_place)
    return driver


def state() -> dict[str, Any]:
    """Two tensors."""
    return {"state_dict": {"a": torch.arange(2000.0), "b": torch.ones(3, dtype=torch.bool)}}


def test_copies_run_beside_the_training_and_are_done_when_it_goes_on(driver: Driver, tmp_path: Path) -> None:
    """They wait for what training has queued, go to pinned memory, and one synchronize ends them."""
    image = Image()
    checkpoint = prepare_checkpoint(tmp_path / "c", state())

    checkpoint.copy_into(image)
    checkpoint.commit()

    assert driver.calls == [
        "side waits for training",
        "enter side",
        "copy 2, non_blocking=True",
        "leave side",
        "synchronize side",
    ]
    assert driver.registered == {image._bytes.data_ptr(): image.num_bytes}
    assert torch.equal(read_checkpoint(tmp_path / "c")["state_dict"]["a"], torch.arange(2000.0))


def test_without_an_image_the_training_is_waited_for(driver: Driver, tmp_path: Path) -> None:
    """The threads that write have streams of their own, which know nothing of it."""
    prepare_checkpoint(tmp_path / "c", state()).commit()

    assert driver.calls[0] == "synchronize training"
    assert all("non_blocking=False" in call for call in driver.calls[1:])
    assert torch.equal(read_checkpoint(tmp_path / "c")["state_dict"]["a"], torch.arange(2000.0))


def test_pinned_memory_is_given_back_when_it_grows_and_when_it_goes(driver: Driver, tmp_path: Path) -> None:
    """Memory that is pinned for ever would be lost to the machine."""
    image = Image()
    prepare_checkpoint(tmp_path / "1", state()).copy_into(image)
    prepare_checkpoint(tmp_path / "2", {"w": torch.ones(100_000)}).copy_into(image)

    assert driver.registered == {image._bytes.data_ptr(): image.num_bytes}
    del image
    assert driver.registered == {}


def test_a_driver_that_refuses_to_pin_is_no_obstacle(driver: Driver, tmp_path: Path) -> None:
    """The copies are slower, and right."""
    driver.is_refusing = True
    checkpoint = prepare_checkpoint(tmp_path / "c", state())

    checkpoint.copy_into(Image())
    checkpoint.commit()

    assert torch.equal(read_checkpoint(tmp_path / "c")["state_dict"]["a"], torch.arange(2000.0))
