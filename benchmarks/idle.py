"""What the callback costs while no save is due: the time of a training step with it and without it, side by side.

    python -m benchmarks.idle                     two minutes
    python -m benchmarks.idle --quick             half a minute, noisier
    python -m benchmarks.idle --num-workers 2     batches come from worker processes, which stamp them

One process trains the same model again and again: without the callback, with it, with it, without it, … Both runs of a
pair are close in time, so what else the machine does meets both. A run's figure is the median time from one batch's
start to the next one's, first steps left out. `ratio` compares the fastest run with the callback to the fastest one
without it; `median_of_pairs` is the median of the pairs' ratios, with the quartiles beside it. Where other jobs use the
processor, the quartiles are wide and the first of the two is the better figure.

`processor_ratio` is like `ratio`, of the processor time of the training thread, which other jobs disturb less.

`without_vs_without` is the same `ratio` for the runs without the callback, every second one of them taken for the
other side: what is measured where there is nothing to measure.

Prints JSON. Exit status 1 if `ratio` is above 1.02.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from typing import Any, NamedTuple

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_resume import AtomicResumeCallback

LIMIT = 1.02
NUM_WARM_UP_STEPS = 10
WIDTH, BATCH_SIZE = 256, 64


class Net(LightningModule):
    """As many square layers as make a step of the wanted length."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Regression of nothing in particular."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD: cheap, so that the step is the matrix products."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Times(NamedTuple):
    """Median seconds of a step: on the clock, and on the processor."""

    wall: float
    processor: float


class Clock(Callback):
    """Notes when each batch starts."""

    def __init__(self) -> None:
        self.times: list[Times] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notes the time."""
        self.times.append(Times(time.perf_counter(), time.thread_time()))

    def step_times(self) -> Times:
        """The medians."""
        pairs = list(itertools.pairwise(self.times[NUM_WARM_UP_STEPS:]))
        return Times(
            statistics.median(after.wall - before.wall for before, after in pairs),
            statistics.median(after.processor - before.processor for before, after in pairs),
        )


def measure(num_layers: int, num_steps: int, num_workers: int, folder: str | None) -> Times:
    """Trains once and returns the times of a step; with the callback where a folder is given."""
    torch.manual_seed(0)
    num_items = BATCH_SIZE * (num_steps + NUM_WARM_UP_STEPS)
    data = TensorDataset(torch.randn(num_items, WIDTH), torch.randn(num_items, 1))
    clock = Clock()
    callbacks: list[Callback] = [clock]
    if folder is not None:
        # Both cadences are asked at every step; neither comes due.
        cadence = {"every_n_train_steps": 10**9, "train_time_interval": timedelta(days=1)}
        callbacks.append(
            AtomicResumeCallback(folder, **cadence, save_on_train_start=False, save_on_train_end=False)  # type: ignore[arg-type]
        )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(num_layers), DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=num_workers))
    return clock.step_times()


def layers_for(step_seconds: float, num_workers: int) -> int:
    """Returns how many layers make a step of about this length here."""
    num_layers = 8
    for _ in range(3):  # a step has a part that does not grow with the layers: come closer by and by
        seconds = min(measure(num_layers, 40, num_workers, None).wall for _ in range(3))
        num_layers = max(1, round(num_layers * step_seconds / seconds))
    return num_layers


def fastest(figures: list[Times]) -> Times:
    """Returns the smallest of each kind."""
    return Times(min(times.wall for times in figures), min(times.processor for times in figures))


def run(num_pairs: int, num_steps: int, num_workers: int, step_seconds: float) -> dict[str, Any]:
    """Measures pairs of runs and returns the figures."""
    num_layers = layers_for(step_seconds, num_workers)
    without: list[Times] = []
    with_callback: list[Times] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_pairs):
            for is_with in (False, True) if number % 2 == 0 else (True, False):
                figures = with_callback if is_with else without
                figures.append(measure(num_layers, num_steps, num_workers, folder if is_with else None))
    ratios = [after.wall / before.wall for before, after in zip(without, with_callback, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(fastest(with_callback).wall / fastest(without).wall, 4),
        "processor_ratio": round(fastest(with_callback).processor / fastest(without).processor, 4),
        "median_of_pairs": round(median, 4),
        "quartiles_of_pairs": [round(lower, 4), round(upper, 4)],
        "without_vs_without": round(fastest(without[::2]).wall / fastest(without[1::2]).wall, 4),
        "step_ms_without": round(1000 * fastest(without).wall, 3),
        "step_ms_with": round(1000 * fastest(with_callback).wall, 3),
        "num_pairs": num_pairs,
        "num_steps": num_steps,
        "num_workers": num_workers,
        "num_layers": num_layers,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        },
    }


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--num-workers", type=int, default=0, help="worker processes of the loader (default: 0)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="length of a step without the callback (default: 5)")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    num_pairs, num_steps = (10, 100) if options.quick else (40, 150)
    report = run(num_pairs, num_steps, options.num_workers, options.step_ms / 1000)
    print(json.dumps(report, indent=2))
    return 0 if report["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
