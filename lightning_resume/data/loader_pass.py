"""`LoaderPass`: one pass over a DataLoader, what it reads and where it stands."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from lightning_resume.data.position import Pass, WorkerTrail, pack_workers
from lightning_resume.data.sampler import FastForwardSampler
from lightning_resume.data.streams import DrawLog, Streams, pack, unpack
from lightning_resume.data.workers import Stamped
from lightning_resume.errors import UnsupportedSetupError

if TYPE_CHECKING:
    from lightning_resume.data.torch_loader import DataLoaderEngine


class LoaderPass(Pass):
    """One pass over a DataLoader.

    Attributes:
        num_read: batches that torch's iterator has returned, counted like `position`.
        num_drained: those of them that nobody was handed, because the pass was left early.
        is_made: torch's iterator is there; a subclass may make it at its first batch only.
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
        self.num_drained = 0
        self.is_made = False
        self.trail, self.resumed, self.state = trail, resumed, state
        self.is_iterable, self.has_workers = engine.is_iterable, engine.loader.num_workers > 0
        self.reads = DrawLog(engine.streams, recent=None if self.is_iterable else 2)
        self.start = unpack(state["start"]) if state is not None else {}
        self.dataset: Any = engine.loader.dataset
        self.dataset_start = state["dataset"] if state is not None else None
        self.loader_name = type(engine.loader).__name__

    def made(self, make: Callable[[], Any], streams: Streams) -> Any:
        """Makes torch's iterator: live, or as it was made in the killed process, with every stream left as found."""
        self.is_made = True
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
        self.is_made = True
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
        """Where the pass stood when all but the last `num_ahead` batches had been handed out."""
        if self.num_read - self.num_drained != self.position:
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
            "workers": pack_workers(self.trail.at(position + self.num_drained)) if self.has_workers else None,
        }


def _own_state(dataset: Any) -> Any:
    """A copy of what an iterable data set says about itself, if it does."""
    if isinstance(dataset, IterableDataset) and hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        return copy.deepcopy(dataset.state_dict())
    return None
