"""Other worker processes than at the save: what stays exact, what has to be allowed, what is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_resume.data.streams import GLOBAL_STREAMS
from lightning_resume.errors import StateMismatchError

WORD = "num_workers_changed"


def check_workers(
    state: Mapping[str, Any], loader: DataLoader[Any], allow: Collection[str], name: str = "the loader"
) -> list[str]:
    """Compares a loader's worker settings with those of the save.

    Args:
        state: of the loader, at the save.
        loader: that of now.
        allow: accepted differences.
        name: what messages call the loader.

    Returns:
        The differences that `allow` lets pass.

    Raises:
        StateMismatchError: names the setting, both values and the remedy.
    """
    current = {
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.num_workers > 0 and loader.persistent_workers,
    }
    changed = [key for key, value in current.items() if state[key] != value]
    if not changed or "do_items_draw" not in state:  # no pass has begun yet
        return []
    setting = changed[0]
    is_inside = state["is_iterating"] and state["position"] > 0
    is_dealt = setting == "num_workers" and isinstance(loader.dataset, IterableDataset)
    if is_dealt and is_inside:
        remedy = "Start as many workers: an iterable data set deals its items out by their number."
        raise StateMismatchError(
            f"num_workers of {name} with an iterable data set", state[setting], current[setting], remedy
        )
    if setting != "persistent_workers" and _draws_as_it_goes(state):
        remedy = "Start as many workers: this sampler draws from a global stream whenever the loader asks ahead."
        raise StateMismatchError(
            f"{setting} of {name} (its order depends on it)", state[setting], current[setting], remedy
        )
    if setting == "prefetch_factor" or (state["do_items_draw"] is False and not is_dealt):
        return []
    if WORD not in allow:
        remedy = f"Start the same workers, or accept that items draw other random numbers with allow=({WORD!r},)."
        raise StateMismatchError(f"{setting} of {name}", state[setting], current[setting], remedy)
    return [f"{setting}: {state[setting]!r} → {current[setting]!r}, items draw other random numbers"]


def _draws_as_it_goes(state: Mapping[str, Any]) -> bool:
    """Whether the sampler drew from a global stream between the draws of others, after its first batch."""
    entries = state["sampler"]["log"]["entries"] if state["sampler"] is not None else []
    return any(index > 1 and not GLOBAL_STREAMS.isdisjoint(streams) for index, streams in entries)
