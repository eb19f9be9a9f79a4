"""Data sets, transforms and collate functions that change as they are used, in any process that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Sampler, Subset, default_collate, get_worker_info

from .parts import NUM_ITEMS, WORKERS, Items, Scenario, ValidatedModule, loader, scenario, vector


class Counting(Items):
    """Items that depend on how many were read before, by this copy of the data set, and on which."""

    def __init__(self, num_items: int = NUM_ITEMS) -> None:
        super().__init__(num_items)
        self.num_reads = 0
        self.recent = [0, 0, 0]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_reads += 1
        self.recent[self.num_reads % 3] = index
        number, features = super().__getitem__(index)
        return number, features + 0.01 * self.num_reads + 0.1 * sum(self.recent)


class Warming:
    """A transform that grows stronger with every use."""

    def __init__(self) -> None:
        self.strength = {"now": 0.0}

    def __call__(self, features: Tensor) -> Tensor:
        self.strength["now"] += 0.01
        return features * (1 + self.strength["now"])


class Transformed(Dataset[Any]):
    """Transforms the features of another data set."""

    def __init__(self, base: Dataset[Any]) -> None:
        self.base, self.transforms = base, [Warming(), Warming()]

    def __len__(self) -> int:
        return len(self.base)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number, features = self.base[index]
        for transform in self.transforms:
            features = transform(features)
        return number, features


class CountingStream(IterableDataset[Any]):
    """A stream whose items depend on how many it gave before, and on how often it was read to its end."""

    def __init__(self) -> None:
        self.num_items, self.passes = 0, [0]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        for index in range(0 if info is None else info.id, NUM_ITEMS, 1 if info is None else info.num_workers):
            self.num_items += 1
            yield vector(index, 0.01 * self.num_items + self.passes[0])
        self.passes[0] += 1


class CountingCollate:
    """Moves every batch a little further than the last one."""

    def __init__(self) -> None:
        self.num_batches = 0

    def __call__(self, items: list[Any]) -> Any:
        self.num_batches += 1
        numbers, features = default_collate(items)
        return numbers, features + 0.1 * self.num_batches


class Hard(Items):
    """Says of each item how hard it is."""

    def __init__(self) -> None:
        super().__init__()
        self.hardness = [0.0] * NUM_ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number, features = super().__getitem__(index)
        return number, features + self.hardness[index]


class EasiestFirst(Sampler[int]):
    """Looks at the same list as the data set."""

    def __init__(self, hardness: list[float]) -> None:
        self.hardness = hardness

    def __len__(self) -> int:
        return NUM_ITEMS

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(NUM_ITEMS), key=lambda index: self.hardness[index]))


class Mines(Callback):
    """Notes after every batch how hard its items were."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        dataset = trainer.train_dataloader.dataset  # type: ignore[union-attr]
        for number in batch[0].tolist():
            dataset.hardness[int(number)] += float(torch.rand(()))


def _by_hardness() -> Any:
    dataset = Hard()
    return loader(dataset, sampler=EasiestFirst(dataset.hardness))


def _with_workers(name: str, make: Any, **rest: Any) -> dict[str, Scenario]:
    """Scenarios of one loader, `make(**worker keywords)`, killed in an epoch, at its end, and again."""
    return {
        f"{name}_{kind}": scenario(lambda _, kind=kind: make(**WORKERS[kind]), kills=[4, 7, 13, 15], **rest)
        for kind in WORKERS
    }


def _validated(**workers: Any) -> Scenario:
    return scenario(
        module_class=ValidatedModule,
        module={"val_loaders": lambda: loader(Counting(8), **workers)},
        trainer={"val_check_interval": 3},
        kills=[4, 5, 7, 13],
    )


SCENARIOS: dict[str, Scenario] = {
    **_with_workers("counting_items", lambda **w: loader(Counting(), shuffle=True, **w)),
    **_with_workers("counting_subset", lambda **w: loader(Subset(Counting(30), range(24)), shuffle=True, **w)),
    **_with_workers(
        "counting_parts", lambda **w: loader(ConcatDataset([Counting(14), Counting(10)]), shuffle=True, **w)
    ),
    **_with_workers("counting_transforms", lambda **w: loader(Transformed(Counting()), shuffle=True, **w)),
    **_with_workers("counting_stream", lambda **w: loader(CountingStream(), **w)),
    **_with_workers("counting_collate", lambda **w: loader(Items(), collate_fn=CountingCollate(), **w)),
    "shared_hardness": scenario(lambda _: _by_hardness(), callbacks=lambda: [Mines()], kills=[4, 7, 13, 15]),
    "shared_hardness_workers": scenario(
        lambda _: loader(Hard(), shuffle=True, num_workers=2), callbacks=lambda: [Mines()], kills=[4, 7, 13, 15]
    ),
    "validate_counting": _validated(num_workers=0),
    "validate_counting_workers": _validated(num_workers=2),
    "validate_counting_persistent": _validated(num_workers=2, persistent_workers=True),
}
