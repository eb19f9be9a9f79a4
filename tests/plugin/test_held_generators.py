"""Random generators that the user holds, in no global stream, go on where they stopped (RNG-14)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from toy import Job, Toy, ToyItems, assert_same, run, step_dir

from lightning_resume import read_checkpoint


class JitteredItems(ToyItems):
    """Items with noise from a generator that the data set holds."""

    def __init__(self, num_items: int, generator: Any, draw: Callable[[Any], float]) -> None:
        super().__init__(num_items)
        self.rng, self.draw = generator, draw

    def __getitem__(self, index: int) -> torch.Tensor:
        # Less than 1, so that the records still show the item.
        return super().__getitem__(index) + self.draw(self.rng)


HELD: dict[str, Callable[[int], JitteredItems]] = {
    "numpy_default": lambda n: JitteredItems(n, np.random.default_rng(0), lambda rng: float(rng.random()) / 2),
    "numpy_philox": lambda n: JitteredItems(
        n, np.random.Generator(np.random.Philox(0)), lambda rng: float(rng.random()) / 2
    ),
    "numpy_legacy": lambda n: JitteredItems(n, np.random.RandomState(0), lambda rng: float(rng.rand()) / 2),
    "python": lambda n: JitteredItems(n, random.Random(0), lambda rng: rng.random() / 2),
    "torch": lambda n: JitteredItems(
        n, torch.Generator().manual_seed(0), lambda rng: float(torch.rand((), generator=rng)) / 2
    ),
}


@pytest.mark.parametrize("num_batches", [3, 8])
@pytest.mark.parametrize("kind", HELD)
def test_a_generator_that_the_data_set_holds_goes_on(tmp_path: Path, kind: str, num_batches: int) -> None:
    """Streams of the user's own, in no global state, are saved and put back, integers of any size too (RNG-14)."""
    job = Job(dataset=HELD[kind])
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=num_batches)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=num_batches)


def test_a_generator_that_the_validation_set_holds_goes_on(tmp_path: Path) -> None:
    """Validation that draws from its data set's own stream is that of the uninterrupted run (RNG-14)."""
    job = Job(num_val_items=8, val_dataset=HELD["python"], trainer={"val_check_interval": 4})
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=5)

    resumed = run(job, tmp_path / "work", resume=True)

    assert len({tuple(row["losses"]) for row in resumed.of("val")}) == 3
    assert_same(baseline, resumed, start=5)


class NoisyToy(Toy):
    """Scales its loss by numbers from a generator that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch) * self.rng.random()


class NoisyWeights(Callback):
    """Shakes the weights with numbers from a generator that it holds."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.rng = name, random.Random(seed)

    @property
    def state_key(self) -> str:
        return f"NoisyWeights-{self.name}"

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for parameter in pl_module.parameters():
            parameter += self.rng.random() / 10


@pytest.mark.parametrize(
    "job",
    [
        Job(module=NoisyToy),
        Job(callbacks=lambda: [NoisyWeights("a", 0)]),
        Job(callbacks=lambda: [NoisyWeights("a", 0), NoisyWeights("b", 1)]),
    ],
    ids=["module", "callback", "two_callbacks_of_one_class"],
)
def test_a_generator_that_the_module_or_a_callback_holds_goes_on(tmp_path: Path, job: Job) -> None:
    """Each is found and put back for itself (RNG-14)."""
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=3)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=3)


NOISE = np.random.default_rng(0)
"""A generator that nothing the Trainer knows holds: the data set reaches it as a global of this module."""


class GlobalNoise(ToyItems):
    """Items with noise from `NOISE`."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + float(NOISE.random()) / 2


class KeepNoise(Callback):
    """The hook for such a generator: a callback's state may hold `bit_generator.state` as it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"noise": NOISE.bit_generator.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        NOISE.bit_generator.state = state_dict["noise"]


@pytest.mark.parametrize("num_batches", [3, 8])
def test_a_generator_out_of_reach_can_be_saved_by_a_callback(tmp_path: Path, num_batches: int) -> None:
    """`state_dict` and `load_state_dict` of the user's callback carry it, 128-bit integers and all (RNG-14)."""
    job = Job(dataset=GlobalNoise, callbacks=lambda: [KeepNoise()])
    baseline = run(job, tmp_path / "base")
    killed = run(job, tmp_path / "work", kill_after=num_batches)

    resumed = run(job, tmp_path / "work", resume=True)

    saved = read_checkpoint(step_dir(killed.folder, num_batches), keys={"callbacks"})["callbacks"]
    assert saved["KeepNoise"]["noise"]["state"]["state"].bit_length() > 64
    assert_same(baseline, resumed, start=num_batches)
