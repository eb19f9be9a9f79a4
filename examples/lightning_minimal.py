"""A Lightning job that is killed and goes on exactly: the smallest example.

What a user adds to a job are two things: `AtomicResumeCallback`, and `ckpt_path="last"`. Both stand in `train` below;
the rest of this file kills the job and checks the promise. Run it: ::

    python examples/lightning_minimal.py

The job is trained three times, each time in a process of its own: from start to end; until it kills itself with SIGKILL
in mid-epoch; and from there to the end, with another seed on purpose. Expect the last two lines to be

    96 of 96 losses equal, largest difference 0.0
    EXACT: weights, optimizer and learning rates are bit-equal
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from lightning_resume import read_checkpoint, scan_checkpoints

KILL_AFTER_STEP = 57  # in the second epoch of 32 batches; 7 steps after a save


def train(folder: Path, seed: int, kill_after_step: int | None) -> None:
    """An ordinary Lightning job with random order, random augmentation in two worker processes, and dropout."""
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from lightning_resume import AtomicResumeCallback

    class Waves(Dataset):
        def __len__(self):
            return 256

        def __getitem__(self, index):
            return torch.sin(torch.arange(32) * (0.1 + index / 256)) + 0.1 * torch.randn(32), torch.tensor(
                [index / 256]
            )

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))

        def training_step(self, batch, batch_idx):
            waves, targets = batch
            loss = nn.functional.mse_loss(self.net(waves), targets)
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=96)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Kill(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == kill_after_step:
                os.kill(os.getpid(), signal.SIGKILL)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # about few workers, and the like
    seed_everything(seed, workers=True, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=[AtomicResumeCallback(folder, every_n_train_steps=10), Kill()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(Waves(), batch_size=8, shuffle=True, num_workers=2), ckpt_path="last")


def start(folder: Path, seed: int, kill_after_step: int = -1) -> subprocess.Popen[bytes]:
    """Trains in a process of its own."""
    return subprocess.Popen([sys.executable, __file__, "--train", str(folder), str(seed), str(kill_after_step)])


def main() -> int:
    """Kills, resumes, compares."""
    with tempfile.TemporaryDirectory() as work:
        whole, killed = Path(work) / "whole", Path(work) / "killed"
        print(f"two jobs start; one of them kills itself after step {KILL_AFTER_STEP}", flush=True)
        baseline, job = start(whole, seed=1), start(killed, seed=1, kill_after_step=KILL_AFTER_STEP)
        try:
            if job.wait() != -signal.SIGKILL:
                raise SystemExit(f"the job was not killed, it ended with status {job.returncode}")
            newest = scan_checkpoints(killed)[-1]
            print(f"killed; the newest checkpoint is of step {newest.global_step}, a new process goes on", flush=True)
            if start(killed, seed=999).wait() or baseline.wait():
                raise SystemExit("a job failed")
        finally:
            baseline.kill()
        expected, found = (read_checkpoint(scan_checkpoints(folder)[-1].path) for folder in (whole, killed))

    # The callback keeps the loss of every step, across kills.
    losses, again = (state["callbacks"]["AtomicResumeCallback"]["history"]["losses"] for state in (expected, found))
    num_equal, difference = int((losses == again).sum()), float((losses - again).abs().max())
    print(f"{num_equal} of {len(losses)} losses equal, largest difference {difference}")
    weights = all(torch.equal(expected["state_dict"][name], found["state_dict"][name]) for name in found["state_dict"])
    (first,), (second,) = expected["optimizer_states"], found["optimizer_states"]
    moments = all(
        torch.equal(first["state"][index][name], second["state"][index][name])
        for index in second["state"]
        for name in second["state"][index]
    )
    rates = expected["lr_schedulers"] == found["lr_schedulers"]
    if not (torch.equal(losses, again) and weights and moments and rates):
        print("NOT exact")
        return 1
    print("EXACT: weights, optimizer and learning rates are bit-equal")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs=3, metavar=("FOLDER", "SEED", "STEP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is None:
        sys.exit(main())
    torch.set_num_threads(1)
    train(Path(options.train[0]), int(options.train[1]), int(options.train[2]))
