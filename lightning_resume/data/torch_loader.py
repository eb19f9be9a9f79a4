"""Passes over a `torch.utils.data.DataLoader`: live, or entered at a saved position.

A pass runs on a shallow copy of the user's loader (its class, its attributes, no second `__init__`) whose sampler,
collate function and worker start are wrapped; the user's object is not changed. What has to happen when torch makes
its iterator happens in `_get_iterator`, and what has to happen for each batch in the iterator's `_next_data`
(torch 2.6 to 2.13), so that subclasses with an `__iter__` of their own see nothing of it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_resume.data.position import (
    CountedIterator,
    Pass,
    WorkerTrail,
    held_pass,
    pack_workers,
    unpack_workers,
)
from lightning_resume.data.sampler import FastForwardSampler, find_generators
from lightning_resume.data.streams import DrawLog, Streams, pack, unpack
from lightning_resume.data.workers import ReplayingIterable, StampingCollate, Stamped, WorkerStart
from lightning_resume.errors import StateMismatchError, UnsupportedSetupError


class DataLoaderEngine:
    """Iterates a DataLoader and keeps what `ResumableLoader.state_dict` reports."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.held = False
        self.expects_ahead = False
        self.is_iterable = isinstance(loader.dataset, IterableDataset)
        self.is_persistent = loader.num_workers > 0 and loader.persistent_workers
        generators = {} if self.is_iterable else find_generators(loader._index_sampler)
        if isinstance(loader.generator, torch.Generator):
            generators["loader"] = loader.generator
        self.streams = Streams(generators)
        self._sampler: FastForwardSampler | None = None
        self._collate: Any = None
        self._dataset: Any = loader.dataset
        self._pass: _LoaderPass | None = None
        self._pending: dict[str, Any] | None = None
        self._workers_to_carry: dict[str, Any] | None = None

    def iterate(self) -> Iterator[Any]:
        if self.held:
            return held_pass()
        state, self._pending = self._pending, None
        if state is None or not state["is_iterating"]:
            return self._begin()
        return self._enter(state)

    def _begin(self) -> CountedIterator:
        """The next pass, from its start."""
        trail = WorkerTrail(self.loader.num_workers)
        if self.is_persistent and self._pass is not None and self.loader._iterator is not None:
            trail = self._continued_trail(self._pass)
        carried, self._workers_to_carry = self._workers_to_carry, None
        if carried is not None:
            trail.base_seed, trail.starts = carried["base_seed"], dict(carried["states"])
        self._pass = progress = _LoaderPass(self, trail, resumed=carried is not None)
        view = self._view()
        if carried is not None:
            self._start_workers_from(view, {**carried, "first": 0, "counts": {}, "starts": {}})
        return progress.count(self._iter(view), self)

    def _enter(self, state: Mapping[str, Any]) -> CountedIterator:
        """The pass that `state` was taken in, at its position."""
        trail = WorkerTrail(self.loader.num_workers)
        self._pass = progress = _LoaderPass(self, trail, resumed=True, state=state)
        view = self._view()
        if self._sampler is not None:
            self._sampler.load_state_dict(_sampler_state(state, has_workers=self.loader.num_workers > 0))
        if self.loader.num_workers > 0:
            workers = unpack_workers(state["workers"])
            trail.resume(workers, progress.position)
            self._start_workers_from(view, workers)
        if state["has_ended"]:
            progress.has_ended = True
            return progress.count(iter(()))
        return progress.count(self._iter(view), self)

    def _iter(self, view: DataLoader[Any]) -> Iterator[Any]:
        iterator = iter(view)
        # Where Lightning, and the next pass, look for persistent workers.
        self.loader.__dict__["_iterator"] = view.__dict__.get("_iterator")
        return iterator

    def _view(self) -> DataLoader[Any]:
        """A copy of the user's loader with the wrapped parts; theirs may have changed since the last pass."""
        loader = self.loader
        view = copy.copy(loader)
        if not self.is_iterable:
            name = "batch_sampler" if loader._auto_collation else "sampler"
            if self._sampler is None or self._sampler.sampler is not getattr(loader, name):
                self._sampler = FastForwardSampler(getattr(loader, name), self.streams.generators)
            view.__dict__[name] = self._sampler
        if loader.num_workers > 0:
            if self.is_iterable:
                if self._dataset is loader.dataset:
                    self._dataset = ReplayingIterable(loader.dataset, loader.collate_fn, loader.batch_size)
                view.__dict__["dataset"] = self._dataset
                view.worker_init_fn = _ShowDataset(loader.worker_init_fn)
            if self._collate is None or self._collate.collate_fn is not loader.collate_fn:
                source = self._dataset if self.is_iterable and self.is_persistent else None
                self._collate = StampingCollate(loader.collate_fn, source)
            view.collate_fn = self._collate
        view.__dict__["_get_iterator"] = _GetIterator(view, self)
        return view

    def _start_workers_from(self, view: DataLoader[Any], workers: Mapping[str, Any]) -> None:
        view.worker_init_fn = WorkerStart(self.loader.worker_init_fn, **workers)
        # DataLoader draws its base seed here, where nobody else looks: the workers start from the saved one.
        view.generator = torch.Generator()

    def _continued_trail(self, last: _LoaderPass) -> WorkerTrail:
        """The trail of persistent workers that go on from the last pass, which may have been left early."""
        self.finish_pass()
        ends = last.trail.at(last.num_read)
        if last.trail.first:
            _turn(self.loader._iterator, last.trail.first)
        trail = WorkerTrail(self.loader.num_workers, ends["states"], are_starts_known=not self.is_iterable)
        trail.base_seed = last.trail.base_seed
        return trail

    def finish_pass(self) -> None:
        """Reads what the workers were asked for already; where they stand is known then.

        Nothing new is asked of the sampler. Starting persistent workers again waits for the same batches.
        """
        iterator = self.loader._iterator
        if not self.is_persistent or self.is_iterable or iterator is None or self._sampler is None:
            return
        self._sampler.close()
        for _ in iterator:
            pass

    def is_saveable(self, num_ahead: int) -> bool:
        progress = self._pass
        if progress is None or self.loader.num_workers == 0:
            return True
        return progress.trail.is_known_at(progress.position - num_ahead)

    def state_dict(self, num_ahead: int) -> dict[str, Any]:
        if self._pending is not None:
            return self._pending
        progress = self._pass
        state: dict[str, Any] = {
            "kind": "DataLoader",
            "is_iterating": progress is not None,
            "num_workers": self.loader.num_workers,
            "generators": pack(self.streams.capture_generators()),
        }
        if progress is None:
            return state
        return {**state, **progress.state_dict(num_ahead, self._sampler)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held = False
        if state["kind"] != "DataLoader":
            raise StateMismatchError("kind of training loader", state["kind"], type(self.loader).__name__)
        if state["num_workers"] != self.loader.num_workers:
            raise StateMismatchError("num_workers of the loader", state["num_workers"], self.loader.num_workers)
        self.streams.restore(unpack(state["generators"]))
        if state["is_iterating"]:
            self._pending = dict(state)
        elif self.is_persistent and state.get("workers") is not None:
            self._workers_to_carry = unpack_workers(state["workers"])


class _LoaderPass(Pass):
    """One pass over a DataLoader.

    Attributes:
        num_read: batches that torch's iterator has returned; equals `position` unless a subclass drops or merges.
        trail: where its workers stand.
        reads: the draws of reading in this process (no workers).
        start: the streams when torch's iterator was made.
        dataset_start: a stateful iterable data set's own state at that moment.
    """

    def __init__(
        self, engine: DataLoaderEngine, trail: WorkerTrail, *, resumed: bool, state: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(state["position"] if state is not None else 0)
        self.num_read = self.position
        self.trail, self.resumed, self.state = trail, resumed, state
        self.is_iterable, self.has_workers = engine.is_iterable, engine.loader.num_workers > 0
        self.reads = DrawLog(engine.streams, recent=None if self.is_iterable else 2)
        self.start = unpack(state["start"]) if state is not None else {}
        self.dataset = engine.loader.dataset
        self.dataset_start = state["dataset"] if state is not None else None
        self.loader_name = type(engine.loader).__name__

    def made(self, make: Any, streams: Streams) -> Any:
        """Makes torch's iterator: live, or as it was made in the killed process, with every stream left as found."""
        if self.state is None:
            self.start = streams.capture()
            self.dataset_start = _own_state(self.dataset)
            iterator = make()
            if not self.resumed:
                self.trail.base_seed = iterator._base_seed
            return iterator
        with streams.isolated():
            streams.restore(self.start)
            if self.dataset_start is not None:
                self.dataset.load_state_dict(self.dataset_start)
            iterator = make()
            if not self.has_workers:
                self.reads.load_state_dict(self.state["reads"])
                self._skip_reads(iterator)
        # The base seed was drawn once more, perhaps from one of these.
        streams.restore(unpack(self.state["generators"]))
        return iterator

    def _skip_reads(self, iterator: Any) -> None:
        if self.is_iterable:
            self.reads.replay(self.position, lambda: type(iterator)._next_data(iterator))
        else:
            self.reads.skip(self.position)

    def read(self, iterator: Any, engine: DataLoaderEngine) -> Any:
        """Torch's next batch."""
        if self.has_workers:
            batch = type(iterator)._next_data(iterator)
            if isinstance(batch, Stamped):
                self.trail.note(self.num_read, batch)
                batch = batch.batch
        elif self.is_iterable or self.num_read == 0 or engine.expects_ahead:
            batch = self.reads.draw(lambda: type(iterator)._next_data(iterator))
        else:
            self.reads.num_draws += 1
            batch = type(iterator)._next_data(iterator)
        self.num_read += 1
        return batch

    def state_dict(self, num_ahead: int, sampler: FastForwardSampler | None) -> dict[str, Any]:
        if self.num_read != self.position:
            raise UnsupportedSetupError(
                f"the loader {self.loader_name}",
                f"its __iter__ has read {self.num_read} batches and handed out {self.position}",
                "Let it hand out one batch for each that it reads.",
            )
        position = self.position - num_ahead
        return {
            "position": position,
            "has_ended": self.has_ended and num_ahead == 0,
            "start": pack(self.start),
            "dataset": self.dataset_start,
            "sampler": None if sampler is None else sampler.state_dict(position),
            "reads": None if self.has_workers else self.reads.state_dict(),
            "workers": pack_workers(self.trail.at(position)) if self.has_workers else None,
        }


class _GetIterator:
    """Stands in for a loader copy's `_get_iterator`; holds the copy weakly, so that workers end with their pass."""

    def __init__(self, view: DataLoader[Any], engine: DataLoaderEngine) -> None:
        self.view, self.engine = weakref.ref(view), engine

    def __call__(self) -> Any:
        view, progress = self.view(), self.engine._pass
        if view is None or progress is None:
            raise RuntimeError("the loader of this pass is gone")
        iterator = progress.made(lambda: type(view)._get_iterator(view), self.engine.streams)
        iterator._next_data = _NextData(iterator, self.engine)
        return iterator


class _NextData:
    """Stands in for an iterator's `_next_data`; persistent iterators serve one pass after the other."""

    def __init__(self, iterator: Any, engine: DataLoaderEngine) -> None:
        # Weak both ways: the user's loader holds persistent iterators, and an iterator ends its workers when it dies.
        self.iterator, self.engine = weakref.ref(iterator), weakref.ref(engine)

    def __call__(self) -> Any:
        iterator, engine = self.iterator(), self.engine()
        if iterator is None or engine is None or engine._pass is None:
            raise RuntimeError("the loader of this pass is gone")
        return engine._pass.read(iterator, engine)


def _own_state(dataset: Any) -> Any:
    """A copy of what an iterable data set says about itself, if it does."""
    if isinstance(dataset, IterableDataset) and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        return copy.deepcopy(dataset.state_dict())
    return None


def _turn(iterator: Any, first: int) -> None:
    """Makes the next pass of a resumed loader's persistent workers begin with worker 0, not with process 0.

    `WorkerStart` numbered the processes from `first` on. DataLoader deals out batches by its
    `_worker_queue_idx_cycle`, which it makes anew, and uses, at the start of a pass.
    """
    if hasattr(iterator, "_num_turns"):
        return
    iterator._num_turns = iterator._num_workers - first
    iterator._cycle = iterator.__dict__.pop("_worker_queue_idx_cycle")
    iterator.__class__ = type("Turned", (type(iterator),), {"_worker_queue_idx_cycle": property(_get_cycle, _set_cycle)})


def _get_cycle(iterator: Any) -> Iterator[int]:
    cycle: Iterator[int] = iterator._cycle
    return cycle


def _set_cycle(iterator: Any, cycle: Iterator[int]) -> None:
    for _ in range(iterator._num_turns):
        next(cycle)
    iterator._cycle = cycle


class _ShowDataset:
    """A `worker_init_fn` that shows workers the user's data set, not the wrapper around it."""

    def __init__(self, worker_init_fn: Any) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info = torch.utils.data.get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def _sampler_state(state: Mapping[str, Any], *, has_workers: bool) -> dict[str, Any]:
    """The saved sampler state; without workers a draw that ran ahead belongs to its read and is made again there."""
    sampler: dict[str, Any] = state["sampler"]
    if has_workers or sampler["log"]["num_draws"] <= sampler["position"] + 1:
        return sampler
    return {**sampler, "log": {**sampler["log"], "num_draws": sampler["position"] + 1, "after": {}}}
