"""What a loader reads, in a few plain values, and what a resume may find changed."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from training import Buckets, EpochSampler, Items, Scaled, Stream

from lightning_resume import DataChangedError, ResumableLoader
from lightning_resume.data.identity import check_data_version, check_identity, loader_identity

ITEMS = {"data set type": "Items", "data set length": 24}
IDENTITIES: list[tuple[str, Any, dict[str, Any]]] = [
    (
        "shuffled",
        lambda: DataLoader(Items(), 4, shuffle=True),
        {**ITEMS, "batch_size": 4, "drop_last": False, "sampler": "RandomSampler"},
    ),
    (
        "drop last",
        lambda: DataLoader(Items(), 4, drop_last=True),
        {**ITEMS, "batch_size": 4, "drop_last": True, "sampler": "SequentialSampler"},
    ),
    (
        "batch sampler",
        lambda: DataLoader(Items(), batch_sampler=BatchSampler(RandomSampler(Items()), 4, True)),
        {**ITEMS, "batch_size": 4, "drop_last": True, "sampler": "RandomSampler"},
    ),
    (
        "own batch sampler",
        lambda: DataLoader(Items(), batch_sampler=Buckets()),
        {**ITEMS, "batch_size": None, "drop_last": False, "sampler": "Buckets"},
    ),
    (
        "own sampler",
        lambda: DataLoader(Items(), 4, sampler=EpochSampler()),
        {**ITEMS, "batch_size": 4, "drop_last": False, "sampler": "EpochSampler"},
    ),
    (
        "unbatched",
        lambda: DataLoader(Items(), batch_size=None),
        {**ITEMS, "batch_size": None, "drop_last": False, "sampler": "SequentialSampler"},
    ),
    (
        "list",
        lambda: [1, 2, 3],
        {"data set type": "list", "data set length": 3, "batch_size": None, "drop_last": False, "sampler": None},
    ),
]


@pytest.mark.parametrize(("make", "expected"), [case[1:] for case in IDENTITIES], ids=[case[0] for case in IDENTITIES])
def test_a_loader_is_described_by_plain_values(make: Any, expected: dict[str, Any]) -> None:
    """What is compared at a resume: type and length of the data set, batch size, drop_last, sampler."""
    assert loader_identity(make()) == expected


def test_the_length_of_a_stream_is_unknown() -> None:
    """A data set without a length has none to compare; nobody asks for it again and again."""
    identity = loader_identity(DataLoader(Stream(), 4))

    assert (identity["data set type"], identity["data set length"]) == ("Stream", None)


def test_the_wrapper_is_not_part_of_the_identity() -> None:
    """A wrapped loader is the loader."""
    assert loader_identity(ResumableLoader(Scaled(2.0))) == loader_identity(Scaled(2.0))


CHANGES = [
    ("data set type", "Other", "data_changed"),
    ("data set length", 36, "data_changed"),
    ("batch_size", 8, "batch_size_changed"),
    ("drop_last", True, "drop_last_changed"),
    ("sampler", "SequentialSampler", "sampler_changed"),
]


@pytest.mark.parametrize(("field", "value", "word"), CHANGES)
def test_a_change_is_refused_by_name(field: str, value: Any, word: str) -> None:
    """DAT-21: the error names the field, tells both values, and the word that would let it pass."""
    saved = loader_identity(DataLoader(Items(), 4, shuffle=True))

    with pytest.raises(DataChangedError, match=field) as caught:
        check_identity([saved], [{**saved, field: value}], allow=())

    assert (caught.value.field, caught.value.saved, caught.value.current) == (field, saved[field], value)
    assert f"allow=({word!r},)" in str(caught.value)


@pytest.mark.parametrize(("field", "value", "word"), CHANGES)
def test_a_change_that_is_allowed_is_told(field: str, value: Any, word: str) -> None:
    """An override lets its own kind of change pass, and says so; no other kind."""
    saved = loader_identity(DataLoader(Items(), 4, shuffle=True))
    others = {other for _, _, other in CHANGES} - {word}

    told = check_identity([saved], [{**saved, field: value}], allow=(word,))

    assert told == [f"{field}: {saved[field]!r} → {value!r}"]
    with pytest.raises(DataChangedError, match=field):
        check_identity([saved], [{**saved, field: value}], allow=others)


def test_the_same_loaders_pass() -> None:
    """Nothing is told where nothing differs."""
    saved = [loader_identity(DataLoader(Items(), 4)), loader_identity([1, 2])]

    assert check_identity(saved, [dict(identity) for identity in saved], allow=()) == []


def test_another_number_of_loaders_is_refused() -> None:
    """One loader more or less is other data."""
    saved = loader_identity(DataLoader(Items(), 4))

    with pytest.raises(DataChangedError, match="number of training loaders") as caught:
        check_identity([saved], [saved, saved], allow=())

    assert (caught.value.saved, caught.value.current) == (1, 2)


def test_another_data_version_is_refused() -> None:
    """The user's own name for the data: changed, or newly given, it is refused unless that is allowed."""
    assert check_data_version("v1", "v1", allow=()) == []
    assert check_data_version(None, None, allow=()) == []
    assert check_data_version("v1", "v2", allow=("data_changed",)) == ["data_version: 'v1' → 'v2'"]
    with pytest.raises(DataChangedError, match="data_version") as caught:
        check_data_version("v1", None, allow=())
    assert (caught.value.saved, caught.value.current) == ("v1", None)
