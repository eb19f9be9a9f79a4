"""numpy's scalars, arrays and dtypes come back with the same dtype, byte order, memory order and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_resume.errors import UnsupportedStateError
from lightning_resume.format.checkpoint import write_checkpoint

SCALARS = [
    np.float16(0.1),
    np.float32("nan"),
    np.float64(-0.0),
    np.longdouble("1.1"),
    np.complex64(1 - 2j),
    np.complex128(complex(np.inf, -0.0)),
    np.clongdouble(1j),
    np.bool_(True),
    np.int8(-128),
    np.int16(-5),
    np.int32(7),
    np.int64(-(2**63)),
    np.uint8(255),
    np.uint64(2**64 - 1),
    np.longlong(3),
    np.ulonglong(4),
    np.datetime64("2024-02-29T12:00", "ns"),
    np.datetime64("NaT"),
    np.timedelta64(-3, "D"),
    np.str_("Grüße\0"),
    np.str_(""),
    np.bytes_(b"a\0b\0"),
]

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    np.arange(10)[::-2],
    np.array(3.5),
    np.empty((0, 3), np.int16),
    np.zeros((2, 0, 3), order="F"),
    np.array([1, 2], ">i8"),
    np.array([1.5, np.nan], ">f2"),
    np.array([True, False]),
    np.array([1 + 2j], np.complex64),
    np.array(["a", "Grüße"]),
    np.array(["", ""], "<U0"),
    np.array([b"a\0", b"bc"]),
    np.array(["2024-01-01", "NaT"], "M8[D]"),
    np.array([1, 2], "m8[25s]"),
    np.array([5], "m8"),
    np.array([1, 2], np.longlong),
    np.array([np.longdouble("0.1")]),
    np.random.default_rng(0).integers(0, 2**32, 624, dtype=np.uint32),
    np.broadcast_to(np.array([1, 2]), (3, 2)),
    np.lib.stride_tricks.as_strided(np.arange(4), (2, 2), (0, 8)),
]


@pytest.mark.parametrize("value", SCALARS, ids=[f"{n}-{type(v).__name__}" for n, v in enumerate(SCALARS)])
def test_a_scalar_comes_back_with_its_type_and_bits(value: Any, round_trip: Any, same: Any) -> None:
    """A metric that is a numpy scalar stays one: np.float64 is no float, np.str_ no str."""
    result = round_trip({"best": value, value: 1})

    assert same(result["best"], value)
    assert type(list(result)[1]) is type(value)


@pytest.mark.parametrize("value", ARRAYS, ids=[f"{n}-{v.dtype}" for n, v in enumerate(ARRAYS)])
def test_an_array_comes_back_with_dtype_order_and_bytes(value: Any, round_trip: Any, same: Any) -> None:
    """Also byte order, and Fortran order; strides that skip memory become dense."""
    result = round_trip([value])[0]

    assert same(result, value)
    assert result.flags.writeable
    assert result.flags.owndata


def test_an_array_that_stands_twice_is_one_array_again(tmp_path: Any, round_trip: Any) -> None:
    """Sharing is part of the state: a change through one name shows through the other."""
    array = np.arange(3)

    first, second = round_trip((array, array))

    assert first is second


@pytest.mark.parametrize("dtype", ["<f4", ">i2", "bool", "M8[ns]", "U5", "q"])
def test_a_dtype_comes_back(dtype: str, round_trip: Any) -> None:
    """dtypes stand in configurations."""
    value = np.dtype(dtype)

    result = round_trip(value)

    assert (result, result.str, result.char) == (value, value.str, value.char)


class Subclass(np.ndarray):
    """An array whose type would be lost."""


@pytest.mark.parametrize(
    "value",
    [
        np.array([{}, 1], dtype=object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.zeros(2, "V3"),
        np.void(b"abc"),
        np.zeros(2).view(Subclass),
        np.ma.masked_array([1, 2], mask=[True, False]),
        np.random.default_rng(0),
        np.array(["a"], dtype=np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else np.void(b"a"),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_what_has_no_exact_encoding_is_refused(value: Any, tmp_path: Any) -> None:
    """Objects would need pickle, subclasses would lose their type."""
    with pytest.raises(UnsupportedStateError, match="no exact encoding") as caught:
        write_checkpoint(tmp_path / "c", {"a": [value]})

    assert caught.value.key_path == "a.0"
    assert list(tmp_path.iterdir()) == []
