"""What the callback costs while no save is due: the time of a training step with it and without it, side by side.

    python -m benchmarks.idle                     about five minutes
    python -m benchmarks.idle --quick             about a minute, noisier
    python -m benchmarks.idle --num-workers 2     batches come from worker processes, which stamp them

Two processes train the same model in lock step on the same core: ten steps without the callback, ten with it, ten
without, and so on, so that whatever else the machine does meets both alike. Each turn gives a ratio of two medians; a
pair of processes gives the median of its turns' ratios. Where things lie in memory alone makes a step faster or slower
by half a percent: both processes of a pair are forked from one that lays it out for them, and each pair in turn from a
new one. `ratio` is the median over all pairs; `min` and `max` are those of single pairs. `control` is the same
measurement with two processes that both lack the callback: what is seen where there is nothing to see. `empty` is the
same with an empty `Callback()` in its place: what Lightning itself takes to ask one more callback; `model_checkpoint`
with Lightning's own `ModelCheckpoint`, which has nothing to save before the epoch ends. These are forked from the same
processes.

A step is timed from one batch's start to the next one's. Prints JSON. Exit status 1 if `ratio` is above 1.01.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.new_process import in_new_process
from lightning_resume import AtomicResumeCallback

LIMIT = 1.01
TURN = 10  # steps
NUM_WARM_UP_TURNS = 3
WIDTH, BATCH_SIZE = 256, 64
OTHERS = ("empty", "model_checkpoint")


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


class Clock(Callback):
    """Times each step, and takes turns with the other process."""

    def __init__(self, other: Connection | None, starts: bool) -> None:
        self.other, self.waits = other, not starts
        self.turns: list[list[float]] = [[]]
        self.begun = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Ends a step; after the last of a turn lets the other process have its turn."""
        now = time.perf_counter()
        if batch_idx > 0:
            self.turns[-1].append(now - self.begun)
        if self.other is not None and (batch_idx == 0 or len(self.turns[-1]) == TURN):
            self.take_turns()
        self.begun = time.perf_counter()

    def take_turns(self) -> None:
        """Waits for the other's turn; the process that starts does not wait the first time."""
        if self.turns[-1]:
            self.turns.append([])
            self.other.send_bytes(b"your turn")  # type: ignore[union-attr]
            self.waits = True
        if self.waits:
            self.other.recv_bytes()  # type: ignore[union-attr]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The other process may still have a turn."""
        if self.other is not None:
            self.other.send_bytes(b"your turn")


def train(clock: Clock, num_layers: int, num_steps: int, num_workers: int, folder: str | None, kind: str) -> None:
    """Trains once.

    Args:
        clock: times the steps.
        num_layers: of the model.
        num_steps: to train.
        num_workers: of the loader.
        folder: of the checkpoints that are not written.
        kind: "ours", "model_checkpoint", "empty" or "control".
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    num_items = BATCH_SIZE * num_steps
    data = TensorDataset(torch.randn(num_items, WIDTH), torch.randn(num_items, 1))
    callbacks: list[Callback] = [clock]
    if kind == "empty":
        callbacks.append(Callback())
    if kind == "model_checkpoint":
        callbacks.append(ModelCheckpoint(folder, every_n_epochs=10**9))
    if kind == "ours":
        # Both cadences are asked at every step; neither comes due.
        plugin = AtomicResumeCallback(
            folder,
            every_n_train_steps=10**9,
            train_time_interval=timedelta(days=1),
            save_on_train_start=False,
            save_on_train_end=False,
        )
        callbacks.append(plugin)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=kind in ("ours", "model_checkpoint"),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(num_layers), DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=num_workers))


def layers_for(step_seconds: float) -> int:
    """Returns how many layers make a step of about this length here."""
    prepare(is_pinned=True)
    num_layers = 8
    for _ in range(3):  # a step has a part that does not grow with the layers: come closer by and by
        clocks = [Clock(None, starts=True) for _ in range(3)]
        for clock in clocks:
            train(clock, num_layers, 40, 0, None, "control")
        num_layers = max(1, round(num_layers * step_seconds / min(statistics.median(c.turns[0]) for c in clocks)))
    return num_layers


def prepare(is_pinned: bool) -> None:
    """Makes a new process ready to measure in.

    Args:
        is_pinned: it and its children stay on one core.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if is_pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def child(connection: Connection, other: Connection, starts: bool, kind: str, *sizes: int) -> None:
    """One process of a pair: trains, and sends its turns."""
    clock = Clock(other, starts)
    with tempfile.TemporaryDirectory() as folder:
        train(clock, *sizes, folder, kind)
    connection.send([turn for turn in clock.turns if len(turn) == TURN])


def measure_pair(kind: str, first_starts: bool, *sizes: int) -> tuple[float, list[float]]:
    """Trains without the callback and, in lock step, with it (or with an empty one; or without it too: the control).

    Returns:
        The median of the turns' ratios, and the median seconds of a step on either side.
    """
    context = multiprocessing.get_context("fork")
    left, right = context.Pipe()
    sides = []
    for other, starts, what in ((left, first_starts, "control"), (right, not first_starts, kind)):
        mine, theirs = context.Pipe()
        arguments = (theirs, other, starts, what, *sizes)
        process = context.Process(target=child, args=arguments)
        process.start()
        theirs.close()  # so that its death is seen
        sides.append((process, mine))
    try:
        before, after = ([statistics.median(turn) for turn in mine.recv()[NUM_WARM_UP_TURNS:]] for _, mine in sides)
    except EOFError:
        for process, _ in sides:
            process.terminate()  # without the other one it would wait for its turn for ever
        raise
    for process, _ in sides:
        process.join()
    ratios = [new / old for old, new in zip(before, after, strict=False)]
    return statistics.median(ratios), [statistics.median(before), statistics.median(after)]


def measure_layout(first_starts: bool, *sizes: int) -> dict[str, tuple[float, list[float]]]:
    """Measures a pair of each kind in one process's memory layout."""
    prepare(is_pinned=sizes[-1] == 0)
    return {kind: measure_pair(kind, first_starts, *sizes) for kind in ("ours", *OTHERS, "control")}


def run(num_pairs: int, num_turns: int, num_workers: int, step_seconds: float) -> dict[str, Any]:
    """Measures all pairs and returns the figures."""
    num_layers = in_new_process(layers_for, step_seconds)
    sizes = (num_layers, TURN * (num_turns + NUM_WARM_UP_TURNS) + 1, num_workers)
    layouts = []
    for number in range(num_pairs):
        layouts.append(in_new_process(measure_layout, number % 2 == 0, *sizes, is_layout_new=True))
        print(f"layout {number + 1} of {num_pairs}: {layouts[-1]['ours'][0]:.4f}", file=sys.stderr, flush=True)
    kinds = {kind: [layout[kind] for layout in layouts] for kind in layouts[0]}
    ratios = {kind: [ratio for ratio, _ in results] for kind, results in kinds.items()}
    pairs = kinds["ours"]
    return {
        "ratio": round(statistics.median(ratios["ours"]), 4),
        "min": round(min(ratios["ours"]), 4),
        "max": round(max(ratios["ours"]), 4),
        **{kind: round(statistics.median(ratios[kind]), 4) for kind in (*OTHERS, "control")},
        **{f"{kind}_min": round(min(ratios[kind]), 4) for kind in (*OTHERS, "control")},
        **{f"{kind}_max": round(max(ratios[kind]), 4) for kind in (*OTHERS, "control")},
        "step_ms_without": round(1000 * statistics.median(before for _, (before, _) in pairs), 3),
        "step_ms_with": round(1000 * statistics.median(after for _, (_, after) in pairs), 3),
        "num_pairs": num_pairs,
        "num_steps": num_turns * TURN,
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
    num_pairs, num_turns = (3, 20) if options.quick else (12, 40)
    report = run(num_pairs, num_turns, options.num_workers, options.step_ms / 1000)
    print(json.dumps(report, indent=2))
    return 0 if report["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
