"""Averaged weights, and values that are logged over many batches."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn
from torchmetrics import CatMetric, MeanAbsoluteError, MeanMetric, MetricCollection, R2Score
from torchmetrics.wrappers import MinMaxMetric

from .parts import NUM_ITEMS, Module, Scenario, ValidatedModule, join, scenario


class Measured(ValidatedModule):
    """Logs torchmetrics objects for the step and the epoch, in training and in validation."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.mean = MeanMetric()
        self.errors = MetricCollection({"mae": MeanAbsoluteError(), "r2": R2Score()}, prefix="train_")
        self.val_error = MeanAbsoluteError()
        self.best_val_error = MinMaxMetric(MeanAbsoluteError())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, features = self.features(batch)
        output = self.net(features)
        loss = self.error(output, numbers)
        self.mean(loss.detach(), weight=len(numbers))
        self.errors(output.detach().squeeze(-1), numbers / NUM_ITEMS)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log_dict(self.errors, on_step=False, on_epoch=True)
        self.note_loss(loss, len(numbers))
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        numbers, features = join(batch)
        output = self.net(features).squeeze(-1)
        self.val_error(output, numbers / NUM_ITEMS)
        self.best_val_error.update(output, numbers / NUM_ITEMS)
        self.log("val_mae", self.val_error)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("val_mae_min", self.best_val_error.compute()["min"])


class Gathers(Module):
    """Keeps all losses of an epoch in a metric that it computes and resets itself."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.losses = CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.update(loss.detach())
        self.note_loss(loss, len(join(batch)[0]))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("median_loss", self.losses.compute().median())
        self.losses.reset()


class Reduced(Module):
    """Logs with every reduction, some values not in every batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        size = len(join(batch)[0])
        for reduce_fx in ("mean", "sum", "min", "max"):
            self.log(f"{reduce_fx}_loss", loss, on_epoch=True, reduce_fx=reduce_fx, batch_size=size)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx=torch.max, batch_size=size)
        if batch_idx % 2:
            self.log("odd_loss", loss, on_step=False, on_epoch=True, batch_size=size)
        if self.current_epoch == 1:
            self.log("second_epoch_loss", loss, on_step=True, on_epoch=True, batch_size=size)
        self.log("seen", float(batch_idx), prog_bar=True, logger=False)
        self.note_loss(loss, size)
        return loss


class LogsFromHooks(ValidatedModule):
    """Logs from hooks around the batches, too."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("before", float(batch_idx), on_step=False, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", outputs["loss"], on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_number", float(self.current_epoch))


class EverySecondStep(WeightAveraging):
    """Averages every second step."""

    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.8))

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 0


SCENARIOS: dict[str, Scenario] = {
    "swa": scenario(
        max_epochs=4,
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=5e-2, swa_epoch_start=1, annealing_epochs=2)],
        kills=[9, 20, 27],
    ),
    "swa_validated": scenario(
        module_class=ValidatedModule,
        trainer={"val_check_interval": 4},
        callbacks=lambda: [StochasticWeightAveraging(swa_lrs=5e-2, swa_epoch_start=1)],
    ),
    "ema": scenario(callbacks=lambda: [EMAWeightAveraging(decay=0.9)]),
    "ema_validated": scenario(
        module_class=ValidatedModule,
        trainer={"val_check_interval": 4},
        callbacks=lambda: [EMAWeightAveraging(decay=0.9, use_buffers=True)],
    ),
    "averages_every_second_step": scenario(callbacks=lambda: [EverySecondStep()]),
    "torchmetrics": scenario(module_class=Measured, trainer={"val_check_interval": 4}),
    "torchmetrics_gathered": scenario(module_class=Gathers),
    "every_reduction": scenario(module_class=Reduced),
    "logged_from_hooks": scenario(module_class=LogsFromHooks, trainer={"val_check_interval": 4}),
}
