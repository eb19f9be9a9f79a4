"""The job that ckpt-chaos kills: ten batches in two epochs and a half, a save after every second, everything kept.

    python -m benchmarks.chaos.train --out FOLDER                with AtomicResumeCallback, saves in the background
    python -m benchmarks.chaos.train --out FOLDER --stock        with Lightning's ModelCheckpoint

Started again with the same FOLDER, it goes on where it was. It prints `resumed from step N`, and writes FOLDER/final:
digests of the weights and of the optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS, CADENCE = 10, 2


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        self.loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean()
        return self.loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Tell(Callback):
    has_told = False

    def on_train_start(self, trainer, module):
        print(f"resumed from step {trainer.global_step}", flush=True)
        self.has_told = True


def digest(state):
    parts = b"".join(value.reshape(-1).numpy().tobytes() for _, value in sorted(state.items()))
    return hashlib.sha256(parts).hexdigest()


def saver(folder, stock):
    if stock:
        return ModelCheckpoint(folder, every_n_train_steps=CADENCE, save_top_k=-1, save_last=True)
    from lightning_resume import AtomicResumeCallback

    return AtomicResumeCallback(folder, every_n_train_steps=CADENCE, keep_last_k=1000)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--without-fsync", action="store_true", help="a control: saves that are not durable")
    options = parser.parse_args()
    if "CKPT_CHAOS_WATCH" in os.environ and not options.stock:
        from benchmarks.chaos.reach import widen

        widen()
    if options.without_fsync:
        os.fsync = lambda fd: None
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=NUM_STEPS,
        callbacks=[saver(options.out / "checkpoints", options.stock), tell := Tell()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.out,
    )
    items = torch.linspace(-1, 1, 64).reshape(16, 4)
    module = Net()
    trainer.fit(module, DataLoader(TensorDataset(items), 4, shuffle=True), ckpt_path="last")
    if not tell.has_told:  # there was nothing left to train
        print(f"resumed from step {trainer.global_step}", flush=True)
    states = trainer.optimizers[0].state_dict()["state"]
    moments = {f"{number}.{name}": value for number, state in states.items() for name, value in state.items()}
    (options.out / "final").write_text(f"{digest(module.state_dict())}\n{digest(moments)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
