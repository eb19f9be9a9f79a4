"""The demo's training job: an ordinary Lightning script that is full of randomness.

Two things in it are there because of this package: the callback, and ``ckpt_path="last"``. The rest is what any job
looks like: images that are shifted, brightened and made noisy in worker processes (drawn from python's, numpy's and
torch's streams), dropout, batch norm, validation in mid-epoch, a learning rate that changes with each step, and
gradients gathered over two batches.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_resume import AtomicResumeCallback
from lightning_resume.demo.recording import Recorder
from lightning_resume.demo.settings import BATCH_SIZE, CHECKPOINTS_DIR, JobSettings

NUM_TRAINING_ITEMS = 1437  # of the 1797 images; the rest is for validation


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Hand-written digits: images of shape (1, 8, 8), float32 in 0..1, and their labels, int64."""

    def __init__(self, images: Tensor, labels: Tensor, augment: bool) -> None:
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augment:
            image = image.roll((random.randint(-1, 1), random.randint(-1, 1)), dims=(-2, -1))
            image = image * float(np.random.uniform(0.8, 1.2))
            image = image + 0.05 * torch.randn(image.shape)
        return image, self.labels[index]


class DigitsData(LightningDataModule):
    """The images that scikit-learn brings along; nothing is downloaded."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        bunch = load_digits()
        self.images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
        self.labels = torch.from_numpy(bunch.target).long()
        self.num_items = num_items

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffles; two worker processes read and augment the items."""
        dataset = Digits(self.images[: self.num_items], self.labels[: self.num_items], augment=True)
        return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Reads the images that are not trained on, in order."""
        dataset = Digits(self.images[NUM_TRAINING_ITEMS:], self.labels[NUM_TRAINING_ITEMS:], augment=False)
        return DataLoader(dataset, 4 * BATCH_SIZE)


class DigitsNet(LightningModule):
    """A small convolutional net."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of the batch, and logs it: each value, and the mean of the epoch."""
        images, labels = batch
        loss = functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs loss and accuracy of the validation images."""
        images, labels = batch
        scores = self.net(images)
        self.log("val_loss", functional.cross_entropy(scores, labels))
        self.log("val_accuracy", (scores.argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, with a cosine schedule that is stepped after each optimizer step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def saving_callbacks(settings: JobSettings) -> list[Callback]:
    """Returns the callback that makes the job resumable; or, for comparison, Lightning's own, or none."""
    checkpoints, every_n = Path(settings.run_dir) / CHECKPOINTS_DIR, settings.every_n_train_steps
    if settings.saving == "atomic":
        return [AtomicResumeCallback(checkpoints, every_n_train_steps=every_n)]
    if settings.saving == "stock":
        return [ModelCheckpoint(checkpoints, every_n_train_steps=every_n, save_last=True)]
    return []


def train(settings: JobSettings) -> None:
    """Trains to the end, or until the process is killed."""
    seed_everything(settings.seed, workers=True, verbose=False)
    run_dir = Path(settings.run_dir)
    callbacks = [Recorder(run_dir, settings.last_batch), *saving_callbacks(settings)]
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=settings.num_epochs,
        accumulate_grad_batches=2,
        val_check_interval=0.5,
        deterministic=True,
        callbacks=callbacks,
        enable_checkpointing=settings.saving != "none",
        default_root_dir=run_dir,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsNet(), DigitsData(settings.num_items), ckpt_path="last" if settings.resume else None)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the demo runs two jobs side by side
    train(JobSettings.from_argument(sys.argv[1]))
