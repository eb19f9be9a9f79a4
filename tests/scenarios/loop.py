"""What the loop does: validation, limits, reloading, accumulation, precision, and modules that change as they train."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo  # every optimizer step wants it: once here, not in each process
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .loaders import CountingBatches, StatefulStream
from .parts import (
    WORKERS,
    Buckets,
    Items,
    Module,
    Scenario,
    Stream,
    ValidatedModule,
    global_noise,
    loader,
    scenario,
    small_net,
)
from .samplers import Remembering

TWO, PERSISTENT = WORKERS["workers"], WORKERS["persistent"]


class Recomputed(nn.Module):
    """Computes its inner part again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_net()

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.inner, features.requires_grad_(), use_reentrant=False)
        return output


class Remembers(Module):
    """Keeps a running mean that is in no `state_dict`."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.mean.mul_(0.5).add_(loss.detach())
        return loss * (1 + self.mean)


class Toggles(Callback):
    """Freezes another part in every epoch, and takes one out of training mode."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first = next(iter(pl_module.net.children()))
        first.requires_grad_(trainer.current_epoch != 1)
        pl_module.net[1].train(trainer.current_epoch == 0)


class Draws(Callback):
    """Draws random numbers in every hook that a run with and without checkpoints calls equally often."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        global_noise()

    on_fit_start = on_train_epoch_start = on_train_epoch_end = on_train_start

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        global_noise()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        global_noise()


class DrawsWhenSaving(Callback):
    """Draws random numbers whenever a checkpoint is made."""

    def state_dict(self) -> dict[str, Any]:
        global_noise()
        return {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        global_noise()


class Curriculum(Callback):
    """Keeps a number of its own, on which training depends."""

    def __init__(self) -> None:
        self.difficulty = 1.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.difficulty *= 1.1
        pl_module.net[3].p = 0.5 - 0.3 / self.difficulty

    def state_dict(self) -> dict[str, Any]:
        return {"difficulty": self.difficulty}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.difficulty = state_dict["difficulty"]


class SkipsSteps(Module):
    """Makes no step for some batches, and ends the third epoch early."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (2, 5) else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class Unfreezes(BaseFinetuning):
    """Trains the last layer first and the rest, as a group of its own, from the second epoch on."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.net[:2])

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:2], optimizer, initial_denom_lr=10)


class TrainsTheTrainable(Module):
    """Gives the optimizer what is not frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 1e-2)


class Reloaded(LightningDataModule):
    """Makes its loader again and again; where `grows`, a longer one in every epoch."""

    def __init__(self, *, grows: bool = False, **workers: Any) -> None:
        super().__init__()
        self.grows, self.workers = grows, workers

    def train_dataloader(self) -> Any:
        num_items = 24 + 4 * self.trainer.current_epoch if self.grows else 24
        return loader(Items(num_items), shuffle=True, **self.workers)

    def val_dataloader(self) -> Any:
        return loader(Items(8), shuffle=True)


def _validated(val_loaders: Any = None, metric: tuple[float, ...] = (), **rest: Any) -> Scenario:
    """A run with validation."""
    module = {"metric": metric, **({"val_loaders": val_loaders} if val_loaders is not None else {})}
    return scenario(module_class=ValidatedModule, module=module, **rest)


def _shuffled(**workers: Any) -> Any:
    return lambda _: loader(Items(), shuffle=True, **workers)


VALIDATION: dict[str, Scenario] = {
    "validate_each_epoch": _validated(),
    "validate_every_second_epoch": _validated(max_epochs=4, trainer={"check_val_every_n_epoch": 2}),
    "validate_at_half_epochs": _validated(trainer={"val_check_interval": 0.5}),
    "validate_across_epochs": _validated(trainer={"val_check_interval": 8, "check_val_every_n_epoch": None}),
    "validate_across_epochs_stream": _validated(
        data=lambda _: loader(Stream()), trainer={"val_check_interval": 8, "check_val_every_n_epoch": None}
    ),
    "validate_two_loaders": _validated(lambda: [loader(Items(8)), loader(Items(6), shuffle=True)]),
    # Killed more than once between two validations.
    "validate_with_persistent_workers": _validated(
        lambda: loader(Items(8), shuffle=True, **PERSISTENT), trainer={"val_check_interval": 3}, kills=[4, 5, 16]
    ),
    "validate_stateful_stream": _validated(
        lambda: loader(StatefulStream()), trainer={"val_check_interval": 3}, kills=[4, 5, 16]
    ),
    "validate_own_state_sampler": _validated(
        lambda: loader(Items(), sampler=Remembering()), trainer={"val_check_interval": 3}, kills=[4, 5, 16]
    ),
    "validate_stateful_iterable": _validated(
        lambda: CountingBatches(), trainer={"val_check_interval": 3}, kills=[4, 5, 16]
    ),
    "validate_stream_workers": _validated(lambda: loader(Stream(8), **TWO), trainer={"val_check_interval": 2}),
    "validate_limited": _validated(
        lambda: loader(Items(16), shuffle=True, **PERSISTENT), trainer={"limit_val_batches": 2}, kills=[3, 8, 9]
    ),
    "validate_without_sanity_check": _validated(trainer={"num_sanity_val_steps": 0, "val_check_interval": 2}),
    "validate_and_accumulate_workers": _validated(
        data=_shuffled(**TWO), trainer={"val_check_interval": 3, "accumulate_grad_batches": 4}
    ),
    "stops_early": _validated(
        metric=(1.0, 0.9, 0.95, 0.8, 0.85, 0.86, 0.87, 0.7),
        max_epochs=6,
        trainer={"val_check_interval": 3},
        callbacks=lambda: [EarlyStopping("val_loss", patience=3)],
    ),
}

LIMITS: dict[str, Scenario] = {
    "limit_int": scenario(max_epochs=4, trainer={"limit_train_batches": 5}),
    "limit_int_workers": scenario(_shuffled(**TWO), max_epochs=4, trainer={"limit_train_batches": 5}),
    "limit_int_persistent": scenario(_shuffled(**PERSISTENT), max_epochs=5, trainer={"limit_train_batches": 4}),
    "limit_int_stream": scenario(lambda _: loader(Stream()), max_epochs=4, trainer={"limit_train_batches": 5}),
    "limit_int_stream_workers": scenario(
        lambda _: loader(Stream(), **TWO), max_epochs=4, trainer={"limit_train_batches": 5}
    ),
    "limit_int_buckets_workers": scenario(
        lambda _: loader(Items(), batch_sampler=Buckets(), **TWO), max_epochs=4, trainer={"limit_train_batches": 5}
    ),
    "limit_float": scenario(max_epochs=6, trainer={"limit_train_batches": 0.5}),
    "overfit_batches": scenario(max_epochs=5, trainer={"overfit_batches": 4}),
    "overfit_batches_validated": _validated(max_epochs=5, trainer={"overfit_batches": 4}),
    "reload_each_epoch": scenario(
        lambda _: Reloaded(), module_class=ValidatedModule, trainer={"reload_dataloaders_every_n_epochs": 1}
    ),
    "reload_each_epoch_longer": scenario(
        lambda _: Reloaded(grows=True), trainer={"reload_dataloaders_every_n_epochs": 1}
    ),
    "reload_each_epoch_workers": scenario(lambda _: Reloaded(**TWO), trainer={"reload_dataloaders_every_n_epochs": 1}),
    "reload_each_epoch_persistent": scenario(
        lambda _: Reloaded(**PERSISTENT), trainer={"reload_dataloaders_every_n_epochs": 1}
    ),
    "reload_every_second_epoch": scenario(
        lambda _: Reloaded(), max_epochs=4, trainer={"reload_dataloaders_every_n_epochs": 2}
    ),
    "max_steps": scenario(trainer={"max_epochs": -1, "max_steps": 18}),
    "min_epochs_max_time": scenario(trainer={"min_epochs": 2, "max_time": "00:01:00:00"}),
}

STEPS: dict[str, Scenario] = {
    "accumulate_ragged": scenario(trainer={"accumulate_grad_batches": 5}),
    "accumulate_schedule": scenario(callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]),
    "clip_norm": scenario(trainer={"gradient_clip_val": 0.1}),
    "clip_value": scenario(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16_mixed": scenario(trainer={"precision": "bf16-mixed"}),
    "bf16_true": scenario(trainer={"precision": "bf16-true"}),
    "double": scenario(trainer={"precision": "64-true", "accumulate_grad_batches": 2}),
    "gradient_checkpointing": scenario(module={"net": Recomputed}),
    "compiled": scenario(module={"net": lambda: torch.compile(small_net(), backend="eager")}),
    "buffer_not_persistent": scenario(module_class=Remembers),
    "callback_toggles_modes": scenario(callbacks=lambda: [Toggles()]),
    "hooks_draw": scenario(callbacks=lambda: [Draws()]),
    "hooks_draw_workers": scenario(_shuffled(**TWO), callbacks=lambda: [Draws()]),
    "saving_draws": scenario(callbacks=lambda: [DrawsWhenSaving()]),
    "callback_with_state": scenario(callbacks=lambda: [Curriculum()]),
    "steps_skipped": scenario(max_epochs=4, module_class=SkipsSteps),
    "saves_every_third_step": scenario(_shuffled(**TWO), plugin={"every_n_train_steps": 3, "async_save": True}),
    "finetuning": scenario(module_class=TrainsTheTrainable, callbacks=lambda: [Unfreezes()]),
    "learning_rates_logged": scenario(
        callbacks=lambda: [LearningRateMonitor(logging_interval="step", log_momentum=True)]
    ),
    "rows_every_fourth_step": scenario(trainer={"log_every_n_steps": 4}),
}

SCENARIOS: dict[str, Scenario] = {**VALIDATION, **LIMITS, **STEPS}
