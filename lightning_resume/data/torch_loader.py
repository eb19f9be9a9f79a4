"""Passes over a `torch.utils.data.DataLoader`: live, or entered at a saved position.

A pass runs on a shallow copy of the user's loader (its class, its attributes, no second `__init__`) whose sampler,
collate function and worker start are wrapped; the user's object is not changed. What has to happen when torch makes
its iterator happens in `_get_iterator`, and what has to happen for each batch in the iterator's `_next_data`
(torch 2.6 to 2.13), so that subclasses with an `__iter__` of their own see nothing of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_resume.data.changed_workers import check_workers
from lightning_resume.data.evolving import EvolvingAttributes, data_owners
from lightning_resume.data.held import Generator, find_generators
from lightning_resume.data.loader_pass import LoaderPass
from lightning_resume.data.position import (
    CountedIterator,
    WorkerTrail,
    held_pass,
    pack_workers,
    require_each_handed_out,
    unpack_workers,
)
from lightning_resume.data.sampler import FastForwardSampler, find_sampler_generators, load_idle, watch_sampler
from lightning_resume.data.streams import Streams, pack, unpack
from lightning_resume.data.torch_hooks import GetIterator, NextData, turn
from lightning_resume.data.workers import ReplayingIterable, StampingCollate, WorkerBegin, WorkerStart, own_state
from lightning_resume.errors import StateMismatchError


class DataLoaderEngine:
    """Iterates a DataLoader and keeps what `ResumableLoader.state_dict` reports."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.held = False
        self.expects_ahead = False
        self.is_iterable = isinstance(loader.dataset, IterableDataset)
        self.is_persistent = loader.num_workers > 0 and loader.persistent_workers
        self.streams = Streams(self._find_generators())
        self.evolving = EvolvingAttributes(
            data_owners("dataset", loader.dataset) | data_owners("collate_fn", loader.collate_fn)
        )
        self._watched: Any = loader._index_sampler
        self._sampler_attributes = watch_sampler(self._watched)
        self._sampler: FastForwardSampler | None = None
        self._collate: Any = None
        self._dataset: Any = loader.dataset
        self.current: LoaderPass | None = None
        self._pending: dict[str, Any] | None = None
        self._workers_to_carry: dict[str, Any] | None = None
        self._carried: Mapping[str, Any] = {}
        self._entered: DataLoader[Any] | None = None
        self.next_data: weakref.WeakKeyDictionary[Any, NextData] = weakref.WeakKeyDictionary()

    def _find_generators(self) -> dict[str, Generator]:
        """Those that are drawn from in this process; workers have copies of the data set's."""
        loader = self.loader
        found = {} if self.is_iterable else find_sampler_generators(loader._index_sampler)
        owners: dict[str, object] = {"generator": loader.generator}
        if loader.num_workers == 0:
            owners |= {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
        return {**found, **find_generators(owners)}

    def iterate(self) -> Iterator[Any]:
        """The next pass, as an iterator over its batches."""
        if self.held:
            return held_pass()
        state, self._pending = self._pending, None
        if state is None or not state["is_iterating"]:
            return self._begin()
        return self._enter(state)

    def _begin(self) -> CountedIterator:
        """The next pass, from its start."""
        self._make_entered()
        trail = WorkerTrail(self.loader.num_workers)
        if self.is_persistent and self.current is not None and self.loader._iterator is not None:
            trail = self._continued_trail(self.current)
        carried, self._workers_to_carry = self._workers_to_carry, None
        if carried is not None:
            trail.base_seed, trail.starts = carried["base_seed"], dict(carried["states"])
        self.streams.generators = self._find_generators()  # a data set may have made itself new ones
        self.current = progress = LoaderPass(self, trail, resumed=carried is not None)
        if self._sampler is not None:
            self._sampler.forget()
        view = self._view()
        if carried is not None and self.loader.num_workers > 0:
            self._start_workers_from(view, {**carried, "first": 0, "counts": {}, "starts": {}, "datasets": {}})
        return progress.count(self._iter(view), self)

    def _enter(self, state: Mapping[str, Any]) -> CountedIterator:
        """The pass that `state` was taken in, at its position."""
        trail = WorkerTrail(self.loader.num_workers)
        self.current = progress = LoaderPass(self, trail, resumed=True, state=state)
        if state["has_ended"]:
            return self._enter_end(state, progress)
        view = self._view()
        if self._sampler is not None:
            self._sampler.load_state_dict(_sampler_state(state))
        if self.loader.num_workers > 0:
            workers = self._workers_of(state)
            trail.resume(workers, progress.position)
            self._start_workers_from(view, workers)
        self._entered = view if self.is_persistent else None
        return progress.count(self._iter(view), self)

    def _enter_end(self, state: Mapping[str, Any], progress: LoaderPass) -> CountedIterator:
        """The pass that `state` was taken in, at its end: nothing is read, and the next save says the same of it."""
        progress.has_ended = progress.is_made = True
        workers = pack_workers(self._workers_of(state)) if self.loader.num_workers > 0 else None
        progress.ended = {**state, "workers": workers}
        self._carry(state, state["num_workers"] == self.loader.num_workers)
        return progress.count(iter(()))

    def _make_entered(self) -> None:
        """Starts the workers of a resumed pass that was left before its first batch: at the save they were at work."""
        view, self._entered = self._entered, None
        if view is not None and self.current is not None and not self.current.is_made:
            view._iterator = self.loader._iterator = view._get_iterator()

    def _iter(self, view: DataLoader[Any]) -> Iterator[Any]:
        iterator = iter(view)
        if self.current is not None and self.is_persistent and view._iterator is iterator:
            self.current.is_made = True  # also where it was there already
        return iterator

    def _view(self) -> DataLoader[Any]:
        """A copy of the user's loader with the wrapped parts; theirs may have changed since the last pass."""
        loader = self.loader
        view = object.__new__(type(loader))
        view.__dict__.update(loader.__dict__)
        if not self.is_iterable:
            name = "batch_sampler" if loader._auto_collation else "sampler"
            view.__dict__[name] = self._sampler_of_pass(getattr(loader, name))
        if loader.num_workers > 0:
            if self.is_iterable:
                if self._dataset is loader.dataset:
                    self._dataset = ReplayingIterable(
                        loader.dataset, loader.collate_fn, loader.batch_size, self.evolving
                    )
                view.__dict__["dataset"] = self._dataset
            if self._collate is None or self._collate.collate_fn is not loader.collate_fn:
                source = self._dataset if self.is_iterable and self.is_persistent else None
                self._collate = StampingCollate(loader.collate_fn, self.evolving, source)
            view.collate_fn = self._collate
            view.worker_init_fn = WorkerBegin(loader.worker_init_fn, self._collate)
        view.__dict__["_get_iterator"] = GetIterator(view, self)
        return view

    def _sampler_of_pass(self, sampler: Any) -> FastForwardSampler:
        """A wrapper of the pass's own, so that somebody else's look into the loader leaves it alone.

        Persistent workers are asked through the one that they were started with.
        """
        if self._watched is not sampler:
            self._watched, self._sampler_attributes = sampler, watch_sampler(sampler)
        if self._sampler is None or not self.is_persistent or self._sampler.sampler is not sampler:
            self._sampler = FastForwardSampler(sampler, None, self._sampler_attributes, self.evolving)
        self._sampler.num_begun = 0
        if self.current is not None:
            self.current.sampler = self._sampler
        return self._sampler

    def _start_workers_from(self, view: DataLoader[Any], workers: Mapping[str, Any]) -> None:
        view.worker_init_fn = WorkerStart(self.loader.worker_init_fn, self._collate, **workers)
        # DataLoader draws its base seed here, where nobody else looks: the workers start from the saved one.
        view.generator = torch.Generator()

    def _workers_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The saved workers; where their number has changed, new ones that start from the same seed."""
        if state["num_workers"] == self.loader.num_workers:
            return unpack_workers(state["workers"])
        return WorkerTrail(self.loader.num_workers).at(0) | {"base_seed": state["base_seed"]}

    def _continued_trail(self, last: LoaderPass) -> WorkerTrail:
        """The trail of persistent workers that go on from the last pass, which may have been left early."""
        self.finish_pass()
        ends = last.trail.at(last.num_read)
        if last.trail.first:
            turn(self.loader._iterator, last.trail.first)
        trail = WorkerTrail(self.loader.num_workers, ends["states"], are_starts_known=not self.is_iterable)
        trail.base_seed = last.trail.base_seed
        return trail

    def expect_ahead(self) -> None:
        """See `ResumableLoader.expect_ahead`."""
        if not self.expects_ahead:
            for next_data in list(self.next_data.values()):  # whichever of them is trained from
                next_data.put()
        self.expects_ahead = True

    def is_replayed(self, state: Mapping[str, Any]) -> bool:
        """Whether a pass is entered by reading: an iterable data set that cannot say where it stands."""
        return self.is_iterable and own_state(self.loader.dataset) is None

    def finish_pass(self) -> None:
        """Reads what the workers were asked for already; where they stand is known then.

        Nothing new is asked of the sampler. Starting persistent workers again waits for the same batches.
        """
        iterator = self.loader._iterator
        if not self.is_persistent or self.is_iterable or iterator is None or self._sampler is None:
            return
        self._sampler.close()
        if self.current is not None:
            self.current.num_drained += sum(1 for _ in iterator)

    def is_saveable(self, num_ahead: int) -> bool:
        """See `ResumableLoader.is_saveable`."""
        progress = self.current
        if progress is None or self.loader.num_workers == 0:
            return True
        return progress.trail.is_known_at(progress.position - num_ahead)

    def state_dict(self, num_ahead: int) -> dict[str, Any]:
        """See `ResumableLoader.state_dict`."""
        if self._pending is not None:
            return self._pending
        progress = self.current
        state: dict[str, Any] = {
            "kind": "DataLoader",
            "is_iterating": progress is not None,
            "num_workers": self.loader.num_workers,
            "prefetch_factor": self.loader.prefetch_factor,
            "persistent_workers": self.is_persistent,
            "generators": pack(self.streams.capture_generators()),
        }
        if progress is None or not progress.is_made:
            if progress is not None and not progress.has_ended:  # an `__iter__` that makes its batches by itself
                require_each_handed_out(type(self.loader).__name__, progress.num_read, progress.position)
                if progress.state is not None:  # entered, and its iterator is made with its first batch
                    return dict(progress.state)
            return {**state, **self._between_passes()}
        if progress.ended is not None:
            return {**progress.ended, **state}
        return {**state, **progress.state_dict(num_ahead)}

    def _between_passes(self) -> dict[str, Any]:
        """What the last pass has left to the next one, which has not begun."""
        workers, progress = self._workers_to_carry, self.current
        has_iterated = progress is not None and (progress.resumed or self.loader._iterator is not None)
        if workers is None and progress is not None and self.is_persistent and has_iterated:
            workers = progress.trail.at(0)
        sampler = {**(self._carried.get("sampler") or {}), "idle": self._sampler_attributes.changed()}
        return {
            **self._carried,
            "is_iterating": False,
            "workers": None if workers is None else pack_workers(workers),
            "attributes": {"now": self.evolving.changed()},
            "sampler": None if self.is_iterable else sampler,
        }

    def _carry(self, state: Mapping[str, Any], has_same_workers: bool) -> None:
        """Takes over what one pass leaves to the next."""
        if self.is_persistent and has_same_workers and state.get("workers") is not None:
            self._workers_to_carry = unpack_workers(state["workers"])
        if "attributes" in state:
            self.evolving.restore(state["attributes"]["now"])
        if state.get("sampler") is not None and not self.is_iterable:
            load_idle(self.loader._index_sampler, state["sampler"])
        # What a resume with other workers has to know, should the next pass be saved before it has begun.
        self._carried = {name: state[name] for name in ("do_items_draw", "sampler", "position") if name in state}

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str], name: str) -> list[str]:
        """See `ResumableLoader.load_state_dict`."""
        self.held = False
        if state["kind"] != "DataLoader":
            raise StateMismatchError(f"kind of {name}", state["kind"], type(self.loader).__name__)
        differences = check_workers(state, self.loader, allow, name)
        self.streams.restore(unpack(state["generators"]))
        has_same_workers = state["num_workers"] == self.loader.num_workers
        if state["is_iterating"] and (has_same_workers or state["position"] or state["num_workers"]):
            self._pending = dict(state)
        elif state["is_iterating"]:
            # Nothing was drawn but the seed of workers that there were not: their pass begins, from that seed.
            self._workers_to_carry = self._workers_of(state)
        else:
            self._carry(state, has_same_workers)
        return differences


def _sampler_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The saved sampler state, less what belongs to the pass around it.

    The pass restores generators itself. Without workers, a draw that ran ahead belongs to the read that it was made
    in, and is made again there.
    """
    sampler: dict[str, Any] = {**state["sampler"], "generators": {}}
    if not state["num_workers"] and sampler["log"]["num_draws"] > sampler["position"] + 1:
        sampler["log"] = {**sampler["log"], "num_draws": sampler["position"] + 1, "after": {}}
    return sampler
