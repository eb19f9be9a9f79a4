"""What a loader reads, in a few plain values, and what a resume may find changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from training import Buckets, EpochSampler, Items, Scaled, Stream, torchdata_loader

from lightning_resume import DataChangedError, FastForwardSampler, ResumableLoader
from lightning_resume.data.identity import (
    Difference,
    data_differences,
    data_version_differences,
    loader_identity,
    settle,
)
from lightning_resume.errors import StateMismatchError


class Curriculum(Sampler[int]):
    """A user's sampler around another one."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler


class Grouped(BatchSampler):
    """A user's batch sampler with one more argument."""

    def __init__(self, groups: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.groups = groups


NO_SETTINGS = {"sampler settings": None}
ITEMS = {"data set type": "Items", "data set length": 24, "data set fingerprint": {"num_items": "= 24"}}
ON = {"shuffle": "on", "sampler": "RandomSampler", "sampler settings": "replacement = False"}
OFF = {"shuffle": "off", "sampler": "SequentialSampler", **NO_SETTINGS}
IDENTITIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shuffled": (
        lambda: DataLoader(Items(), 4, shuffle=True),
        {**ITEMS, "batch_size": 4, "drop_last": False, **ON},
    ),
    "drop last": (
        lambda: DataLoader(Items(), 4, drop_last=True),
        {**ITEMS, "batch_size": 4, "drop_last": True, **OFF},
    ),
    "batch sampler": (
        lambda: DataLoader(Items(), batch_sampler=BatchSampler(RandomSampler(Items()), 4, True)),
        {**ITEMS, "batch_size": 4, "drop_last": True, **ON},
    ),
    "own batch sampler": (
        lambda: DataLoader(Items(), batch_sampler=Buckets()),
        {**ITEMS, "batch_size": None, "drop_last": False, "shuffle": None, "sampler": "Buckets", **NO_SETTINGS},
    ),
    "own batch sampler around another sampler": (
        lambda: DataLoader(Items(), batch_sampler=Grouped(2, RandomSampler(Items()), 4, False)),
        {**ITEMS, "batch_size": 4, "drop_last": False, **ON, "sampler": "Grouped of RandomSampler"},
    ),
    "own sampler": (
        lambda: DataLoader(Items(), 4, sampler=EpochSampler()),
        {**ITEMS, "batch_size": 4, "drop_last": False, "shuffle": None, "sampler": "EpochSampler", **NO_SETTINGS},
    ),
    "own sampler around another": (
        lambda: DataLoader(Items(), 4, sampler=Curriculum(RandomSampler(Items()))),
        {**ITEMS, "batch_size": 4, "drop_last": False, **ON, "sampler": "Curriculum of RandomSampler"},
    ),
    "this package's sampler": (
        lambda: DataLoader(Items(), 4, sampler=FastForwardSampler(RandomSampler(Items()))),
        {**ITEMS, "batch_size": 4, "drop_last": False, **ON},
    ),
    "distributed": (
        lambda: DataLoader(Items(), 4, sampler=DistributedSampler(Items(), 2, 0, shuffle=False, seed=5)),
        {
            **ITEMS,
            "batch_size": 4,
            "drop_last": False,
            "shuffle": "off",
            "sampler": "DistributedSampler",
            "sampler settings": "seed = 5",
        },
    ),
    "unbatched": (
        lambda: DataLoader(Items(), batch_size=None),
        {**ITEMS, "batch_size": None, "drop_last": False, **OFF},
    ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_loader_is_described_by_plain_values(name: str) -> None:
    """What is compared at a resume: the data set, batch size, drop_last, and what decides the order."""
    make, expected = IDENTITIES[name]

    assert loader_identity(make()) == expected


def test_an_iterable_is_described_too() -> None:
    """A loader that is no DataLoader is its own data set."""
    identity = loader_identity([1, 2, 3])

    assert (identity["data set type"], identity["data set length"], identity["sampler"]) == ("list", 3, None)
    assert identity["data set fingerprint"]["items"].startswith("list of 3 ")


def test_torchdatas_samplers_are_samplers() -> None:
    """Its loader brings batch samplers of its own, which are plain ones."""
    identity = loader_identity(torchdata_loader(Items(), shuffle=True))

    assert (identity["batch_size"], identity["shuffle"], identity["sampler"]) == (4, "on", "RandomSampler")


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
    ("shuffle", "off", "sampler_changed"),
    ("sampler", "Curriculum", "sampler_changed"),
    ("sampler settings", "replacement = True", "sampler_changed"),
]
WORDS = {word for _, _, word in CHANGES}


@pytest.mark.parametrize(("field", "value", "word"), CHANGES)
def test_a_change_is_refused_by_name(field: str, value: Any, word: str) -> None:
    """DAT-21: the error names the field, tells both values, and the word that would let it pass."""
    saved = loader_identity(DataLoader(Items(), 4, shuffle=True))
    differences = data_differences([saved], [{**saved, field: value}])

    with pytest.raises(DataChangedError, match=field) as caught:
        settle(differences, allow=WORDS - {word})

    assert (caught.value.field, caught.value.saved, caught.value.current) == (field, saved[field], value)
    assert f"accept the difference with allow=({word!r},)" in str(caught.value)


@pytest.mark.parametrize(("field", "value", "word"), CHANGES)
def test_a_change_that_is_allowed_is_told(field: str, value: Any, word: str) -> None:
    """An override lets its own kind of change pass, and says so."""
    saved = loader_identity(DataLoader(Items(), 4, shuffle=True))

    told = settle(data_differences([saved], [{**saved, field: value}]), allow=(word,))

    assert told == [f"{field}: {saved[field]!r} → {value!r}"]


def test_the_same_loaders_pass() -> None:
    """Nothing is told where nothing differs."""
    saved = [loader_identity(DataLoader(Items(), 4)), loader_identity([1, 2])]

    assert settle(data_differences(saved, [dict(identity) for identity in saved]), allow=()) == []


def test_several_changes_are_refused_in_one_error() -> None:
    """The first is the error's own, the others stand in its message, with all the words that are missing."""
    saved = loader_identity(DataLoader(Items(), 4, shuffle=True))
    now = loader_identity(DataLoader(Items(), 2, drop_last=True))

    with pytest.raises(DataChangedError) as caught:
        settle(data_differences([saved], [now]), allow=("drop_last_changed",))

    assert str(caught.value) == (
        "cannot resume exactly: the data changed (batch_size)\n"
        "  saved:   4\n"
        "  current: 2\n"
        "Also different: shuffle: 'on' → 'off'.\n"
        "Resume with what was there at the save, or accept the differences with "
        "allow=('batch_size_changed', 'sampler_changed')."
    )


def test_the_error_is_that_of_the_first_difference() -> None:
    """What is not about the data is no DataChangedError."""
    differences = [
        Difference("precision", "32-true", "64-true", "precision_changed", StateMismatchError),
        Difference("batch_size", 4, 2, "batch_size_changed"),
    ]

    with pytest.raises(StateMismatchError, match="precision differs") as caught:
        settle(differences, allow=())

    assert type(caught.value) is StateMismatchError
    assert "Also different: batch_size: 4 → 2." in str(caught.value)


def test_another_number_of_loaders_is_refused() -> None:
    """One loader more or less is other data; which of them is new is unknown."""
    saved = loader_identity(DataLoader(Items(), 4))

    differences = data_differences([saved], [loader_identity([1]), saved])

    assert differences == [Difference("number of training loaders", 1, 2, "data_changed")]


def test_one_of_several_loaders_is_named() -> None:
    """Where there are several, the difference says in which."""
    saved = loader_identity(DataLoader(Items(), 4))

    differences = data_differences([saved, saved], [saved, {**saved, "batch_size": 2}])

    assert differences == [Difference("batch_size of training loader 1", 4, 2, "batch_size_changed")]


def test_other_content_is_told_by_the_attribute() -> None:
    """Of two fingerprints the parts that differ are shown; data of another type or length is not told twice."""
    rows = torch.arange(8.0)
    saved = loader_identity(DataLoader(TensorDataset(rows, rows)))

    changed = data_differences([saved], [loader_identity(DataLoader(TensorDataset(rows, rows + 1)))])
    shorter = data_differences([saved], [loader_identity(DataLoader(TensorDataset(rows[:4], rows[:4])))])

    assert [(d.field, d.word) for d in changed] == [("data set fingerprint", "data_changed")]
    assert changed[0].saved == f"tensors.1 {saved['data set fingerprint']['tensors.1']}"
    assert changed[0].current.startswith("tensors.1 float32 (8,) ")
    assert [d.field for d in shorter] == ["data set length"]


@pytest.mark.parametrize(
    ("saved", "current", "fields"),
    [
        ({"a": "1", "b": "2"}, {"a": "1", "c": "3"}, []),
        ({"a": "1"}, {}, []),
        ({}, {"a": "1"}, []),
        ({"a": "1"}, {"b": "1"}, ["data set fingerprint"]),
        ({f"a{i}": "1" for i in range(9)}, {f"a{i}": "2" for i in range(9)}, ["data set fingerprint"]),
    ],
)
def test_fingerprints_are_compared_where_both_sides_have_a_part(
    saved: dict[str, str], current: dict[str, str], fields: list[str]
) -> None:
    """A part that one side lacks was left out because use changed it; nothing in common at all is a difference."""
    identity = loader_identity(DataLoader(Items(), 4))

    differences = data_differences(
        [{**identity, "data set fingerprint": saved}], [{**identity, "data set fingerprint": current}]
    )

    assert [difference.field for difference in differences] == fields
    assert all(len(difference.saved) < 100 for difference in differences)


def test_what_an_older_checkpoint_does_not_know_is_not_compared() -> None:
    """A field that was not saved cannot differ."""
    now = loader_identity(DataLoader(Items(), 4, shuffle=True))
    older = {field: now[field] for field in ("data set type", "data set length", "batch_size")}

    assert data_differences([older], [now]) == []


WEIGHTS = torch.ones(24)
ORDERS: dict[str, tuple[Any, Any]] = {
    "weights": (WeightedRandomSampler(WEIGHTS, 24), WeightedRandomSampler(WEIGHTS * torch.arange(24), 24)),
    "number of samples": (WeightedRandomSampler(WEIGHTS, 24), WeightedRandomSampler(WEIGHTS, 20)),
    "replacement": (RandomSampler(Items()), RandomSampler(Items(), replacement=True)),
    "indices": (SubsetRandomSampler([0, 1, 2]), SubsetRandomSampler([0, 1, 3])),
    "seed": (DistributedSampler(Items(), 2, 0, seed=1), DistributedSampler(Items(), 2, 0, seed=2)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_other_settings_of_a_sampler_are_refused(name: str) -> None:
    """Of torch's samplers everything that decides the order is compared."""
    before, now = (loader_identity(DataLoader(Items(), 4, sampler=sampler)) for sampler in ORDERS[name])

    differences = data_differences([before], [now])

    assert [(d.field, d.word) for d in differences] == [("sampler settings", "sampler_changed")]


def test_another_data_version_is_refused() -> None:
    """The user's own name for the data: changed, or newly given, it is refused unless that is allowed."""
    changed = data_version_differences("v1", None)

    assert data_version_differences("v1", "v1") == data_version_differences(None, None) == []
    assert settle(data_version_differences("v1", "v2"), allow=("data_changed",)) == ["data_version: 'v1' → 'v2'"]
    with pytest.raises(DataChangedError, match="data_version") as caught:
        settle(changed, allow=())
    assert (caught.value.saved, caught.value.current) == ("v1", None)
