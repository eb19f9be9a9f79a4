"""Attributes that change as a run goes on: what is found, what is noted of it, and how it is put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from lightning_resume.data.evolving import IN_PLACE, EvolvingAttributes, Snapshot, data_owners


class Items(Dataset[int]):
    """A data set with attributes of a user's."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    @property
    def costly(self) -> int:
        raise AssertionError("a property was read")


class Transform:
    """A callable object."""

    def __call__(self, item: int) -> int:
        return item


def test_data_sets_and_transforms_inside_a_data_set_are_found() -> None:
    """Each one is named by its path; modules, functions and plain objects are not entered."""
    inner, transform = Items(), Transform()
    outer = Items(
        base=Subset(inner, [0]),
        parts=[Items(), inner],
        steps={"first": transform},
        net=nn.Linear(1, 1),
        function=len,
        file=SimpleNamespace(position=3),
    )

    owners = data_owners("dataset", outer)

    assert list(owners) == [
        "dataset",
        "dataset.base",
        "dataset.parts.0",
        "dataset.parts.1",
        "dataset.steps.first",
    ]
    assert owners["dataset.parts.1"] is inner
    assert owners["dataset.steps.first"] is transform


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0, 3),
        (None, "text"),
        (1, True),
        (0.0, -0.0),
        ([1, 2], [1, 3]),
        ((1,), [1]),
        ({"a": [1]}, {"a": [2]}),
        (torch.zeros(2), torch.ones(2)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (np.zeros(2), np.ones(3)),
        (np.zeros(2, np.float32), np.zeros(2, np.float64)),
    ],
)
def test_a_changed_attribute_is_put_back_in_another_process(before: Any, after: Any) -> None:
    """Another value or another type is a change; a data set that is built anew gets it."""
    items, again = Items(value=before), Items(value=before)
    watched, watched_again = EvolvingAttributes({"dataset": items}), EvolvingAttributes({"dataset": again})
    items.value = after

    watched_again.restore(watched.changed())

    assert Snapshot({"dataset": {"value": again.value}}) == Snapshot({"dataset": {"value": after}})
    assert type(again.value) is type(after)


def test_nothing_changed_is_nothing_to_put_back() -> None:
    """Attributes that are too large, or of a user's own classes, are not looked at."""
    items = Items(large=[0] * 1001, nested=[[0] * 600, [0] * 600], own=Transform(), plain=1)
    watched = EvolvingAttributes({"dataset": items})
    items.large[0] = items.nested[0][0] = 1
    items.own = Transform()

    assert watched.changed() == {}


def test_what_is_not_named_is_put_back_to_what_it_was() -> None:
    """A value that had changed, and has changed back at the save, changes back."""
    items = Items(phase=0, order=[1, 2])
    order = items.order
    watched = EvolvingAttributes({"dataset": items})
    saved = watched.changed()
    items.phase = 1
    items.order.reverse()

    watched.restore(saved)

    assert (items.phase, items.order) == (0, [1, 2])
    assert items.order is order


def test_what_was_changed_in_place_is_so_again() -> None:
    """Somebody else who holds the same list, dict, array or tensor sees the change."""
    names = ("list", "dict", "array", "tensor")
    first, again = (
        Items(list=[1], dict={"a": 1}, array=np.zeros(2), tensor=torch.zeros(2), other=[1]) for _ in range(2)
    )
    watched, watched_again = EvolvingAttributes({"dataset": first}), EvolvingAttributes({"dataset": again})
    held, other = [vars(again)[name] for name in names], again.other
    first.list.append(2)
    first.dict["b"] = 2
    first.array[0] = 1
    first.tensor[1] = 1
    first.other = [5]

    saved = watched.changed()
    watched_again.restore(saved)

    assert saved[IN_PLACE] == {"dataset": list(names)}
    assert all(vars(again)[name] is value for name, value in zip(names, held, strict=True))
    assert held[:2] == [[1, 2], {"a": 1, "b": 2}]
    assert held[2].tolist() == [1, 0]
    assert held[3].tolist() == [0, 1]
    assert (again.other, other) == ([5], [1])


def test_what_was_noted_does_not_change_with_its_owner() -> None:
    """A save keeps copies."""
    items = Items(order=[1], nested={"a": [1]}, tensor=torch.zeros(1))
    watched = EvolvingAttributes({"dataset": items})
    items.order[0] = items.nested["a"][0] = 2
    items.tensor[0] = 2

    saved = watched.changed()["dataset"]
    items.order[0] = items.nested["a"][0] = 3
    items.tensor[0] = 3

    assert (saved["order"], saved["nested"], saved["tensor"].tolist()) == ([2], {"a": [2]}, [2])
