"""What runs inside a DataLoader's worker processes: reporting where their streams stand, and starting there again.

A worker's streams begin at a seed and move on with every item; nobody outside knows where they stand. So each batch
carries a stamp from its worker: who made it, and the streams as they stood once it was made. A resumed worker is
given its predecessor's number, its seed and its stamp.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_resume.data.evolving import EvolvingAttributes, Snapshot
from lightning_resume.data.held import find_generators
from lightning_resume.data.streams import States, Streams
from lightning_resume.errors import StateMismatchError

ATTRIBUTES = "attributes"


@dataclass
class Stamped:
    """A batch with its stamp.

    Attributes:
        batch: what the user's collate function returned.
        worker: number of the worker that made it.
        states: the worker's streams and attributes after the batch; None where they did not move since its last one.
        start: the streams before the epoch's first batch; set on that batch of an iterable data set only.
        dataset: what a stateful iterable data set said about itself after the batch.
        depends: whether items draw random numbers, or change attributes: other workers would make other items. None
            where its first batch changed attributes, and may have been the only one that does: an open file, a cache.
    """

    batch: Any
    worker: int
    states: States | None
    start: States | None = None
    dataset: Any = None
    depends: bool | None = False

    def pin_memory(self, device: str | None = None) -> Stamped:
        """Called by DataLoader's pinning thread."""
        batch = pin_memory(self.batch, device)  # type: ignore[no-untyped-call]
        return replace(self, batch=batch)


class WorkerStreams(Streams):
    """A worker process's streams: the global ones, and the generators that data set and collate function hold.

    What its own copies of them have changed in their attributes since training began is one more.

    Args:
        dataset: the worker's.
        collate_fn: the worker's.
        evolving: the attributes of both, as they were when training began.
    """

    def __init__(self, dataset: object, collate_fn: object, evolving: EvolvingAttributes) -> None:
        super().__init__(find_generators({"dataset": dataset, "collate_fn": collate_fn}))
        self.evolving = evolving

    def capture(self) -> States:
        """Reads all streams and attributes; draws nothing."""
        return {**super().capture(), ATTRIBUTES: Snapshot(self.evolving.changed())}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Sets the streams and attributes named in `states`; the others stay as they are."""
        self.restore_attributes(states)
        super().restore(without_attributes(states))

    def restore_attributes(self, states: Mapping[str, Any]) -> None:
        """Sets the attributes alone."""
        if ATTRIBUTES in states:
            self.evolving.restore(states[ATTRIBUTES].changes)


def without_attributes(states: Mapping[str, Any]) -> States:
    """The streams alone."""
    return {name: state for name, state in states.items() if name != ATTRIBUTES}


class StampingCollate:
    """The user's collate function, and a stamp on every batch that a worker makes with it."""

    def __init__(
        self, collate_fn: Callable[[Any], Any], evolving: EvolvingAttributes, source: ReplayingIterable | None = None
    ) -> None:
        self.collate_fn, self.evolving, self.source = collate_fn, evolving, source
        self._last: States | None = None
        self._num_batches = 0
        self._streams: WorkerStreams | None = None

    def __call__(self, items: Any) -> Any:
        """The batch, stamped in a worker and plain elsewhere."""
        batch = self.collate_fn(items)
        info = get_worker_info()
        if info is None:
            return batch
        if self._streams is None:
            self._streams = self.streams(info.dataset)
        states, start = self._streams.capture(), None
        if self.source is not None:
            start, self.source.start = self.source.start, None
        moved, drawn = states != self._last, without_attributes(states) != without_attributes(self._last or {})
        depends = None if moved and not drawn and self._num_batches == 0 else moved
        self._last, self._num_batches = states, self._num_batches + 1
        return Stamped(batch, info.id, states if moved else None, start, own_state(info.dataset), depends)

    def begin(self, dataset: object) -> None:
        """Runs in a worker before its first batch: from here on a stream that moves was moved by an item."""
        self._streams = self.streams(dataset)
        self._last = self._streams.capture()

    def streams(self, dataset: object) -> WorkerStreams:
        """Those of the worker with this data set."""
        return WorkerStreams(dataset, self.collate_fn, self.evolving)


def own_state(dataset: Any) -> Any:
    """A copy of what an iterable data set says about itself, if it does."""
    if isinstance(dataset, IterableDataset) and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        return copy.deepcopy(dataset.state_dict())
    return None


class WorkerBegin:
    """A `worker_init_fn` around the user's own: shows workers the user's data set, and starts the stamps."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None, collate: StampingCollate) -> None:
        self.worker_init_fn, self.collate = worker_init_fn, collate

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker."""
        info: Any = get_worker_info()
        if isinstance(info.dataset, ReplayingIterable):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        self.collate.begin(info.dataset)


@dataclass
class WorkerStart:
    """A `worker_init_fn` that makes the workers of a resumed loader continue those of the killed process.

    DataLoader hands its first batch to worker 0, but the killed process's next batch was due from worker `first`.
    So process j becomes worker `(first + j) % num_workers`: number, seed and streams.

    Attributes:
        worker_init_fn: the user's own, called with the worker's number.
        collate: stamps the batches.
        base_seed: the seed that the killed process's workers started from.
        first: the worker whose turn it was.
        num_workers: how many there were and are.
        states: worker -> its streams at the save; one that had made nothing is missing and starts from its seed.
        counts: worker -> how many batches it had made in this epoch (iterable data sets read them again).
        starts: worker -> its streams when this epoch began, where that was not its seed (persistent workers).
        datasets: worker -> a stateful data set's own state; it goes on from there, nothing is read again.
    """

    worker_init_fn: Callable[[int], None] | None
    collate: StampingCollate
    base_seed: int
    first: int
    num_workers: int
    states: Mapping[int, States]
    counts: Mapping[int, int] = field(default_factory=dict)
    starts: Mapping[int, States] = field(default_factory=dict)
    datasets: Mapping[int, Any] = field(default_factory=dict)

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker, around the user's own function."""
        info = get_worker_info()
        if info is None:
            raise RuntimeError("WorkerStart runs in a DataLoader's worker processes only")
        worker = (self.first + worker_id) % self.num_workers
        dataset: Any = info.dataset
        wrapper = dataset if isinstance(dataset, ReplayingIterable) else None
        dataset = wrapper.dataset if wrapper is not None else dataset
        _become(worker, self.base_seed, dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
        states = self.states
        streams = self.collate.streams(dataset)
        if wrapper is not None:
            wrapper.expected = self.states.get(worker)
            if worker in self.datasets:
                streams.restore_attributes(self.states.get(worker, {}))
                dataset.load_state_dict(self.datasets[worker])
                states = {name: without_attributes(state) for name, state in self.states.items()}
            elif self.counts.get(worker):
                wrapper.num_batches, states = self.counts[worker], self.starts
        if worker in states:
            streams.restore(states[worker])
        self.collate.begin(dataset)


def _become(worker: int, base_seed: int, dataset: Any) -> None:
    """Sets number and seeds of this worker process as DataLoader's worker loop does (torch 2.6 to 2.13)."""
    seed = base_seed + worker
    info: Any = get_worker_info()
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker, num_workers=info.num_workers, seed=seed, dataset=dataset
    )
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(base_seed, worker))  # type: ignore[no-untyped-call]


class ReplayingIterable(IterableDataset[Any]):
    """An iterable data set whose next iteration, in a worker, first reads again what was trained already.

    Attributes:
        num_batches: batches to read again; set by `WorkerStart`.
        expected: the worker's streams at the save; the replay has to arrive there.
        start: the streams as they stood before the current iteration's first read, until a stamp has taken them.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], batch_size: int | None, evolving: EvolvingAttributes
    ) -> None:
        self.dataset, self.collate_fn, self.batch_size = dataset, collate_fn, batch_size
        self.evolving = evolving
        self.num_batches = 0
        self.expected: States | None = None
        self.start: States | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[Any]:
        streams = WorkerStreams(self.dataset, self.collate_fn, self.evolving)
        self.start = streams.capture()
        iterator: Iterator[Any] = iter(self.dataset)
        num_batches, self.num_batches = self.num_batches, 0
        saved, self.expected = self.expected, None
        expected = None if saved is None else without_attributes(saved)
        for _ in range(num_batches):
            # The collate function is run too: it may draw.
            self.collate_fn(next(iterator) if self.batch_size is None else list(islice(iterator, self.batch_size)))
        if expected is not None and not num_batches:
            streams.restore(expected)  # `iter` may have drawn
        elif saved is not None and without_attributes(streams.capture()) != expected:
            raise StateMismatchError(
                f"the random streams of a worker after reading {num_batches} batches again",
                "the state at the save",
                f"another state: {type(self.dataset).__name__} does not read the same twice",
            )
        return iterator
