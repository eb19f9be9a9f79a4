"""`ResumableLoader`: the user's own loader, with a position that can be saved and entered again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from lightning_resume.data.plain_loader import IterableEngine
from lightning_resume.data.position import CountedIterator
from lightning_resume.data.positional import Positional
from lightning_resume.data.positional_loader import PositionalEngine
from lightning_resume.data.torch_loader import DataLoaderEngine


class ResumableLoader:
    """Wraps a loader: iterates exactly as it does, and knows where it stands.

    Everything else is the wrapped loader's: attributes are read from and written to it, and `isinstance` sees its
    class. An uninterrupted pass draws the same random numbers at the same moments as without the wrapper.

    The position is the number of batches *trained*: `state_dict(num_ahead)` takes the number of batches that were
    handed out but not trained. After `load_state_dict`, in any process, the next pass goes on at the next batch:

    * a map-style data set is entered by index; no item is read;
    * an iterable data set is read again up to the position, from the random streams of the epoch's start;
    * worker processes go on with the streams that their predecessors had after their last trained batch.

    The process's global streams are left as found while a pass is entered; restoring them is the caller's part.

    Args:
        loader: a `DataLoader` (or subclass), or any iterable that can be iterated from its start again.
        positional: where given, order and items follow from (seed, epoch, position) alone; the draws are then other
            ones than without the wrapper. For map-style data sets only.

    Raises:
        UnsupportedSetupError: `positional` was given, and the loader's items have no positions.
    """

    def __init__(self, loader: Any, positional: Positional | None = None) -> None:
        self.__dict__.update(_wrapped=loader, _engine=_engine(loader, positional), _pinned=None, _tell=None)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["_wrapped"])

    def __getattr__(self, name: str) -> Any:
        if "_wrapped" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_wrapped"], name, value)

    def __len__(self) -> int:
        return len(self.__dict__["_wrapped"])

    def __repr__(self) -> str:
        return f"ResumableLoader({self.__dict__['_wrapped']!r})"

    def __iter__(self) -> Iterator[Any]:
        if self.__dict__["_tell"] is not None:
            self.__dict__["_tell"]()
        iterator: Iterator[Any] = self.__dict__["_engine"].iterate()
        return iterator

    def tell(self, listener: Callable[[], object]) -> None:
        """Calls `listener` whenever a pass begins; somebody may only be looking, see `follow`."""
        self.__dict__["_tell"] = listener

    def hold(self) -> None:
        """Until `load_state_dict`, passes yield None without touching data or streams.

        For a resume: frameworks ask for an iterator, and prefetch from it, long before the state is there.
        """
        self.__dict__["_engine"].held = True

    def expect_ahead(self) -> None:
        """Says that from now on a batch may be handed out before the one before it is trained."""
        self.__dict__["_engine"].expect_ahead()

    def num_read_again(self, state: Mapping[str, Any]) -> int:
        """How many batches entering a pass from `state` would read again: the cost of a data set without positions."""
        is_read = state["kind"] == "iterable" or bool(self.__dict__["_engine"].is_replayed(state))
        return int(state["position"]) if state["is_iterating"] and is_read else 0

    def follow(self, iterator: object) -> None:
        """Names the pass that is trained from, where somebody else may have begun one since.

        Args:
            iterator: what `iter` returned for that pass; anything else changes nothing.
        """
        engine = self.__dict__["_engine"]
        if not isinstance(iterator, CountedIterator):
            return
        if engine.is_persistent and engine.current is not None and engine.current.is_made:
            iterator.progress = engine.current  # persistent workers serve one pass: this one goes on in the newest
        else:
            engine.current = iterator.progress

    def __reduce__(self) -> tuple[Any, ...]:
        return ResumableLoader, (self.__dict__["_wrapped"],)

    def finish_pass(self) -> None:
        """After the last batch of a pass that was left early: learns where persistent workers stand."""
        self.__dict__["_engine"].finish_pass()

    def is_saveable(self, num_ahead: int = 0) -> bool:
        """Whether everything that `state_dict` needs is known now.

        False for the first few batches of an epoch in which persistent workers read an iterable data set: where
        such a worker stands is known with its next batch.
        """
        return bool(self.__dict__["_engine"].is_saveable(num_ahead))

    def pin(self, state: dict[str, Any] | None) -> None:
        """Makes `state_dict` answer this, whatever the pass does; None: the truth again."""
        self.__dict__["_pinned"] = state

    def state_dict(self, num_ahead: int = 0) -> dict[str, Any]:
        """Where this loader stands, in plain containers and tensors."""
        pinned: dict[str, Any] | None = self.__dict__["_pinned"]
        if pinned is not None:
            return pinned
        state: dict[str, Any] = self.__dict__["_engine"].state_dict(num_ahead)
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], allow: Collection[str] = (), *, name: str = "the loader"
    ) -> list[str]:
        """Makes the next pass go on from `state`.

        Another number of workers keeps the order of the batches. It is exact where items draw no random numbers;
        where they do, it has to be allowed, because their draws cannot be the same.

        Args:
            state: what `state_dict` returned, in any process.
            allow: "num_workers_changed" accepts other draws of the items.
            name: what messages call this loader, where there are several.

        Returns:
            The differences that were accepted, one text each.

        Raises:
            StateMismatchError: the state is that of a loader of another kind, or of other workers in a way that is not
                allowed, or that changes the order.
        """
        differences: list[str] = self.__dict__["_engine"].load_state_dict(state, allow, name)
        return differences


def _engine(loader: Any, positional: Positional | None) -> PositionalEngine | DataLoaderEngine | IterableEngine:
    if positional is not None:
        return PositionalEngine(loader, positional)
    return DataLoaderEngine(loader) if isinstance(loader, DataLoader) else IterableEngine(loader)
