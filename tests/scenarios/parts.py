"""What scenarios are made of: data that draws from every random stream, samplers, and small modules.

A scenario is a dict:

    data          scenario → the training loader, several of them, or a LightningDataModule
    module_class  the LightningModule; its `training_step` sets `data_digest` and `loss_hex`
    module        keywords of it
    trainer       Trainer keywords
    callbacks     makes the user's callbacks
    ddp           number of processes
    plugin        AtomicResumeCallback keywords
    kills         after how many batches its processes die, one after the other

Unless a scenario says otherwise, an epoch has 24 items in 6 batches, and training 3 epochs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

Scenario = dict[str, Any]

NUM_ITEMS, BATCH_SIZE, WIDTH = 24, 4, 6
WORKERS: dict[str, dict[str, Any]] = {
    "no_workers": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def scenario(
    data: Callable[[Scenario], Any] | None = None,
    *,
    module_class: type[LightningModule] | None = None,
    max_epochs: int = 3,
    trainer: dict[str, Any] | None = None,
    **rest: Any,
) -> Scenario:
    """A scenario with its defaults filled in: a shuffled loader and `Module`."""
    return {
        "data": data or (lambda _: loader(Items(), shuffle=True)),
        "module_class": module_class or Module,
        "trainer": {"max_epochs": max_epochs, **(trainer or {})},
        **rest,
    }


def loader(dataset: Any, **kwargs: Any) -> DataLoader[Any]:
    """A DataLoader with batches of 4, unless `kwargs` say how batches are made."""
    if "batch_sampler" not in kwargs:
        kwargs.setdefault("batch_size", BATCH_SIZE)
    return DataLoader(dataset, **kwargs)


def digest(*tensors: Tensor) -> str:
    """Equal bits, equal digest."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


# -- data --------------------------------------------------------------------------------------------------------------


def vector(index: int, noise: float) -> tuple[Tensor, Tensor]:
    """Item number `index`: (its number, its features)."""
    return torch.tensor(float(index)), torch.linspace(0.0, 1.0, WIDTH) * (index % 7 - 3) + noise


def global_noise() -> float:
    """A number that depends on all three global random streams, and moves them."""
    return 0.1 * (random.random() + float(np.random.rand()) + float(torch.rand(())))


class Items(Dataset[Any]):
    """A map-style data set; reading an item draws from the three global streams."""

    def __init__(self, num_items: int = NUM_ITEMS) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return vector(index, global_noise())


class Stream(IterableDataset[Any]):
    """Without length; shuffled by python's global stream; its items are dealt out to the workers."""

    def __init__(self, num_items: int = NUM_ITEMS) -> None:
        self.num_items = num_items

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        order = list(range(self.num_items) if info is None else range(info.id, self.num_items, info.num_workers))
        random.shuffle(order)
        for index in order:
            yield vector(index, global_noise())


class Buckets(Sampler[list[int]]):
    """A batch sampler that draws from python's global stream for every batch."""

    def __init__(self, num_items: int = NUM_ITEMS) -> None:
        self.num_items = num_items

    def __len__(self) -> int:
        return self.num_items // BATCH_SIZE

    def __iter__(self) -> Iterator[list[int]]:
        left = set(range(self.num_items))
        for _ in range(len(self)):
            batch = random.sample(sorted(left), BATCH_SIZE)
            left.difference_update(batch)
            yield batch


# -- modules -----------------------------------------------------------------------------------------------------------


def join(batch: Any) -> tuple[Tensor, Tensor]:
    """The numbers and the features of all items in a batch, of however many loaders it is made."""
    if isinstance(batch, (list, tuple)) and isinstance(batch[0], Tensor):
        numbers, features = batch
        return numbers.reshape(-1), features.reshape(-1, WIDTH)
    parts = batch.values() if isinstance(batch, dict) else batch
    joined = [join(part) for part in parts if part is not None]
    return torch.cat([numbers for numbers, _ in joined]), torch.cat([features for _, features in joined])


def small_net() -> nn.Module:
    """A net with running means and a dropout mask."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


class Module(LightningModule):
    """Draws from python's, numpy's and torch's streams in each step; logs values for the step and for the epoch.

    Args:
        optimizer: parameters → optimizer.
        scheduler: (optimizer, trainer) → Lightning's `lr_scheduler` entry.
        net: makes the net.
    """

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        scheduler: Callable[[Any, Any], Any] | None = None,
        net: Callable[[], nn.Module] = small_net,
    ) -> None:
        super().__init__()
        self.net = net()
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.data_digest = self.loss_hex = ""

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Numbers and features of a training batch, which is noted as trained."""
        numbers, features = join(batch)
        self.data_digest = digest(numbers, features)
        return numbers, features + global_noise()

    def loss(self, batch: Any) -> Tensor:
        """The loss of a training batch."""
        numbers, features = self.features(batch)
        return self.error(self.net(features.to(self.dtype)), numbers)

    def error(self, output: Tensor, numbers: Tensor) -> Tensor:
        """How far the output is from the items' numbers."""
        return (output.squeeze(-1) - numbers / NUM_ITEMS).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.note_loss(loss, len(join(batch)[0]))
        return loss

    def note_loss(self, loss: Tensor, batch_size: int) -> None:
        """Logs a training loss."""
        self.loss_hex = float(loss.detach()).hex()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=batch_size)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer, self.trainer)}


class ValidatedModule(Module):
    """Validates on data that draws from the streams.

    Args:
        val_loaders: makes the validation loader or loaders.
        metric: what is logged as `val_loss` at the first, second, … validation of the run, instead of the loss.
        rest: of `Module`.
    """

    def __init__(
        self,
        *,
        val_loaders: Callable[[], Any] = lambda: loader(Items(8)),
        metric: tuple[float, ...] = (),
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.make_val_loaders, self.metric = val_loaders, metric
        self.register_buffer("num_validations", torch.tensor(0))

    def val_dataloader(self) -> Any:
        return self.make_val_loaders()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        numbers, features = join(batch)
        loss = self.error(self.net((features + global_noise()).to(self.dtype)), numbers)
        if self.metric:
            loss = torch.tensor(self.metric[int(self.num_validations) % len(self.metric)])
        self.log("val_loss", loss, batch_size=len(numbers), add_dataloader_idx=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.num_validations += 1
