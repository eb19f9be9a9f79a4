"""Where a pass takes hold of torch: a loader's `_get_iterator`, an iterator's `_next_data` and its order of workers.

Checked on torch 2.6 and 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lightning_resume.data.streams import Streams


class Engine(Protocol):
    """What iterates a loader.

    Attributes:
        loader: the user's.
        streams: what may be drawn from in this process.
        is_persistent: whether its worker processes outlive a pass.
        current: the pass, with `made`, `read` and `is_read_alone`.
        next_data: iterator of torch's -> what stands, or stood, in it.
    """

    loader: Any
    streams: Streams
    is_persistent: bool
    current: Any
    next_data: weakref.WeakKeyDictionary[Any, NextData]


class GetIterator:
    """Stands in for a loader copy's `_get_iterator`; holds copy and engine weakly, so that workers end with their pass.

    In a circle of references the iterator would be left to the garbage collector, which closes the queue to a worker
    before the iterator can ask it to end: torch then waits for five seconds, for one worker after the other.
    """

    def __init__(self, view: DataLoader[Any], engine: Engine) -> None:
        self.view, self.engine, self.progress = weakref.ref(view), weakref.ref(engine), engine.current

    def __call__(self) -> Any:
        """Torch's own iterator over the copy, made as the pass demands."""
        view, engine, progress = self.view(), self.engine(), self.progress
        if view is None or engine is None or progress is None:
            raise RuntimeError("the loader of this pass is gone")
        iterator = progress.made(lambda: type(view)._get_iterator(view), engine.streams)
        engine.next_data[iterator] = NextData(iterator, engine, progress)
        if engine.is_persistent:
            # Where Lightning, and the next pass, look for persistent workers.
            engine.loader.__dict__["_iterator"] = iterator
        return iterator


class NextData:
    """Stands in for an iterator's `_next_data`; persistent iterators serve one pass after the other."""

    def __init__(self, iterator: Any, engine: Engine, progress: Any) -> None:
        self.progress = progress
        # Weak both ways: the user's loader holds persistent iterators, and an iterator ends its workers when it dies.
        self.iterator, self.engine = weakref.ref(iterator), weakref.ref(engine)
        self.put()

    def put(self) -> None:
        """Puts it where torch finds it; it takes itself away when its pass needs it no longer."""
        if (iterator := self.iterator()) is not None:
            iterator._next_data = self

    def __call__(self) -> Any:
        """The next batch of this iterator's pass."""
        iterator, engine = self.iterator(), self.engine()
        if iterator is None or engine is None:
            raise RuntimeError("the loader of this pass is gone")
        progress = engine.current if engine.is_persistent else self.progress
        batch = progress.read(iterator, engine)
        if progress.is_read_alone(engine):
            del iterator._next_data
        return batch


def reads_as_it_draws(iterator: object) -> bool:
    """Whether this is torch's own iterator without workers; another may ask the sampler for more than it reads."""
    return type(iterator) is _SingleProcessDataLoaderIter


def turn(iterator: Any, first: int) -> None:
    """Makes the next pass of a resumed loader's persistent workers begin with worker 0, not with process 0.

    `WorkerStart` numbered the processes from `first` on. DataLoader deals out batches by its
    `_worker_queue_idx_cycle`, which it makes anew, and uses, at the start of a pass.
    """
    if hasattr(iterator, "_num_turns"):
        return
    iterator._num_turns = iterator._num_workers - first
    iterator._cycle = iterator.__dict__.pop("_worker_queue_idx_cycle")
    iterator.__class__ = type(
        "Turned", (type(iterator),), {"_worker_queue_idx_cycle": property(_get_cycle, _set_cycle)}
    )


def _get_cycle(iterator: Any) -> Iterator[int]:
    cycle: Iterator[int] = iterator._cycle
    return cycle


def _set_cycle(iterator: Any, cycle: Iterator[int]) -> None:
    for _ in range(iterator._num_turns):
        next(cycle)
    iterator._cycle = cycle
