"""A hand-written training loop that is killed and goes on exactly. No Lightning.

It needs four names: `write_checkpoint`, `read_checkpoint`, `RNGState` and `FastForwardSampler` (and `scan_checkpoints`
to find the newest checkpoint). Run it: ::

    python examples/plain_pytorch.py

It trains three times, each in a process of its own: once from start to end; once until it kills itself with SIGKILL in
mid-epoch; and once more, with another seed on purpose, from the checkpoint that the killed process left behind. Expect
the last two lines to be

    240 of 240 losses equal, largest difference 0.0
    EXACT: weights, optimizer, schedule and random streams are bit-equal
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_resume import FastForwardSampler, RNGState, read_checkpoint, scan_checkpoints, write_checkpoint

NUM_EPOCHS, NUM_ITEMS, BATCH_SIZE = 4, 960, 16  # 60 batches an epoch
SAVE_EVERY_N_STEPS = 25
KILL_AFTER_STEP = 138  # in the third epoch; 13 steps after a save


class NoisyWaves(Dataset[tuple[Tensor, Tensor]]):
    """Item i is a sine wave with noise from torch's and numpy's streams, so that no item is the same twice."""

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        wave = torch.sin(torch.arange(32) * (0.1 + index / NUM_ITEMS))
        return wave + 0.1 * torch.randn(32) * float(np.random.rand()), torch.tensor([index / NUM_ITEMS])


def train(folder: Path, *, seed: int, kill_after_step: int | None = None) -> None:
    """Trains from the newest good checkpoint in the folder, or from scratch where there is none."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS * NUM_ITEMS // BATCH_SIZE)
    dataset = NoisyWaves()
    # The sampler is wrapped, the loader is an ordinary one. (With worker processes that draw random numbers: wrap the
    # loader in ResumableLoader instead; it keeps their streams too.)
    sampler = FastForwardSampler(BatchSampler(RandomSampler(dataset), BATCH_SIZE, drop_last=True))
    loader = DataLoader(dataset, batch_sampler=sampler)

    first_epoch, batch_in_epoch, losses, streams = 0, 0, [], None
    good = [info for info in scan_checkpoints(folder) if info.status == "good"]
    if good:
        state = read_checkpoint(good[-1].path)  # every byte is checked before anything is returned
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer_states"][0])
        schedule.load_state_dict(state["schedule"])
        sampler.load_state_dict(state["sampler"])
        streams = RNGState.from_state_dict(state["rng"])
        first_epoch, batch_in_epoch, losses = state["epoch"], state["batch_in_epoch"], state["losses"]
        print(f"  resumed at epoch {first_epoch}, batch {batch_in_epoch}, step {len(losses)}", flush=True)

    for epoch in range(first_epoch, NUM_EPOCHS):
        batches = iter(loader)
        if streams is not None:
            streams.restore()  # after iter(), which draws a seed for worker processes, and before the first batch
            streams = None
        else:
            batch_in_epoch = 0
        for waves, targets in batches:
            loss = nn.functional.mse_loss(model(waves), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            batch_in_epoch += 1
            if len(losses) % SAVE_EVERY_N_STEPS == 0:
                save(folder, model, optimizer, schedule, sampler, epoch, batch_in_epoch, losses)
            if len(losses) == kill_after_step:
                os.kill(os.getpid(), signal.SIGKILL)
    save(folder, model, optimizer, schedule, sampler, NUM_EPOCHS - 1, batch_in_epoch, losses)


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    sampler: FastForwardSampler,
    epoch: int,
    batch_in_epoch: int,
    losses: list[float],
) -> None:
    """Saves between two batches: nothing of the last one is left to do, nothing of the next has begun."""
    step = len(losses)
    write_checkpoint(
        folder / f"step-{step:08d}",
        {
            "state_dict": model.state_dict(),
            "optimizer_states": [optimizer.state_dict()],
            "schedule": schedule.state_dict(),
            "sampler": sampler.state_dict(position=batch_in_epoch),
            "rng": RNGState.capture().state_dict(),
            "epoch": epoch,
            "batch_in_epoch": batch_in_epoch,
            "losses": losses,
        },
        counters={"global_step": step, "current_epoch": epoch, "batch_in_epoch": batch_in_epoch},
        overwrite=True,
    )


def run(folder: Path, seed: int, kill_after_step: int | None = None) -> int:
    """Trains in a process of its own and returns its exit status."""
    arguments = ["--train", str(folder), "--seed", str(seed)]
    if kill_after_step is not None:
        arguments += ["--kill-after-step", str(kill_after_step)]
    return subprocess.run([sys.executable, __file__, *arguments], check=False).returncode


def same(left: Any, right: Any) -> bool:
    """Whether two nested states are equal to the last bit."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def main() -> int:
    """Kills, resumes, compares."""
    with tempfile.TemporaryDirectory() as work:
        whole, killed = Path(work) / "whole", Path(work) / "killed"
        print("1. without interruption")
        assert_status(run(whole, seed=1), 0)
        print(f"2. the same, killed after step {KILL_AFTER_STEP}")
        assert_status(run(killed, seed=1, kill_after_step=KILL_AFTER_STEP), -signal.SIGKILL)
        print("3. a new process with another seed goes on")
        assert_status(run(killed, seed=999), 0)
        expected, found = (read_checkpoint(scan_checkpoints(folder)[-1].path) for folder in (whole, killed))

    pairs = list(zip(expected["losses"], found["losses"], strict=True))
    differences = [abs(left - right) for left, right in pairs]
    print(f"{differences.count(0.0)} of {len(pairs)} losses equal, largest difference {max(differences)}")
    parts = {"weights": "state_dict", "optimizer": "optimizer_states", "schedule": "schedule", "random streams": "rng"}
    wrong = [name for name, key in parts.items() if not same(expected[key], found[key])]
    if wrong or max(differences) > 0:
        print(f"NOT exact: {', '.join(wrong) or 'losses'}")
        return 1
    print("EXACT: weights, optimizer, schedule and random streams are bit-equal")
    return 0


def assert_status(found: int, expected: int) -> None:
    """Stops the example where a process did not end as it should."""
    if found != expected:
        raise SystemExit(f"a process ended with status {found}, expected {expected}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--kill-after-step", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is None:
        sys.exit(main())
    torch.set_num_threads(1)
    train(options.train, seed=options.seed, kill_after_step=options.kill_after_step)
