"""Samplers of every kind, and random generators that the user holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from .parts import BATCH_SIZE, NUM_ITEMS, WORKERS, Items, Module, Scenario, join, loader, scenario, vector


class DrawsEachIndex(Sampler[int]):
    """Draws every index from a global stream, with replacement."""

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return NUM_ITEMS

    def __iter__(self) -> Iterator[int]:
        draw = {
            "python": lambda: random.randrange(NUM_ITEMS),
            "numpy": lambda: int(np.random.randint(NUM_ITEMS)),
            "torch": lambda: int(torch.randint(NUM_ITEMS, ())),
        }[self.stream]
        return (draw() for _ in range(NUM_ITEMS))


class OwnGenerator(Sampler[int]):
    """Draws every index from a generator of its own, which is never seeded again."""

    def __init__(self, generator: Any, num_items: int = NUM_ITEMS) -> None:
        self.rng, self.num_items = generator, num_items

    def __len__(self) -> int:
        return self.num_items

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.num_items):
            if isinstance(self.rng, torch.Generator):
                yield int(torch.randint(self.num_items, (), generator=self.rng))
            else:
                draw = self.rng.integers if isinstance(self.rng, np.random.Generator) else self.rng.randrange
                yield int(draw(self.num_items))


class EpochOrder(Sampler[int]):
    """Its order, and where `lengths` are given its length, depend on `set_epoch`."""

    def __init__(self, lengths: tuple[int, ...] = (NUM_ITEMS,)) -> None:
        self.lengths, self.epoch = lengths, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.lengths[self.epoch % len(self.lengths)]

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(NUM_ITEMS, generator=torch.Generator().manual_seed(70 + self.epoch))
        return iter(order[: len(self)].tolist())


class Remembering(Sampler[int]):
    """Says where it stands: its order follows from how often every item was drawn before."""

    def __init__(self) -> None:
        self.counts = [0] * NUM_ITEMS

    def __len__(self) -> int:
        return NUM_ITEMS

    def __iter__(self) -> Iterator[int]:
        for step in range(NUM_ITEMS):
            index = min(range(NUM_ITEMS), key=lambda i: (self.counts[i], (i * 7 + step + sum(self.counts)) % NUM_ITEMS))
            self.counts[index] += 1 + index % 2
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = list(state["counts"])


class SortedBatches(BatchSampler):
    """A batch sampler with an argument of its own; it shuffles a few batches at a time by numpy's global stream."""

    def __init__(self, sampler: Sampler[int], batch_size: int, drop_last: bool, num_together: int = 2) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.num_together = num_together

    def __iter__(self) -> Iterator[list[int]]:
        waiting: list[list[int]] = []
        for batch in super().__iter__():
            waiting.append(sorted(batch))
            if len(waiting) == self.num_together:
                yield from (waiting[i] for i in np.random.permutation(self.num_together))
                waiting = []
        yield from waiting


class NoisyItems(Dataset[Any]):
    """Its noise comes from a generator that it holds."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if isinstance(self.rng, torch.Generator):
            return vector(index, float(torch.rand((), generator=self.rng)))
        return vector(index, float(self.rng.random()))


class NoisyStream(IterableDataset[Any]):
    """A stream that holds a generator, for its order and its noise."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(12)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        mine = np.arange(NUM_ITEMS) if info is None else np.arange(info.id, NUM_ITEMS, info.num_workers)
        for index in self.rng.permutation(mine):
            yield vector(int(index), float(self.rng.random()))


class NoisyCollate:
    """A collate function that holds a generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(8)

    def __call__(self, items: list[Any]) -> Any:
        numbers, features = default_collate(items)
        return numbers, features + torch.rand(features.shape, generator=self.generator)


class NoisyModule(Module):
    """A module that holds generators, one in a container."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.rng = np.random.default_rng(5)
        self.others = {"python": random.Random(6)}

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        numbers, features = super().features(batch)
        return numbers, features + self.rng.random() + self.others["python"].random()


class NoisyData(LightningDataModule):
    """A data module that holds a generator, and moves every batch by it."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(7)

    def train_dataloader(self) -> Any:
        return loader(Items(), shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        numbers, features = join(batch)
        return numbers, features + self.rng.random()


def _sampled(make: Any, **workers: Any) -> Scenario:
    """The items in the order of the sampler that `make` makes."""
    return scenario(lambda _: loader(Items(), sampler=make(), **workers))


def _batched(make: Any, **workers: Any) -> Scenario:
    return scenario(lambda _: loader(Items(), batch_sampler=make(), **workers))


WEIGHTS = [1.0 + i % 5 for i in range(NUM_ITEMS)]
TWO, PERSISTENT = WORKERS["workers"], WORKERS["persistent"]

SCENARIOS: dict[str, Scenario] = {
    "weighted_sampler": _sampled(lambda: WeightedRandomSampler(WEIGHTS, NUM_ITEMS)),
    "replacement_sampler_workers": _sampled(lambda: RandomSampler(Items(), replacement=True, num_samples=24), **TWO),
    "subset_sampler": _sampled(lambda: SubsetRandomSampler(range(0, NUM_ITEMS))),
    "python_sampler": _sampled(lambda: DrawsEachIndex("python")),
    "numpy_sampler": _sampled(lambda: DrawsEachIndex("numpy")),
    "numpy_sampler_workers": _sampled(lambda: DrawsEachIndex("numpy"), **TWO),
    "torch_sampler": _sampled(lambda: DrawsEachIndex("torch")),
    "torch_sampler_persistent": _sampled(lambda: DrawsEachIndex("torch"), **PERSISTENT),
    "own_torch_generator": _sampled(lambda: OwnGenerator(torch.Generator().manual_seed(3))),
    "own_torch_generator_workers": _sampled(lambda: OwnGenerator(torch.Generator().manual_seed(3)), **TWO),
    "own_numpy_generator": _sampled(lambda: OwnGenerator(np.random.default_rng(3))),
    "own_python_generator_workers": _sampled(lambda: OwnGenerator(random.Random(3)), **TWO),
    "own_python_generator_persistent": _sampled(lambda: OwnGenerator(random.Random(3)), **PERSISTENT),
    "loader_generator": scenario(lambda _: loader(Items(), shuffle=True, generator=torch.Generator().manual_seed(4))),
    "loader_generator_persistent": scenario(
        lambda _: loader(Items(), shuffle=True, generator=torch.Generator().manual_seed(4), **PERSISTENT)
    ),
    "set_epoch": _sampled(EpochOrder),
    "set_epoch_workers": _sampled(EpochOrder, **TWO),
    "set_epoch_persistent": _sampled(EpochOrder, **PERSISTENT),
    "own_state_sampler": _sampled(Remembering),
    "own_state_sampler_workers": _sampled(Remembering, **TWO),
    "own_state_sampler_persistent": _sampled(Remembering, **PERSISTENT),
    "own_state_inside_batch_sampler": _batched(lambda: SortedBatches(Remembering(), BATCH_SIZE, True)),
    "batch_sampler_extra_argument": _batched(lambda: SortedBatches(RandomSampler(Items()), BATCH_SIZE, True, 3)),
    "batch_sampler_extra_argument_workers": _batched(
        lambda: SortedBatches(RandomSampler(Items()), BATCH_SIZE, True, num_together=3), **TWO
    ),
    "sampler_length_changes": scenario(lambda _: loader(Items(), sampler=EpochOrder((24, 24, 20, 16))), max_epochs=4),
    "sampler_length_changes_workers": scenario(
        lambda _: loader(Items(), sampler=EpochOrder((24, 24, 20, 16)), **TWO), max_epochs=4
    ),
    # generators that the user holds
    "held_by_dataset": scenario(lambda _: loader(NoisyItems(np.random.default_rng(1)), shuffle=True)),
    "held_by_dataset_workers": scenario(lambda _: loader(NoisyItems(np.random.default_rng(1)), shuffle=True, **TWO)),
    "held_by_dataset_persistent": scenario(lambda _: loader(NoisyItems(random.Random(2)), shuffle=True, **PERSISTENT)),
    "held_torch_generator_workers": scenario(
        lambda _: loader(NoisyItems(torch.Generator().manual_seed(9)), shuffle=True, **TWO)
    ),
    "held_by_stream": scenario(lambda _: loader(NoisyStream())),
    "held_by_stream_workers": scenario(lambda _: loader(NoisyStream(), **TWO)),
    "held_by_stream_persistent": scenario(lambda _: loader(NoisyStream(), **PERSISTENT)),
    "held_by_collate": scenario(lambda _: loader(Items(), shuffle=True, collate_fn=NoisyCollate())),
    "held_by_collate_workers": scenario(lambda _: loader(Items(), shuffle=True, collate_fn=NoisyCollate(), **TWO)),
    "held_by_module": scenario(module_class=NoisyModule),
    "held_by_data_module": scenario(lambda _: NoisyData()),
}
