"""Loaders of every kind: iterable data sets, torchdata's loader, subclasses, loaders that are none, several at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from .parts import (
    BATCH_SIZE,
    NUM_ITEMS,
    WORKERS,
    Items,
    Module,
    Scenario,
    Stream,
    global_noise,
    loader,
    scenario,
    vector,
)


class SizedStream(Stream):
    """A stream that claims a length."""

    def __init__(self, num_items: int = NUM_ITEMS, claimed: int = NUM_ITEMS) -> None:
        super().__init__(num_items)
        self.claimed = claimed

    def __len__(self) -> int:
        return self.claimed


class StatefulStream(IterableDataset[Any]):
    """Says where it stands: a cursor and the number of passes, on which its items depend."""

    def __init__(self) -> None:
        self.next, self.num_passes = 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info is not None else (0, 1)
        while self.next < NUM_ITEMS:
            index, self.next = self.next, self.next + 1
            if index % stride == first:
                yield vector(index, self.num_passes + global_noise())
        self.next, self.num_passes = 0, self.num_passes + 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "num_passes": self.num_passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.num_passes = state["next"], state["num_passes"]


class StatefulIterator:
    """An iterator that says where it stands, shuffled by a generator of its own."""

    def __init__(self) -> None:
        info = get_worker_info()
        self.order = list(range(NUM_ITEMS) if info is None else range(info.id, NUM_ITEMS, info.num_workers))
        random.shuffle(self.order)

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if not self.order:
            raise StopIteration
        return vector(self.order.pop(), global_noise())

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


class StreamOfStatefulIterators(IterableDataset[Any]):
    """Has no state of its own; its iterators have."""

    def __iter__(self) -> StatefulIterator:
        return StatefulIterator()


class ScaledLoader(DataLoader[Any]):
    """A subclass with arguments of its own, and an `__iter__` that changes batches."""

    def __init__(self, num_items: int, *, scale: float, **rest: Any) -> None:
        super().__init__(**{"dataset": Items(num_items), "batch_size": BATCH_SIZE, "shuffle": True, **rest})
        self.scale = scale

    def __iter__(self) -> Iterator[Any]:
        for numbers, features in super().__iter__():
            yield numbers, features * self.scale + 0.01 * random.random()


class Batches:
    """Any iterable over batches, without length; shuffled by python's stream."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(NUM_ITEMS))
        random.shuffle(order)
        for start in range(0, NUM_ITEMS, BATCH_SIZE):
            yield default_collate([vector(index, global_noise()) for index in order[start : start + BATCH_SIZE]])


class StreamOfBatches(Batches, IterableDataset[Any]):
    """An iterable data set that yields whole batches, each worker all of them."""


class WholeBatches(Items):
    """Item i of this map-style data set is a batch of two."""

    def __getitem__(self, index: int) -> Any:
        return default_collate([super(WholeBatches, self).__getitem__(index + 1) for _ in range(2)])


class SizedBatches(Batches):
    """The same, with a length."""

    def __len__(self) -> int:
        return NUM_ITEMS // BATCH_SIZE


class StatefulBatches(SizedBatches):
    """A loader that says where it stands; goes on there in its next iteration."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        if not self.order:
            self.order = random.sample(range(NUM_ITEMS), NUM_ITEMS)
        while self.order:
            indices, self.order = self.order[:BATCH_SIZE], self.order[BATCH_SIZE:]
            yield default_collate([vector(index, global_noise()) for index in indices])

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


class CountingBatches(SizedBatches):
    """Its batches depend on how often it was read."""

    def __init__(self) -> None:
        self.num_passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        for numbers, features in super().__iter__():
            yield numbers, features + self.num_passes


class FromIterator(Module):
    """Takes the loader's iterator into its own hands."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.note_loss(loss, len(batch[0]))
        return loss


def drop_some(items: list[tuple[Tensor, Tensor]]) -> Any:
    """A collate function that leaves items out, up to half of them, by number and by chance."""
    kept = [item for item in items if int(item[0]) % 3 and random.random() < 0.8]
    return default_collate(kept if len(kept) >= 2 else items[:2])


def merge_pairs(items: list[tuple[Tensor, Tensor]]) -> Any:
    """A collate function that makes one item of two."""
    numbers, features = default_collate(items)
    return numbers.view(-1, 2).mean(1), features.view(-1, 2, features.shape[-1]).sum(1)


class ListOfBatches(list[Any]):
    """Batches in a list. A plain `list` is, for Lightning, a list of loaders."""

    def __init__(self) -> None:
        numbers = torch.arange(float(NUM_ITEMS)).split(BATCH_SIZE)
        super().__init__((part, torch.stack([vector(int(i), 0.0)[1] for i in part])) for part in numbers)


def combined(mode: str, *, as_list: bool, **workers: Any) -> CombinedLoader:
    """Three loaders of different lengths."""
    lengths = {"a": 24, "b": 10, "c": 30}
    loaders = {name: loader(Items(length), shuffle=True, **workers) for name, length in lengths.items()}
    return CombinedLoader(list(loaders.values()) if as_list else loaders, mode)


def _with_workers(
    name: str, make: Any, kinds: tuple[str, ...] = ("no_workers", "workers"), **rest: Any
) -> dict[str, Scenario]:
    """Scenarios of one loader, `make(**worker keywords)`, by kind of workers."""
    return {f"{name}_{kind}": scenario(lambda _, kind=kind: make(**WORKERS[kind]), **rest) for kind in kinds}


SCENARIOS: dict[str, Scenario] = {
    # iterable data sets
    **_with_workers("sized_stream", lambda **w: loader(SizedStream(), **w), ("no_workers", "workers", "persistent")),
    **_with_workers("stateful_stream", lambda **w: loader(StatefulStream(), **w), tuple(WORKERS)),
    **_with_workers("stateful_iterators", lambda **w: loader(StreamOfStatefulIterators(), **w)),
    "stream_shorter_than_claimed": scenario(lambda _: loader(SizedStream(24, claimed=32))),
    "stream_shorter_than_claimed_workers": scenario(lambda _: loader(SizedStream(24, claimed=32), num_workers=2)),
    **_with_workers("stream_of_batches", lambda **w: loader(StreamOfBatches(), batch_size=None, **w)),
    # torchdata
    **_with_workers(
        "torchdata_map", lambda **w: StatefulDataLoader(Items(), BATCH_SIZE, shuffle=True, **w), tuple(WORKERS)
    ),
    **_with_workers("torchdata_stream", lambda **w: StatefulDataLoader(Stream(), BATCH_SIZE, **w)),
    **_with_workers("torchdata_stateful_stream", lambda **w: StatefulDataLoader(StatefulStream(), BATCH_SIZE, **w)),
    # subclasses, and no DataLoader at all
    **_with_workers("loader_subclass", lambda **w: ScaledLoader(NUM_ITEMS, scale=0.5, **w)),
    "sized_iterable": scenario(lambda _: SizedBatches()),
    "unsized_iterable": scenario(lambda _: Batches()),
    "stateful_iterable": scenario(lambda _: StatefulBatches()),
    "counting_iterable": scenario(lambda _: CountingBatches()),
    "list_of_batches": scenario(lambda _: ListOfBatches()),
    # several loaders
    "dict_min_size": scenario(lambda _: combined("min_size", as_list=False), max_epochs=7),
    # Killed where one loader has ended and another goes on.
    **_with_workers(
        "dict_max_size",
        lambda **w: combined("max_size", as_list=False, **w),
        ("no_workers", "persistent"),
        kills=[6, 7, 13],
    ),
    "dict_max_size_cycle": scenario(lambda _: combined("max_size_cycle", as_list=False)),
    "list_min_size": scenario(lambda _: combined("min_size", as_list=True), max_epochs=7),
    "list_max_size": scenario(lambda _: combined("max_size", as_list=True)),
    "list_max_size_cycle": scenario(lambda _: combined("max_size_cycle", as_list=True)),
    "sized_and_unsized_min_size": scenario(
        lambda _: CombinedLoader({"map": loader(Items(), shuffle=True), "stream": loader(Stream(28))}, "min_size")
    ),
    "sized_and_unsized_cycle": scenario(
        lambda _: CombinedLoader([loader(Items(), shuffle=True), loader(Stream(12))], "max_size_cycle")
    ),
    "nested_loaders": scenario(
        lambda _: {"a": loader(Items(), shuffle=True), "b": [loader(Items(14), shuffle=True), ListOfBatches()]}
    ),
    # how batches are made and taken
    **_with_workers("unbatched", lambda **w: loader(WholeBatches(6), batch_size=None, shuffle=True, **w)),
    "worker_init_fn": scenario(
        lambda _: loader(Items(), shuffle=True, num_workers=2, worker_init_fn=lambda worker: random.seed(worker))
    ),
    "collate_drops_items": scenario(lambda _: loader(Items(), shuffle=True, collate_fn=drop_some)),
    "collate_drops_items_workers": scenario(
        lambda _: loader(Items(), shuffle=True, collate_fn=drop_some, num_workers=2)
    ),
    "collate_merges_items": scenario(lambda _: loader(Items(), shuffle=True, collate_fn=merge_pairs)),
    "dataloader_iter": scenario(module_class=FromIterator),
    "dataloader_iter_workers": scenario(
        lambda _: loader(Items(), shuffle=True, num_workers=2), module_class=FromIterator
    ),
    "dataloader_iter_stream": scenario(lambda _: loader(Stream()), module_class=FromIterator),
    "prefetch_factor": scenario(lambda _: loader(Items(), shuffle=True, num_workers=2, prefetch_factor=4)),
    "ragged_last_batch": scenario(lambda _: loader(Items(22), shuffle=True)),
    "drop_last": scenario(lambda _: loader(Items(27), shuffle=True, drop_last=True, num_workers=2)),
}
