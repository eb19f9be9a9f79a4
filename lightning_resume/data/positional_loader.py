"""Passes over a `torch.utils.data.DataLoader` in which everything follows from (seed, epoch, position).

A pass is entered by its order alone: no item is read, no draw has to be remembered, no worker's streams matter.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_resume.data.evolving import EvolvingAttributes, data_owners
from lightning_resume.data.global_order import global_order, innermost, order_of, order_seed_of
from lightning_resume.data.held import find_generators
from lightning_resume.data.position import Pass, held_pass, require_each_handed_out
from lightning_resume.data.positional import Positional, PositionalDataset, PositionalSampler, key_of, state_digest
from lightning_resume.data.streams import Streams
from lightning_resume.data.torch_hooks import GetIterator, NextData
from lightning_resume.errors import StateMismatchError, UnsupportedSetupError, WorldSizeError

TURN = 2**20
"""`DistributedSampler` knows no turns: in turn t of epoch e it gets the epoch e + t * TURN."""

REMEDY = 'Use a map-style data set in a DataLoader, or item_rng="stock".'


def why_not_positional(loader: object) -> str | None:
    """Why the items of this loader have no positions; None if they have."""
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is no DataLoader; what it reads has no positions"
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return f"{type(dataset).__name__} is an iterable data set; its items have no positions"
    if getattr(type(dataset), "__getitem__", None) in (None, Dataset.__getitem__):
        return f"{type(dataset).__name__} has no __getitem__ to read a single item by"
    return None


class PositionalPass(Pass):
    """One pass.

    Attributes:
        place: its (epoch, turn), once it has begun.
        before: the (epoch, turn) of the pass before.
        attributes: the sampler's plain attributes that had changed when it began.
        num_read: batches that torch's iterator has returned, counted like `position`.
        state: the one that it was entered from.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(state["position"] if state is not None else 0)
        self.num_read = self.position
        self.state = state
        self.place: tuple[int, int] | None = tuple(state["place"]) if state is not None else None
        self.before: tuple[int, int] | None = None
        self.attributes: Any = state["attributes"] if state is not None else None
        self.is_made = False

    def made(self, make: Callable[[], Any], streams: Streams) -> Any:
        """Makes torch's iterator; every stream is left as found."""
        with streams.isolated():
            return make()

    def read(self, iterator: Any, engine: Any) -> Any:
        """Torch's next batch; in this process the streams are put back once it is read."""
        self.num_read += 1
        try:
            if engine.loader.num_workers > 0:
                return type(iterator)._next_data(iterator)
            with engine.streams.isolated():
                return type(iterator)._next_data(iterator)
        except StopIteration:
            self.num_read -= 1
            raise

    def is_read_alone(self, engine: Any) -> bool:
        """No: the streams are put back after each read."""
        return False


class PositionalEngine:
    """Iterates a DataLoader by position and keeps what `ResumableLoader.state_dict` reports.

    Raises:
        UnsupportedSetupError: the loader's items have no positions.
    """

    def __init__(self, loader: Any, positional: Positional) -> None:
        if (reason := why_not_positional(loader)) is not None:
            raise UnsupportedSetupError(f'item_rng="positional" and the loader {loader!r}', reason, REMEDY)
        self.loader: DataLoader[Any] = loader
        self.positional, self.seed = positional, positional.seed
        self.held = False
        self.is_persistent = loader.num_workers > 0 and loader.persistent_workers
        self.streams = Streams()
        self._foreign = loader._iterator  # of persistent workers that somebody else has started
        self.current: PositionalPass | None = None
        self.next_data: weakref.WeakKeyDictionary[Any, NextData] = weakref.WeakKeyDictionary()
        self._name = "batch_sampler" if loader._auto_collation else "sampler"
        self._pending: dict[str, Any] | None = None
        self._last: tuple[int, int] | None = None
        self._order = order_of(loader)
        self._order_seed = order_seed_of(loader, positional.seed)
        generators = find_generators({"sampler": self._order}, stop=[loader.dataset])
        salts = {name: state_digest(generator) for name, generator in generators.items()}
        samplers = {"sampler": self._order, "sampler.sampler": innermost(self._order)}
        self._evolving = EvolvingAttributes(samplers, max_elements=1_000_000)
        self._evolving_data = EvolvingAttributes(data_owners("dataset", loader.dataset))
        self._sampler = PositionalSampler(self._order, Streams(generators), salts, positional, loader._auto_collation)
        self._dataset = PositionalDataset(loader.dataset, loader.collate_fn, self.seed)

    def iterate(self) -> Iterator[Any]:
        """The next pass; it begins at its first batch."""
        if self.held:
            return held_pass()
        state, self._pending = self._pending, None
        self.current = progress = PositionalPass(state)
        if state is not None and state["has_ended"]:
            progress.has_ended = progress.is_made = True
            self._last = progress.place
            return progress.count(iter(()))
        return progress.count(self._run(progress), self)

    def _run(self, progress: PositionalPass) -> Iterator[Any]:
        progress.before = self._last
        if progress.place is None:
            epoch = self.positional.epoch()
            is_again = self._last is not None and self._last[0] == epoch
            progress.place = epoch, self._last[1] + 1 if is_again and self._last is not None else 0
            progress.attributes = self._evolving.changed()
        else:
            self._evolving.restore(progress.attributes)
        self._last = progress.place
        progress.is_made = True
        view = self._view(progress)
        yield from view

    def _view(self, progress: PositionalPass) -> DataLoader[Any]:
        """A copy of the user's loader with the wrapped parts."""
        loader = self.loader
        epoch, turn = progress.place or (0, 0)
        if isinstance(inner := innermost(self._order), DistributedSampler):
            inner.seed = self._order_seed
            inner.set_epoch(epoch + turn * TURN)
        self._sampler.begin(self.seed, epoch, turn, progress.position)
        if loader.num_workers == 0:
            self.streams = Streams(find_generators({"dataset": loader.dataset, "collate_fn": loader.collate_fn}))
        view = copy.copy(loader)
        view.__dict__[self._name] = self._sampler
        view.__dict__["dataset"] = self._dataset
        view.worker_init_fn = ShowDataset(loader.worker_init_fn)
        view.generator = torch.Generator()  # of the workers' first seeds
        view.generator.manual_seed(int.from_bytes(key_of(self.seed, "workers", epoch, turn)[:7], "little"))
        if loader._iterator is self._foreign:
            view.__dict__["_iterator"] = None
        view.__dict__["_get_iterator"] = GetIterator(view, self)
        return view

    def is_replayed(self, state: Mapping[str, Any]) -> bool:
        """A position is entered by index."""
        return False

    def expect_ahead(self) -> None:
        """What is read ahead follows from its position, too."""

    def finish_pass(self) -> None:
        """Nothing has to be known about what ran ahead."""

    def is_saveable(self, num_ahead: int) -> bool:
        """See `ResumableLoader.is_saveable`."""
        return True

    def state_dict(self, num_ahead: int) -> dict[str, Any]:
        """See `ResumableLoader.state_dict`."""
        if self._pending is not None:
            return self._pending
        progress = self.current
        if progress is not None and progress.state is not None and not progress.is_made:
            return dict(progress.state)  # entered, and its first batch is still to come
        state: dict[str, Any] = {
            "kind": "positional",
            "is_iterating": False,
            "seed": self.seed,
            "order_seed": self._order_seed,
            "salts": dict(self._sampler.salts),
            "world_size": self.positional.world_size,
            "global_order": global_order(self.loader, self.positional.rank, self.positional.world_size),
            "dataset": self._evolving_data.changed(),
            "idle": self._evolving.changed(),
            "last": self._last,
        }
        if progress is None or progress.place is None or not progress.is_made:
            return state
        require_each_handed_out(type(self.loader).__name__, progress.num_read, progress.position)
        position = progress.position - num_ahead
        has_ended = progress.has_ended and num_ahead == 0
        state |= {"is_iterating": True, "place": progress.place, "position": position, "has_ended": has_ended}
        # A pass of which nothing was trained is begun again by whoever takes this state for one between two passes.
        state["last"] = progress.place if position or has_ended else progress.before
        return {**state, "attributes": progress.attributes}

    def load_state_dict(self, state: Mapping[str, Any], allow: Collection[str], name: str) -> list[str]:
        """See `ResumableLoader.load_state_dict`; nothing here can be allowed."""
        self.held = False
        if state["kind"] != "positional":
            raise StateMismatchError(f"kind of {name}", state["kind"], "positional")
        self._check_world(state)
        self.seed = self._dataset.seed = state["seed"]
        self._order_seed, self._sampler.salts = state["order_seed"], dict(state["salts"])
        self._last = None if state["last"] is None else tuple(state["last"])
        self._evolving_data.restore(state["dataset"])
        if state["is_iterating"]:
            self._pending = dict(state)
        if not state["is_iterating"] or state["has_ended"]:
            self._evolving.restore(state.get("idle", {}))
        return []

    def _check_world(self, state: Mapping[str, Any]) -> None:
        now = global_order(self.loader, self.positional.rank, self.positional.world_size)
        if state["world_size"] == self.positional.world_size or (now is not None and now == state["global_order"]):
            return
        saved = state["global_order"]
        if saved is None or now is None:
            remedy = "Another number needs a plain DataLoader: no own batch sampler, shuffle=True or in order."
        else:
            differing = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
            sides = "; ".join(f"{name}: {saved.get(name)} → {now.get(name)}" for name in differing)
            remedy = f"Another number needs the same global batches ({sides}); drop_last=True leaves out uneven ones."
        raise WorldSizeError(state["world_size"], self.positional.world_size, remedy)


class ShowDataset:
    """A `worker_init_fn` that shows workers the user's data set, not the wrapper around it."""

    def __init__(self, worker_init_fn: Any) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker, before the user's own function."""
        info: Any = torch.utils.data.get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
