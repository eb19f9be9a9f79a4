"""What a loader reads, in a few plain values: enough to notice that it is not the loader of the save."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_resume.errors import DataChangedError

# field -> the word in `allow` that lets a difference pass
OVERRIDES = {
    "number of training loaders": "data_changed",
    "data_version": "data_changed",
    "data set type": "data_changed",
    "data set length": "data_changed",
    "batch_size": "batch_size_changed",
    "drop_last": "drop_last_changed",
    "sampler": "sampler_changed",
}


def loader_identity(loader: Any) -> dict[str, Any]:
    """Describes a loader by plain values; what cannot be told (the length of a stream) is None."""
    dataset = getattr(loader, "dataset", loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None) if hasattr(batch_sampler, "sampler") else None
    sampler = sampler if sampler is not None else batch_sampler or getattr(loader, "sampler", None)
    return {
        "data set type": type(dataset).__qualname__,
        "data set length": _length(dataset),
        "batch_size": getattr(loader, "batch_size", None) or getattr(batch_sampler, "batch_size", None),
        "drop_last": getattr(loader, "drop_last", None) or bool(getattr(batch_sampler, "drop_last", False)),
        "sampler": None if sampler is None else type(sampler).__qualname__,
    }


def check_identity(
    saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]], allow: Collection[str]
) -> list[str]:
    """Compares the loaders of the save with those of this run.

    Returns:
        The differences that `allow` lets pass, one text each.

    Raises:
        DataChangedError: a difference that it does not; the error names field, both values and the word.
    """
    allowed: list[str] = []
    _compare("number of training loaders", len(saved), len(current), allow, allowed)
    for before, now in zip(saved, current, strict=False):
        for field in before:
            _compare(field, before[field], now.get(field), allow, allowed)
    return allowed


def _compare(field: str, saved: Any, current: Any, allow: Collection[str], allowed: list[str]) -> None:
    if saved == current:
        return
    word = OVERRIDES[field]
    if word not in allow:
        raise DataChangedError(
            field, saved, current, f"Resume with the data of the save, or accept the difference with allow=({word!r},)."
        )
    allowed.append(f"{field}: {saved!r} → {current!r}")


def check_data_version(saved: str | None, current: str | None, allow: Collection[str]) -> list[str]:
    """Compares the user's own data version strings; like `check_identity`."""
    allowed: list[str] = []
    _compare("data_version", saved, current, allow, allowed)
    return allowed


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
