"""Plain python objects come back equal in value and in type, or the save stops before it creates anything."""

from __future__ import annotations

import dataclasses
import enum
import math
import pathlib
import struct
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
import torch

from lightning_resume.errors import StateMismatchError, UnsupportedStateError
from lightning_resume.format import registry
from lightning_resume.format.checkpoint import read_checkpoint, register_type, write_checkpoint

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**63) - 1,
    7**20000,
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    1e22,
    math.inf,
    -math.inf,
    math.nan,
    struct.unpack("d", struct.pack("Q", 0xFFF8000000000123))[0],
    complex(-0.0, math.nan),
    "",
    "Grüße 😀 \0 \u2028 \x7f",
    "\ud800",
    "\ud83d\ude00",  # two lone surrogates, which JSON would join to one character
    "$",
    b"",
    b"\0\xff" * 3,
    bytes(range(256)) * 20,
    bytearray(b"abc"),
    bytearray(5000),
    [],
    (),
    {},
    [1, [2.0, (3, [None])], True],
    (1,),
    ((), []),
    [0.1 * i for i in range(2000)],
    tuple(range(-1000, 1000)),
    [2**63] * 600,
    [True] * 600,
    [math.nan, -0.0] * 400,
    [1, 2.0] * 400,
    {"a": 1, "b": {"$": 2, "c": (3,)}},
    {"$": "tensor", "f": "model", "n": "weight"},
    {"z": 1, "a": 2},
    {1: "int", "1": "str", 1.5: "float", None: "none", (1, "a"): "tuple", b"x": "bytes", False: "bool"},
    {True: "the key is True, not 1"},
    {-0.0: 1},
    {frozenset({1, 2}): {3: 4}},
    {"\ud800": 1},
    OrderedDict([("b", 1), ("a", OrderedDict())]),
    OrderedDict([(3, 1), ("a", 2)]),
    defaultdict(list, {"a": [1]}),
    defaultdict(int, {1: 2}),
    defaultdict(None, {"a": 1}),
    Counter({"x": 3, (1, 2): -1}),
    deque([1, 2, 3], maxlen=5),
    deque(maxlen=0),
    deque([1, "a"]),
    set(),
    {1, "a", (2, 3.0), None},
    frozenset({frozenset({1}), 2}),
    range(0),
    range(5, -7, -3),
    range(10**30),
    slice(None),
    slice(1, (2,), "x"),
    ...,
    pathlib.Path("a/b"),
    pathlib.PurePosixPath("/x"),
    pathlib.PureWindowsPath("c:\\x\\y"),
    datetime(2024, 2, 29, 23, 59, 59, 999999),
    datetime(1, 1, 1, tzinfo=timezone.utc),
    datetime(2024, 10, 27, 2, 30, tzinfo=timezone(timedelta(hours=-5, minutes=-30), "X"), fold=1),
    date(9999, 12, 31),
    time(1, 2, 3, 4, tzinfo=timezone.utc, fold=1),
    timedelta(days=-3, microseconds=7),
    timezone.utc,
    timezone(timedelta(minutes=90)),
    Decimal("-0.00"),
    Decimal("sNaN123"),
    Decimal("1E+999999"),
    Fraction(-7, 3),
    UUID(int=5),
    torch.Size([2, 0, 3]),
    torch.float8_e4m3fn,
    torch.complex128,
    torch.device("cuda", 1),
    torch.device("cpu"),
    torch.sparse_csr,
    torch.channels_last,
]


@pytest.mark.parametrize("value", VALUES, ids=[f"{number}-{type(v).__name__}" for number, v in enumerate(VALUES)])
def test_a_value_comes_back_equal_in_value_and_type(value: Any, round_trip: Any, same: Any) -> None:
    """Exact: nothing is turned into its nearest JSON relative."""
    result = round_trip(value)

    if isinstance(value, Decimal):
        assert type(result) is Decimal
        assert result.as_tuple() == value.as_tuple()
    else:
        assert same(result, value), (result, value)


def test_a_time_keeps_its_fold(round_trip: Any) -> None:
    """The second 02:30 of the night on which clocks go back is not the first: `==` does not see it."""
    value = datetime(2024, 10, 27, 2, 30, fold=1)

    result = round_trip(value)

    assert result == value
    assert result.fold == 1


def test_the_version_of_each_module_stays_on_a_state_dict(round_trip: Any) -> None:
    """`Module.state_dict()` carries versions as an attribute, and loading into a module asks for them."""
    value = torch.nn.BatchNorm1d(2).state_dict()

    result = round_trip(value)

    assert type(result) is OrderedDict
    assert result._metadata == OrderedDict([("", {"version": 2})])
    assert type(result._metadata) is OrderedDict


def test_the_order_of_keys_is_kept_everywhere(tmp_path: Any) -> None:
    """Groups are encoded in another order than they stand in, and nobody sees it."""
    keys = ["z", "optimizer_states", "a", "state_dict", "m"]
    state = {key: {"2": torch.ones(1), "1": torch.zeros(1)} for key in keys}

    write_checkpoint(tmp_path / "c", state)
    result = read_checkpoint(tmp_path / "c")

    assert list(result) == keys
    assert all(list(value) == ["2", "1"] for value in result.values())


class Text(str):
    """A str whose type would be lost."""


class Table(dict):
    """A dict whose type would be lost."""


class Level(enum.IntEnum):
    """An int whose type would be lost."""

    LOW = 1


class Pair(NamedTuple):
    """A tuple whose type would be lost."""

    left: Any
    right: Any


def _generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    "value",
    [
        Text("a"),
        Table(a=1),
        Level.LOW,
        Pair(1, 2),
        object(),
        int,
        torch.nn.Linear(1, 1),
        torch.Generator(),
        lambda: 1,
        print,
        math,
        threading.Lock(),
        _generator(),
        {}.keys(),
        memoryview(b"a"),
        datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC")),
        defaultdict(lambda: 1),
        iter([1]),
        NotImplemented,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_an_exact_encoding_stops_the_save_with_its_key_path(value: Any, tmp_path: Any) -> None:
    """Refused, never bent: the error names where the value is, and nothing is created."""
    state = {"callbacks": {"mine": [0, ("x", {7: value})]}}

    with pytest.raises(UnsupportedStateError) as caught:
        write_checkpoint(tmp_path / "deep" / "c", state)

    assert caught.value.key_path.startswith("callbacks.mine.1.1.7")
    assert isinstance(caught.value, TypeError)
    assert "register_type" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_refusal_names_the_type(tmp_path: Any) -> None:
    """A user reads which class is in the way."""
    with pytest.raises(UnsupportedStateError) as caught:
        write_checkpoint(tmp_path / "c", {"a": {"b": Text("x")}})

    assert caught.value.key_path == "a.b"
    assert caught.value.reason.endswith(f"{Text.__module__}.Text")


def test_a_key_without_an_exact_encoding_stops_the_save() -> None:
    """Keys are held to the same law as values."""
    with pytest.raises(UnsupportedStateError, match="exact encoding") as caught:
        write_checkpoint("never", {"a": {Text("x"): 1}})

    assert caught.value.key_path == "a.x"


def test_a_tensor_as_a_key_stops_the_save() -> None:
    """Its hash is its address, so it would never be found again."""
    with pytest.raises(UnsupportedStateError, match="a tensor as a key"):
        write_checkpoint("never", {"a": {torch.ones(1): 1}})


@pytest.mark.parametrize("key", [1, None, Text("a"), "\ud800"])
def test_a_top_level_key_must_be_a_plain_text(key: Any) -> None:
    """The top level is addressed by name."""
    with pytest.raises(UnsupportedStateError, match="plain texts"):
        write_checkpoint("never", {key: 1})


def test_a_cycle_is_refused_with_its_key_path() -> None:
    """A container inside itself has no end on disk."""
    inner: dict[str, Any] = {}
    inner["again"] = [inner]

    with pytest.raises(UnsupportedStateError, match="contains itself") as caught:
        write_checkpoint("never", {"a": inner})

    assert caught.value.key_path == "a.again.0"


def test_the_same_container_twice_is_no_cycle(round_trip: Any) -> None:
    """Shared containers are written twice; only a way back to oneself is refused."""
    shared = [1]

    result = round_trip([shared, shared, (shared,)])

    assert result == [[1], [1], ([1],)]


def test_nesting_is_bounded_and_what_is_allowed_comes_back(round_trip: Any) -> None:
    """Ninety levels of the worst kind can be saved and loaded; a thousand are refused, without a RecursionError."""
    allowed: Any = 0
    for _ in range(90):
        allowed = {1: allowed}
    too_deep: Any = 0
    for _ in range(1000):
        too_deep = [too_deep]

    assert round_trip(allowed) == allowed
    with pytest.raises(UnsupportedStateError, match="100 levels"):
        round_trip(too_deep)


def test_more_json_than_can_be_read_back_is_refused(monkeypatch: Any, tmp_path: Any) -> None:
    """What is written can be read: the bound holds on both sides."""
    monkeypatch.setattr("lightning_resume.format.skeleton.MAX_STATE_BYTES", 1000)

    with pytest.raises(UnsupportedStateError, match="bytes of JSON"):
        write_checkpoint(tmp_path / "c", {"a": ["x"] * 1000})

    assert list(tmp_path.iterdir()) == []


def test_a_long_loss_history_goes_to_the_data_file(tmp_path: Any) -> None:
    """A history of every step stays far from the bound of the JSON."""
    history = [0.1 * i for i in range(100_000)]

    index = write_checkpoint(tmp_path / "c", {"history": history})

    assert index.files["state.json"].num_bytes < 200
    assert read_checkpoint(tmp_path / "c") == {"history": history}


@dataclasses.dataclass(frozen=True)
class Settings:
    """A frozen dataclass with a check in its constructor."""

    rate: float
    names: tuple[str, ...]
    weight: Any = None
    derived: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        """Runs when a user makes one, not when it is loaded."""
        object.__setattr__(self, "derived", self.derived + 1)


@dataclasses.dataclass
class Slotted:
    """A dataclass without a __dict__."""

    __slots__ = ("x",)
    x: int


class Color(enum.Enum):
    """An enum whose values have no encoding of their own."""

    RED = object()
    BLUE = object()


class Access(enum.Flag):
    """A flag: combinations have no name."""

    READ = 1
    WRITE = 2


class Custom:
    """A class of the user's that is neither of these."""

    def __init__(self, data: Any) -> None:
        """Keeps some data."""
        self.data = data

    def __eq__(self, other: object) -> bool:
        """Compares the data."""
        return isinstance(other, Custom) and self.data == other.data


@pytest.fixture
def registered(monkeypatch: Any) -> None:
    """Registers the classes above for one test."""
    monkeypatch.setattr(registry, "BY_TYPE", {})
    monkeypatch.setattr(registry, "BY_NAME", {})
    for cls in (Settings, Slotted, Color, Access, Level, Pair):
        register_type(cls)
    register_type(Custom, name="custom", encode=lambda custom: {"data": custom.data}, decode=lambda d: Custom(**d))


@pytest.mark.parametrize(
    "value",
    [
        Settings(0.5, ("a",)),
        Slotted(3),
        Color.BLUE,
        Access.READ | Access.WRITE,
        Access(0),
        Level.LOW,
        Pair(1, Pair([2], None)),
        Custom({1: Color.RED}),
        {Color.RED: Settings(1.0, ())},
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_of_a_registered_class_comes_back(value: Any, registered: None, round_trip: Any, same: Any) -> None:
    """Dataclasses, namedtuples and enums need one line; any other class an encoder and a decoder."""
    result = round_trip(value)

    assert same(result, value)


def test_a_registered_class_may_hold_tensors(registered: None, round_trip: Any) -> None:
    """Fields are encoded like any other value."""
    value = Settings(0.5, (), weight=torch.arange(3))

    result = round_trip(value)

    assert torch.equal(result.weight, value.weight)


def test_loading_does_not_import_or_run_a_class_that_is_not_registered(
    registered: None, tmp_path: Any, monkeypatch: Any
) -> None:
    """A checkpoint only holds a name: without register_type nothing happens but an error that says what to call."""
    write_checkpoint(tmp_path / "c", {"a": [Custom(1)]})
    monkeypatch.setattr(registry, "BY_NAME", {})

    with pytest.raises(UnsupportedStateError, match=r"register_type\(\.\.\., name='custom'\)") as caught:
        read_checkpoint(tmp_path / "c")

    assert caught.value.key_path == "a.0"


def test_other_keys_load_without_the_class(registered: None, tmp_path: Any, monkeypatch: Any) -> None:
    """Whoever only wants the weights need not know the user's classes."""
    write_checkpoint(tmp_path / "c", {"a": Custom(1), "state_dict": {"w": torch.ones(2)}})
    monkeypatch.setattr(registry, "BY_NAME", {})

    result = read_checkpoint(tmp_path / "c", keys={"state_dict"})

    assert list(result) == ["state_dict"]


def test_a_dataclass_whose_fields_changed_is_refused(registered: None, tmp_path: Any, monkeypatch: Any) -> None:
    """Its objects would lack a value or have one too many."""
    write_checkpoint(tmp_path / "c", {"a": Slotted(1)})

    @dataclasses.dataclass
    class Other:
        y: int

    monkeypatch.setitem(registry.BY_NAME, f"{__name__}.Slotted", registry.BY_NAME[f"{__name__}.Settings"])

    with pytest.raises(StateMismatchError) as caught:
        read_checkpoint(tmp_path / "c")

    assert caught.value.field == "fields of Settings"
    assert caught.value.saved == ["x"]


def test_an_attribute_that_is_no_field_is_refused(registered: None, tmp_path: Any) -> None:
    """It would be lost."""
    value = Settings(1.0, ())
    object.__setattr__(value, "extra", 1)

    with pytest.raises(UnsupportedStateError, match="no fields: extra") as caught:
        write_checkpoint(tmp_path / "c", {"a": value})

    assert caught.value.key_path == "a"


def test_a_failing_encoder_or_decoder_is_named_with_the_key_path(registered: None, tmp_path: Any) -> None:
    """The user's own error is the cause, and the package says where it happened."""
    register_type(Custom, name="bad", encode=lambda custom: 1 / custom.data, decode=lambda x: {}[x])

    with pytest.raises(UnsupportedStateError, match="encoder of bad failed: ZeroDivisionError") as encoding:
        write_checkpoint(tmp_path / "c", {"a": {"b": Custom(0)}})
    write_checkpoint(tmp_path / "d", {"a": {"b": Custom(1)}})
    with pytest.raises(UnsupportedStateError, match="decoder of bad failed: KeyError") as decoding:
        read_checkpoint(tmp_path / "d")

    assert encoding.value.key_path == decoding.value.key_path == "a.b"
    assert isinstance(encoding.value.__cause__, ZeroDivisionError)


def test_an_encoder_that_returns_its_own_object_is_refused(registered: None, tmp_path: Any) -> None:
    """It would never come to an end."""
    register_type(Custom, name="loop", encode=lambda custom: custom, decode=lambda x: x)

    with pytest.raises(UnsupportedStateError, match="contains itself"):
        write_checkpoint(tmp_path / "c", {"a": Custom(1)})


def test_an_encoder_without_end_is_refused(registered: None, tmp_path: Any) -> None:
    """Also when each object is a new one, and no container marks the depth."""
    register_type(Custom, name="endless", encode=lambda custom: Custom(custom.data + 1), decode=lambda x: x)

    with pytest.raises(UnsupportedStateError, match="nested"):
        write_checkpoint(tmp_path / "c", {"a": Custom(1)})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((5,), TypeError, "takes a class"),
        ((dict,), TypeError, "has an encoding already"),
        ((torch.Tensor,), TypeError, "has an encoding already"),
        ((threading.Thread,), TypeError, "needs encode and decode"),
    ],
)
def test_register_type_refuses_what_cannot_work(arguments: Any, error: Any, message: str) -> None:
    """Wrong arguments are told at once."""
    with pytest.raises(error, match=message):
        register_type(*arguments)


def test_register_type_wants_both_functions_and_an_unused_name(registered: None) -> None:
    """One function alone would save what cannot be loaded; one name for two classes would load the wrong one."""
    with pytest.raises(ValueError, match="both encode and decode"):
        register_type(Custom, encode=str)
    with pytest.raises(ValueError, match="stands for"):
        register_type(Slotted, name="custom")


def test_register_type_works_as_a_decorator_and_may_be_repeated(registered: None, round_trip: Any) -> None:
    """A notebook cell that is run twice raises nothing, and the last registration counts."""

    def define() -> Any:
        @register_type
        @dataclasses.dataclass
        class Cell:
            x: int

        return Cell

    define()
    cell = define()(3)

    assert round_trip(cell) == cell
