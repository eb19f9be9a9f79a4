"""`LoaderPass`: one pass over a DataLoader, what it reads and where it stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_resume.data.evolving import Snapshot
from lightning_resume.data.position import MAX_AHEAD, Pass, WorkerTrail, pack_workers, require_each_handed_out
from lightning_resume.data.sampler import FastForwardSampler
from lightning_resume.data.streams import DrawLog, Streams, pack, unpack
from lightning_resume.data.torch_hooks import reads_as_it_draws
from lightning_resume.data.workers import Stamped, own_state
from lightning_resume.errors import UnsupportedSetupError

if TYPE_CHECKING:
    from lightning_resume.data.torch_loader import DataLoaderEngine


class LoaderPass(Pass):
    """One pass over a DataLoader.

    Attributes:
        num_read: batches that torch's iterator was asked for, counted like `position`.
        num_drained: those of them that nobody was handed, because the pass was left early.
        is_indexed_here: whether this process draws the indices and reads the items.
        is_told_by_sampler: whether the sampler knows how many were read, too, as torch's own iterator goes.
        is_made: torch's iterator is there; a subclass may make it at its first batch only.
        num_made: how many of them the loader has made; a position is known in the first one.
        trail: where its workers stand.
        reads: the draws of reading in this process (no workers).
        start: the streams when torch's iterator was made.
        base_seed: of its workers, also of those that there would have been.
        ended: the state in which it was entered, where that was its end.
        do_items_draw: whether reading items moves a stream; None until that is known.
    """

    def __init__(
        self, engine: DataLoaderEngine, trail: WorkerTrail, *, resumed: bool, state: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(state["position"] if state is not None else 0)
        self._num_read = self.position
        self.num_drained = 0
        self.is_made = False
        self.num_made = 0
        self.ended: Mapping[str, Any] | None = None
        self.sampler: FastForwardSampler | None = None
        self.trail, self.resumed, self.state = trail, resumed, state
        self.is_iterable, self.has_workers = engine.is_iterable, engine.loader.num_workers > 0
        self.is_indexed_here = not self.is_iterable and not self.has_workers
        self.is_told_by_sampler = False
        self.dataset: Any = engine.loader.dataset
        self._own_states: deque[Any] = deque(maxlen=MAX_AHEAD)
        self._attributes_before: deque[Any] = deque(maxlen=MAX_AHEAD)
        self.is_stateful = not self.has_workers and own_state(self.dataset) is not None
        self.is_replayed = self.is_iterable and not self.is_stateful
        self.reads = DrawLog(engine.streams, recent=None if self.is_replayed else 2)
        self.start = unpack(state["start"]) if state is not None else {}
        self.base_seed: int = state["base_seed"] if state is not None else trail.base_seed
        self.do_items_draw: bool | None = state["do_items_draw"] if state is not None else None
        self.evolving = engine.evolving
        self.attributes = state["attributes"]["start"] if state is not None else {}
        self.loader_name = type(engine.loader).__name__

    def made(self, make: Callable[[], Any], streams: Streams) -> Any:
        """Makes torch's iterator: live, or as it was made in the killed process, with every stream left as found."""
        self.is_made = True
        self.num_made += 1
        if self.resumed:
            self._require_one_iterator()
        if self.state is None:
            self.start, self.attributes = streams.capture(), self.evolving.changed()
            self._note_own_state()
            iterator = self._make(make)
            if not self.resumed:
                self.base_seed = self.trail.base_seed = iterator._base_seed
            return iterator
        self._require_begun(0)
        with streams.isolated():
            streams.restore(self.start)
            self.evolving.restore(self.attributes)
            if self.is_stateful:
                self.dataset.load_state_dict(self.state["dataset"])
                self._note_own_state()
            iterator = self._make(make)
            if not self.has_workers:
                self._skip_reads(iterator, self.state["reads"])
            if self.has_workers or not self.is_iterable:  # else reading has brought it there
                self.evolving.restore(self.state["attributes"]["now"])
        # The base seed was drawn once more, perhaps from one of these.
        streams.restore(unpack(self.state["generators"]))
        return iterator

    def _make(self, make: Callable[[], Any]) -> Any:
        iterator = make()
        self.is_told_by_sampler = self.is_indexed_here and reads_as_it_draws(iterator)
        return iterator

    def _require_one_iterator(self) -> None:
        if self.num_made > 1:
            raise UnsupportedSetupError(
                f"the loader {self.loader_name}",
                f"its __iter__ makes {self.num_made} iterators in one pass",
                "Let it make one in each pass, and repeat the items in its sampler.",
            )

    def _require_begun(self, times: int) -> None:
        if self.sampler is not None and self.sampler.num_begun > times:
            raise UnsupportedSetupError(
                f"the loader {self.loader_name}",
                "its __iter__ looks through its sampler besides reading, which draws another order",
                "Let it go over its sampler once in each pass; len() tells how many batches there are.",
            )

    def _note_own_state(self) -> None:
        if self.is_stateful:
            self._own_states.append(own_state(self.dataset))

    def _skip_reads(self, iterator: Any, reads: Mapping[str, Any] | None) -> None:
        if reads is not None:
            self.reads.load_state_dict(reads)
        if self.is_replayed:
            what = f"reading {self.position} batches again"
            self.reads.replay(self.position, lambda: type(iterator)._next_data(iterator), what)
        else:
            self.reads.skip(self.position)

    @property
    def num_read(self) -> int:
        """See above."""
        if self.is_told_by_sampler and self.sampler is not None:
            return self.sampler.num_drawn
        return self._num_read

    def read(self, iterator: Any, engine: DataLoaderEngine) -> Any:
        """Torch's next batch."""
        self.is_made = True
        num_before = self.num_read
        self._num_read += 1
        if self.is_indexed_here:  # some may have been read alone
            self.reads.num_draws = num_before
        try:
            return self._read(iterator, engine, num_before)
        except StopIteration:
            self._num_read -= 1
            raise

    def _read(self, iterator: Any, engine: DataLoaderEngine, num_before: int) -> Any:
        if self.has_workers:
            batch = type(iterator)._next_data(iterator)
            if isinstance(batch, Stamped):
                self.trail.note(num_before, batch)
                batch = batch.batch
        elif self.is_iterable or num_before <= 1 or engine.expects_ahead:
            self._attributes_before.append(self.evolving.changed())
            batch = self.reads.draw(lambda: type(iterator)._next_data(iterator))
            if num_before == 1:  # the first read may have been the sampler's first draw
                before = Snapshot(self._attributes_before[-1])
                self.do_items_draw = self.reads.has_moved or Snapshot(self.evolving.changed()) != before
            self._note_own_state()
        else:
            batch = type(iterator)._next_data(iterator)
        return batch

    def is_read_alone(self, engine: DataLoaderEngine) -> bool:
        """Whether torch may go on without `read`: nothing has to be known but the count, which the sampler has."""
        return self.is_told_by_sampler and not engine.expects_ahead and self.num_read > 1

    def state_dict(self, num_ahead: int) -> dict[str, Any]:
        """Where the pass stood when all but the last `num_ahead` batches had been handed out."""
        self._require_one_iterator()
        num_read = self.num_read - self.num_drained
        if self.has_ended and self.is_told_by_sampler and num_read == self.position + 1:
            num_read -= 1  # at the last of them the data set has raised StopIteration: no batch
        require_each_handed_out(self.loader_name, num_read, self.position)
        if self.is_indexed_here:
            # Some were read alone; the end may have been drawn, too, which is no batch.
            self.reads.num_draws = max(self.reads.num_draws, self.num_read)
        position = self.position - num_ahead
        if self.sampler is not None and not self.sampler.has_drawn(position):  # persistent workers go round again
            raise UnsupportedSetupError(
                f"the loader {self.loader_name}",
                f"its __iter__ has handed out {position} batches, more than its sampler gave since it was begun last",
                "Let it go over its sampler once in each pass, and repeat the items in the sampler.",
            )
        if not self.has_ended:
            self._require_begun(1)
        if self.has_workers and self.num_read:
            self.do_items_draw = bool(self.do_items_draw) or self.trail.do_items_draw
        now = self._attributes_before[-num_ahead] if num_ahead and self._attributes_before else self.evolving.changed()
        return {
            "position": position,
            "has_ended": self.has_ended and num_ahead == 0,
            "start": pack(self.start),
            "base_seed": self.base_seed,
            "do_items_draw": self.do_items_draw,
            "attributes": {"start": self.attributes, "now": now},
            "dataset": self._own_states[-1 - num_ahead] if self.is_stateful else None,
            "sampler": None if self.sampler is None else self.sampler.state_dict(position),
            "reads": None if self.has_workers else self.reads.state_dict(),
            "workers": pack_workers(self.trail.at(position + self.num_drained)) if self.has_workers else None,
        }
