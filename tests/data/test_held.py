"""`find_generators`: random generators that the user's objects hold, found and named without touching them."""

from __future__ import annotations

import functools
import random
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from lightning_resume.data.held import MAX_ITEMS, find_generators, get_state, set_state


def new_generators() -> list[Any]:
    """One of each kind, and numpy's with each of its bit generators."""
    bit_generators = [np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64, np.random.MT19937]
    return [
        random.Random(1),
        torch.Generator().manual_seed(1),
        np.random.RandomState(1),
        *[np.random.Generator(cls(1)) for cls in bit_generators],
    ]


def draw(generator: Any) -> list[float]:
    """A few numbers; an odd number of gaussians, so that one is pending where they are made in pairs."""
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1)]
    if isinstance(generator, np.random.RandomState):
        return [generator.rand(), generator.randn()]
    return [generator.random(), generator.normal(), float(generator.integers(1000, dtype=np.uint32))]


class Holder:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self) -> None:
        """A method, which leads to its object."""


class Slotted:
    """An object without a dict."""

    __slots__ = ("rng", "unset")

    def __init__(self, rng: Any) -> None:
        self.rng = rng


RNG = random.Random(5)
PLACES: dict[str, tuple[object, str]] = {
    "attribute": (Holder(rng=RNG), "x.rng"),
    "dict": ({"a": {"b": RNG}}, "x.a.b"),
    "list": ([0, [1, RNG]], "x.1.1"),
    "tuple": ((RNG,), "x.0"),
    "deque": (deque([1, RNG]), "x.1"),
    "slot": (Slotted(RNG), "x.rng"),
    "partial": (functools.partial(print, RNG), "x.args.0"),
    "partial's keyword": (functools.partial(print, end=RNG), "x.keywords.end"),
    "closure": ((lambda rng: lambda: rng.random())(RNG), "x.rng"),
    "bound method": (Holder(rng=RNG).method, "x.self.rng"),
    "deep": (Holder(transforms=[Holder(noise=Holder(rng=RNG))]), "x.transforms.0.noise.rng"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_generator_is_found_where_it_is_held(place: str) -> None:
    """RNG-14: in attributes, containers, partials, closures, methods; its name is the way to it."""
    owner, path = PLACES[place]

    found = find_generators({"x": owner})

    assert {name: generator is RNG for name, generator in found.items()} == {path: True}


@pytest.mark.parametrize("index", range(8))
def test_a_state_can_be_read_and_set(index: int) -> None:
    """Every kind of generator goes on as it went on; reading the state draws nothing, and equal states are equal."""
    generator, other = new_generators()[index], new_generators()[index]
    draw(generator)
    state = get_state(generator)
    expected = [draw(generator), draw(generator)]

    set_state(other, state)

    assert get_state(other) == state
    assert [draw(other), draw(other)] == expected
    assert get_state(other) != state


def test_a_generator_that_is_held_twice_is_found_once() -> None:
    """Two names of one stream are one stream, under the shorter name."""
    shared = np.random.default_rng(0)

    found = find_generators({"dataset": Holder(rng=shared, transform=Holder(rng=shared))})

    assert list(found) == ["dataset.rng"]


def test_a_circle_is_walked_once() -> None:
    """Objects that hold each other are no trap."""
    left, right = Holder(rng=RNG), Holder()
    left.right, right.left = right, left  # type: ignore[attr-defined]

    found = find_generators({"x": right})

    assert list(found) == ["x.left.rng"]


def test_the_global_streams_are_not_held_by_anybody() -> None:
    """Who keeps the global stream in an attribute holds nothing new: it is captured as the global one."""
    owner = Holder(torch=torch.default_generator, numpy=np.random.mtrand._rand, python=random._inst)  # type: ignore[attr-defined]

    found = find_generators({"x": owner})

    assert found == {}


def test_nothing_of_the_users_is_called() -> None:
    """Looking for generators runs no property and no `__getattr__`: it has no effects."""

    class Touchy:
        def __init__(self) -> None:
            self.rng = RNG

        @property
        def trap(self) -> Any:
            raise RuntimeError("was called")

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("was called")

        def __len__(self) -> int:
            raise RuntimeError("was called")

        def __iter__(self) -> Any:
            raise RuntimeError("was called")

    assert list(find_generators({"x": Touchy()})) == ["x.rng"]


def test_what_is_stopped_at_is_not_entered() -> None:
    """A sampler's data set is the loader's matter."""
    dataset = Holder(rng=RNG)

    found = find_generators({"sampler": Holder(data_source=dataset)}, stop=[dataset])

    assert found == {}


def test_a_large_container_is_not_searched_to_its_end() -> None:
    """A list of a million samples is data; generators stand among the first few entries, or nowhere."""
    found = find_generators({"x": [0] * MAX_ITEMS + [RNG]})

    assert found == {}


def test_generators_of_classes_and_default_arguments_are_found() -> None:
    """What all objects of a class share, or a function keeps as a default, goes on too."""
    shared = np.random.default_rng(1)

    class Sharing:
        rng = shared

    def augment(item: int, rng: random.Random = RNG) -> int:
        return item

    found = find_generators({"dataset": Sharing(), "collate_fn": augment})

    assert found["dataset.rng"] is shared
    assert found["collate_fn.defaults.0"] is RNG


def test_the_systems_randomness_is_named() -> None:
    """`SystemRandom` has no state: it is left out, with a warning that names it."""
    with pytest.warns(UserWarning, match="dataset.rng draws from the operating system"):
        found = find_generators({"dataset": Holder(rng=random.SystemRandom())})

    assert found == {}


def test_a_stand_in_counts_as_what_it_stands_for() -> None:
    """A weak proxy, or an object that gives another class for its own, of a generator; nothing of one that is gone."""
    shared, other = random.Random(1), Holder(rng=RNG)
    gone = weakref.proxy(Holder())

    class StandIn:
        """Hands on what is asked of it."""

        __class__ = random.Random  # type: ignore[assignment]

        def getstate(self) -> Any:
            return shared.getstate()

    stand_in = StandIn()
    found = find_generators({"x": {"proxy": weakref.proxy(shared), "other": weakref.proxy(other), "gone": gone}})
    found |= find_generators({"y": stand_in})

    assert list(found) == ["x.proxy", "x.other.rng", "y"]
    assert found["y"] is stand_in


def test_a_class_that_changes_is_looked_at_again() -> None:
    """What is known of classes is known for one search only."""

    class Changing:
        """Is given a generator later."""

    owner = [Changing(), Changing()]
    before = find_generators({"x": owner})
    Changing.rng = RNG  # type: ignore[attr-defined]

    assert before == {}
    assert list(find_generators({"x": owner})) == ["x.0.rng"]


class Items(list[Any]):
    """A list that weak references can refer to."""


class Entries(dict[str, Any]):
    """A dict that weak references can refer to."""


def holds_default(rng: Any = RNG) -> None:
    """Holds a generator as a default."""


@pytest.mark.parametrize(
    ("held", "path"),
    [
        (Items([RNG]), "x.0.0"),
        (Entries(rng=RNG), "x.0.rng"),
        (functools.partial(print, RNG), "x.0.args.0"),
        (holds_default, "x.0.defaults.0"),
    ],
    ids=["list", "dict", "partial", "function"],
)
def test_what_a_weak_proxy_shows_is_searched(held: Any, path: str) -> None:
    """It is as if the object itself stood there."""
    assert list(find_generators({"x": [weakref.proxy(held)]})) == [path]


@pytest.mark.parametrize("error", [AttributeError, ValueError])
def test_an_object_that_does_not_tell_its_class_is_searched(error: type[Exception]) -> None:
    """What it holds is found all the same."""

    class Silent(Holder):
        """Fails where it is asked for its class."""

        @property
        def __class__(self) -> Any:
            raise error

    assert list(find_generators({"x": Silent(rng=RNG)})) == ["x.rng"]


@pytest.mark.parametrize("shown", [list, dict, functools.partial], ids=lambda shown: shown.__name__)
def test_an_object_that_is_a_container_by_name_only_is_searched(shown: type) -> None:
    """It has attributes, as any object, and fails where it is asked for items."""
    stand_in = type("StandIn", (Holder,), {"__class__": shown})(rng=RNG)

    assert list(find_generators({"x": stand_in})) == ["x.rng"]


def test_many_small_records_do_not_hide_a_generator() -> None:
    """More of them than objects are looked at, in attributes that come first."""
    records = {f"part{part}": [(part, item) for item in range(4096)] for part in range(6)}

    assert list(find_generators({"x": Holder(size=1, **records, rng=RNG)})) == ["x.rng"]


def test_the_systems_randomness_in_a_class_is_named() -> None:
    """As if the object itself held it."""

    class Drawing(Holder):
        """Shares it among its objects."""

        rng = random.SystemRandom()

    with pytest.warns(UserWarning, match=r"x\.rng draws from the operating system"):
        assert find_generators({"x": Drawing()}) == {}
