"""Every optimizer in torch.optim, every kind of schedule, and modules that step by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from .parts import NUM_ITEMS, WIDTH, Module, Scenario, ValidatedModule, scenario, small_net


class Embedded(nn.Module):
    """Looks up rows of a table, with gradients for these rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(32, 1, mode="sum", sparse=True)

    def forward(self, features: Tensor) -> Tensor:
        rows = (features.abs() * 7).long() % 32
        return self.table(rows)


def matrices() -> nn.Module:
    """A net of matrices alone."""
    return nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1, bias=False))


class Adversaries(Module):
    """Two nets that train against each other: two optimizers, two schedules, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(1, 4), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator_optimizer, critic_optimizer = self.optimizers()
        numbers, features = self.features(batch)

        self.toggle_optimizer(critic_optimizer)
        true, made = (numbers / NUM_ITEMS).unsqueeze(1), self.net(features).detach()
        critic_loss = (self.critic(true) - 1).pow(2).mean() + self.critic(made).pow(2).mean()
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        critic_optimizer.step()
        self.untoggle_optimizer(critic_optimizer)

        loss = critic_loss
        if batch_idx % 2:
            self.toggle_optimizer(generator_optimizer)
            loss = (self.critic(self.net(features)) - 1).pow(2).mean()
            generator_optimizer.zero_grad()
            self.manual_backward(loss)
            generator_optimizer.step()
            self.untoggle_optimizer(generator_optimizer)
        self.lr_schedulers()[0].step()
        self.note_loss(loss, len(numbers))
        self.log("critic_loss", critic_loss, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers()[1].step()

    def configure_optimizers(self) -> Any:
        generator = optim.Adam(self.net.parameters(), 1e-2, betas=(0.5, 0.9))
        critic = optim.RMSprop(self.critic.parameters(), 1e-2)
        return [generator, critic], [lr_scheduler.ExponentialLR(generator, 0.97), lr_scheduler.StepLR(critic, 1, 0.5)]


class GathersByHand(Module):
    """The head steps at every batch, the body at every fourth: its gradients are gathered across saves and epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()
        numbers, features = self.features(batch)
        loss = self.error(self.head(self.net(features)), numbers)
        head.zero_grad()
        self.manual_backward(loss)
        head.step()
        if (self.current_epoch * 6 + batch_idx) % 4 == 3:
            self.clip_gradients(body, 0.5, "norm")
            body.step()
            body.zero_grad(set_to_none=batch_idx % 2 == 0)
        self.note_loss(loss, len(numbers))

    def configure_optimizers(self) -> Any:
        return [optim.Adam(self.net.parameters(), 1e-2), optim.SGD(self.head.parameters(), 1e-2, momentum=0.9)]


class SeveralGroups(Module):
    """One optimizer with two groups of parameters, the second of which has a rate of its own."""

    def configure_optimizers(self) -> Any:
        first, *rest = list(self.net.parameters())
        groups = [{"params": rest}, {"params": [first], "lr": 3e-3, "weight_decay": 0.0}]
        optimizer = optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        return [optimizer], [
            lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.9**epoch, lambda epoch: 1 / (1 + epoch)])
        ]


def _stepped(make: Callable[..., Any], net: Callable[[], nn.Module] = small_net, **keywords: Any) -> Scenario:
    """Training with this optimizer."""
    return scenario(module={"optimizer": lambda parameters: make(parameters, **{"lr": 1e-2, **keywords}), "net": net})


def _scheduled(make: Callable[[Any, Any], Any], interval: str = "step", **entry: Any) -> Scenario:
    """Training with SGD with momentum under this schedule."""
    return scenario(
        module={
            "optimizer": lambda parameters: optim.SGD(parameters, 1e-2, momentum=0.9),
            "scheduler": lambda optimizer, trainer: {
                "scheduler": make(optimizer, trainer),
                "interval": interval,
                **entry,
            },
        }
    )


def _warmup_then(optimizer: Any, milestone: int) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=milestone),
        lr_scheduler.CosineAnnealingLR(optimizer, 14),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [milestone])


OPTIMIZERS: dict[str, Scenario] = {
    "adadelta": _stepped(optim.Adadelta),
    "adafactor": _stepped(optim.Adafactor),
    "adagrad": _stepped(optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    "adam": _stepped(optim.Adam),
    "adam_amsgrad": _stepped(optim.Adam, amsgrad=True),
    "adam_fused": _stepped(optim.Adam, fused=True),
    "adam_foreach": _stepped(optim.Adam, foreach=True),
    "adamw_tensor_lr": _stepped(optim.AdamW, lr=torch.tensor(1e-2), foreach=False),
    "adamw": _stepped(optim.AdamW),
    "adamax": _stepped(optim.Adamax),
    "asgd": _stepped(optim.ASGD, t0=3),
    "lbfgs": _stepped(optim.LBFGS, max_iter=3, history_size=3, line_search_fn="strong_wolfe"),
    "nadam": _stepped(optim.NAdam),
    "radam": _stepped(optim.RAdam),
    "rmsprop": _stepped(optim.RMSprop, centered=True, momentum=0.9),
    "rprop": _stepped(optim.Rprop),
    "sgd": _stepped(optim.SGD),
    "sgd_nesterov": _stepped(optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sparse_adam": _stepped(optim.SparseAdam, Embedded),
    **({"muon": _stepped(optim.Muon, matrices)} if hasattr(optim, "Muon") else {}),
    "parameter_groups": scenario(module_class=SeveralGroups),
}

SCHEDULES: dict[str, Scenario] = {
    "sequential_lr": _scheduled(lambda o, _: _warmup_then(o, 4)),
    "one_cycle_lr": _scheduled(
        lambda o, trainer: lr_scheduler.OneCycleLR(o, 0.1, total_steps=int(trainer.estimated_stepping_batches))
    ),
    "lambda_lr": _scheduled(lambda o, _: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 10))),
    "cyclic_lr": _scheduled(lambda o, _: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=4, mode="exp_range")),
    "warm_restarts": _scheduled(lambda o, _: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4, T_mult=2)),
    "chained_lr": _scheduled(
        lambda o, _: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.5, total_iters=7), lr_scheduler.ExponentialLR(o, 0.9)]
        )
    ),
    "multi_step_lr": _scheduled(lambda o, _: lr_scheduler.MultiStepLR(o, [3, 8, 9], 0.5)),
    "step_lr_each_epoch": _scheduled(lambda o, _: lr_scheduler.StepLR(o, 1, 0.5), interval="epoch"),
    "every_fourth_step": _scheduled(lambda o, _: lr_scheduler.ExponentialLR(o, 0.7), frequency=4),
    "plateau_each_step": _scheduled(
        lambda o, _: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1, threshold=0.5),
        monitor="loss_step",
    ),
    "plateau_each_epoch": {
        **_scheduled(
            lambda o, _: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.0),
            interval="epoch",
            monitor="val_loss",
        ),
        "module_class": ValidatedModule,
    },
}

SCENARIOS: dict[str, Scenario] = {
    **OPTIMIZERS,
    **SCHEDULES,
    "gan": scenario(module_class=Adversaries),
    "gradients_across_saves": scenario(module_class=GathersByHand),
}
