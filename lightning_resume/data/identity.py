"""What a loader reads, in a few plain values: enough to notice that it is not the loader of the save."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_resume.data.digest import DigestTimeoutError, describe
from lightning_resume.data.fingerprint import Parts, fingerprint, lasting_fingerprint
from lightning_resume.data.sampler import FastForwardSampler
from lightning_resume.errors import DataChangedError, StateMismatchError

# field -> the word in `allow` that lets a difference pass
OVERRIDES = {
    "number of training loaders": "data_changed",
    "data_version": "data_changed",
    "data set type": "data_changed",
    "data set length": "data_changed",
    "data set fingerprint": "data_changed",
    "batch_size": "batch_size_changed",
    "drop_last": "drop_last_changed",
    "shuffle": "sampler_changed",
    "sampler": "sampler_changed",
    "sampler settings": "sampler_changed",
}

# What decides a sampler's order besides the streams; of torch's own samplers only, exactly.
_SETTINGS: dict[type, tuple[str, ...]] = {
    RandomSampler: ("replacement", "_num_samples"),
    WeightedRandomSampler: ("weights", "num_samples", "replacement"),
    SubsetRandomSampler: ("indices",),
    DistributedSampler: ("seed",),
}
_MAX_SHOWN = 8


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was at the save.

    Attributes:
        field: what.
        saved: its value at the save.
        current: its value now.
        word: of `allow`, which lets it pass.
        error: what it is refused with.
    """

    field: str
    saved: Any
    current: Any
    word: str
    error: type[StateMismatchError] = DataChangedError

    def __str__(self) -> str:
        """For a line of the log."""
        return f"{self.field}: {self.saved!r} → {self.current!r}"


def loader_identity(loader: Any, *, is_lasting: bool = False) -> dict[str, Any]:
    """Describes a loader by plain values; what cannot be told (the length of a stream) is None.

    Args:
        loader: the user's loader, or a wrapped one.
        is_lasting: for a checkpoint: without what its data set has changed in itself since training began.
    """
    dataset = getattr(loader, "dataset", loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = _chain(batch_sampler if batch_sampler is not None else getattr(loader, "sampler", None))
    return {
        "data set type": type(dataset).__qualname__,
        "data set length": _length(dataset),
        "data set fingerprint": lasting_fingerprint(dataset) if is_lasting else fingerprint(dataset),
        "batch_size": getattr(loader, "batch_size", None) or getattr(batch_sampler, "batch_size", None),
        "drop_last": getattr(loader, "drop_last", None) or bool(getattr(batch_sampler, "drop_last", False)),
        "shuffle": _shuffle(samplers[-1]) if samplers else None,
        "sampler": " of ".join(type(sampler).__qualname__ for sampler in samplers) or None,
        "sampler settings": _settings(samplers[-1]) if samplers else None,
    }


def data_differences(saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Compares the loaders of the save with those of this run, field by field.

    A field that the save did not know is not compared. With another number of loaders nothing else is: which one
    would be which is unknown.
    """
    if len(saved) != len(current):
        field = "number of training loaders"
        return [Difference(field, len(saved), len(current), OVERRIDES[field])]
    differences = []
    for index, (before, now) in enumerate(zip(saved, current, strict=True)):
        place = f" of training loader {index}" if len(saved) > 1 else ""
        differences += [
            Difference(field + place, *sides, OVERRIDES[field]) for field, sides in _changed_fields(before, now).items()
        ]
    return differences


def data_version_differences(saved: str | None, current: str | None) -> list[Difference]:
    """Compares the user's own data version strings."""
    field = "data_version"
    return [Difference(field, saved, current, OVERRIDES[field])] if saved != current else []


def settle(differences: Sequence[Difference], allow: Collection[str]) -> list[str]:
    """Lets pass what is allowed.

    Returns:
        The differences, one text each.

    Raises:
        StateMismatchError: some are not allowed: the first is the error's, the others are listed in its message, with
            the words that would let all of them pass.
    """
    refused = [difference for difference in differences if difference.word not in allow]
    if not refused:
        return [str(difference) for difference in differences]
    first, *others = refused
    words = tuple(dict.fromkeys(difference.word for difference in refused))
    kind = "differences" if others else "difference"
    remedy = f"Resume with what was there at the save, or accept the {kind} with allow={words!r}."
    if others:
        remedy = f"Also different: {'; '.join(map(str, others))}.\n{remedy}"
    raise first.error(first.field, first.saved, first.current, remedy)


def _changed_fields(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    changed = {
        field: (saved[field], current[field])
        for field in OVERRIDES
        if field in saved and field in current and saved[field] != current[field]
    }
    fingerprint, kinds = "data set fingerprint", {"data set type", "data set length"}
    if fingerprint in changed:
        sides = _differing_parts(*changed[fingerprint])
        if sides is None or kinds & set(changed):  # of another class or length, it says nothing new
            del changed[fingerprint]
        else:
            changed[fingerprint] = sides
    if {"shuffle", "sampler"} <= set(changed):  # one of them because of the other
        del changed["shuffle" if None in changed["shuffle"] else "sampler"]
    if {"shuffle", "sampler"} & set(changed):
        changed.pop("sampler settings", None)
    return changed


def _differing_parts(saved: Parts, current: Parts) -> tuple[str, str] | None:
    """Both sides of what both have; a part that one side lacks was changed by use, or is new in the code."""
    common = [path for path in saved if path in current]
    differing = [path for path in common if saved[path] != current[path]]
    if saved and current and not common:
        return _shown(saved, list(saved)), _shown(current, list(current))
    return (_shown(saved, differing), _shown(current, differing)) if differing else None


def _shown(parts: Parts, paths: Sequence[str]) -> str:
    more = [f"… ({len(paths)} in all)"] if len(paths) > _MAX_SHOWN else []
    return ", ".join([f"{path} {parts[path]}".strip() for path in paths[:_MAX_SHOWN]] + more)


def _chain(sampler: Any) -> list[Any]:
    """A sampler and those inside it, without plain batch samplers and the wrappers of this package and of Lightning."""
    chain: list[Any] = []
    while sampler is not None and all(sampler is not known for known in chain):
        chain.append(sampler)
        hidden = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # Lightning's DistributedSamplerWrapper
        sampler = getattr(sampler, "sampler", hidden)
    return [sampler for sampler in chain if not _is_wrapper(sampler)] or chain[-1:]


def _is_wrapper(sampler: Any) -> bool:
    is_plain = isinstance(sampler, BatchSampler) and type(sampler).__qualname__ == "BatchSampler"  # torchdata's too
    return is_plain or isinstance(sampler, FastForwardSampler)


def _shuffle(sampler: Any) -> str | None:
    """Whether the order is shuffled: "on" or "off", where it can be told."""
    if isinstance(sampler, RandomSampler) or type(sampler).__qualname__ == "RandomSampler":  # torchdata has its own
        return "on"
    if isinstance(sampler, SequentialSampler):
        return "off"
    shuffle = getattr(sampler, "shuffle", None)
    return ("on" if shuffle else "off") if isinstance(shuffle, bool) else None


def _settings(sampler: Any) -> str | None:
    names = _SETTINGS.get(type(sampler), ())
    try:
        texts = [(name, describe(getattr(sampler, name, None), float("inf"))) for name in names]
    except DigestTimeoutError:  # it has all the time that it needs
        return None
    return ", ".join(f"{name.lstrip('_')} {text}" for name, text in texts if text is not None) or None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
