"""The toy's data set and net."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset


class ToyItems(Dataset[Tensor]):
    """Item i is `tensor([float(i)])`."""

    def __init__(self, num_items: int = 32) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Toy(LightningModule):
    """The toy net.

    Args:
        optimizer: parameters → optimizer.
        scheduler: optimizer → scheduler (stepped once an epoch), or Lightning's `lr_scheduler` dict.
        metric: what validation logs as `val_loss` in epoch 0, 1, …, instead of the loss.
    """

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        scheduler: Callable[[Any], Any] | None = None,
        metric: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
        self.make_optimizer, self.make_scheduler, self.metric = optimizer, scheduler, metric
        self._row: dict[str, Any] = {}

    @property
    def row(self) -> dict[str, Any]:
        """What the last step was trained on. In a public attribute a resume would say that it is not restored."""
        return self._row

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self._row = {
            "epoch": self.current_epoch,
            "batch": batch_idx,
            "step": self.global_step,
            "items": [int(item) for item in batch.reshape(-1)],
            "loss": float(loss.detach()).hex(),
            "lr": [float(group["lr"]).hex() for opt in self.trainer.optimizers for group in opt.param_groups],
        }
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.metric is not None:
            loss = torch.tensor(self.metric[self.current_epoch])
        self.log("val_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}
