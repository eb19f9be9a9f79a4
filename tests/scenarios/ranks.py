"""Two processes, forked, over gloo."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor
from torch.utils.data import RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

from .loaders import ScaledLoader
from .optimizers import Adversaries
from .parts import BATCH_SIZE, Buckets, Items, Scenario, Stream, ValidatedModule, join, loader, scenario
from .samplers import OwnGenerator, SortedBatches


class Synchronised(ValidatedModule):
    """Logs values and metrics that are reduced over the processes."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.mean = MeanMetric()

    def note_loss(self, loss: Tensor, batch_size: int) -> None:
        super().note_loss(loss, batch_size)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("synchronised", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=batch_size)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.log("val_size", float(len(join(batch)[0])), sync_dist=True, reduce_fx="sum")


class Scaled(LightningDataModule):
    """A loader with arguments of its own, which Lightning makes again with a sampler for each process (DAT-11)."""

    def train_dataloader(self) -> ScaledLoader:
        return ScaledLoader(48, scale=0.5)


class DrawsByRank(ValidatedModule):
    """Rank r draws r + 1 numbers in each step: no two ranks' streams stand alike (DDP-01)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(self.global_rank + 1):
            torch.rand(())
        return super().training_step(batch, batch_idx)


class LateFirstRank(Callback):
    """Rank 0, which writes, comes late to training (DDP-02)."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            time.sleep(0.5)


def _two(data: Any = None, **rest: Any) -> Scenario:
    """Two processes, six batches each in an epoch."""
    data = data or (lambda _: loader(Items(48), shuffle=True))
    return scenario(data, ddp=2, **rest)


SCENARIOS: dict[str, Scenario] = {
    "ddp": _two(),
    "ddp_workers": _two(lambda _: loader(Items(48), shuffle=True, num_workers=2)),
    "ddp_persistent": _two(lambda _: loader(Items(48), shuffle=True, num_workers=1, persistent_workers=True)),
    "ddp_uneven_last_batch": _two(lambda _: loader(Items(45), shuffle=True)),
    "ddp_accumulate": _two(trainer={"accumulate_grad_batches": 4}),
    "ddp_validate": _two(module_class=ValidatedModule, trainer={"val_check_interval": 4}),
    "ddp_synchronised_logging": _two(module_class=Synchronised),
    "ddp_stream": _two(lambda _: loader(Stream())),
    "ddp_buckets": _two(
        lambda _: loader(Items(48), batch_sampler=Buckets(24)), trainer={"use_distributed_sampler": False}
    ),
    "ddp_loader_subclass": _two(lambda _: Scaled()),
    "ddp_torchdata": _two(lambda _: StatefulDataLoader(Items(48), BATCH_SIZE, shuffle=True)),
    "ddp_own_generator": _two(lambda _: loader(Items(48), sampler=OwnGenerator(np.random.default_rng(3), 48))),
    "ddp_weighted": _two(
        lambda _: loader(Items(48), sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(48)], 48))
    ),
    "ddp_draws_by_rank": _two(module_class=DrawsByRank),
    "ddp_late_first_rank": _two(callbacks=lambda: [LateFirstRank()]),
    "ddp_by_hand": _two(module_class=Adversaries, trainer={"strategy": "ddp_fork_find_unused_parameters_true"}),
    "ddp_averaged": _two(callbacks=lambda: [EMAWeightAveraging(decay=0.9)]),
    "ddp_batch_sampler_extra_argument": _two(
        lambda _: loader(Items(48), batch_sampler=SortedBatches(RandomSampler(Items(48)), BATCH_SIZE, True))
    ),
}
