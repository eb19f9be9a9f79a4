"""How the types of python and its standard library are saved: one encoder and one decoder each, value and type kept.

A type that is not in the table is refused, and so is every subclass of one that is: its type would be lost.
"""

from __future__ import annotations

import math
import pathlib
import struct
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

from lightning_resume.format.skeleton import TAG
from lightning_resume.format.tree import Decoder, DecodeWalk, Encoder, EncodeWalk

INLINE_BYTES = 1024  # longer byte strings go to the data file
PACKED_ITEMS = 512  # lists of so many ints or floats go to the data file: loss histories, orders of items

MAX_FRACTION_BITS = 2**17  # reducing a fraction takes time with the square of it

_FACTORIES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)},
    **{kind.__name__: kind for kind in (Counter, OrderedDict, deque)},
}


def is_plain_text(text: str) -> bool:
    """Whether JSON gives the text back: it joins a pair of surrogates to one character."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _encode_str(value: str, walk: EncodeWalk) -> Any:
    return value if is_plain_text(value) else {TAG: "str", "v": value.encode("utf-8", "surrogatepass").hex()}


def _decode_str(node: dict[str, Any], walk: DecodeWalk) -> str:
    return bytes.fromhex(node["v"]).decode("utf-8", "surrogatepass")


def _encode_int(value: int, walk: EncodeWalk) -> Any:
    return value if -(2**63) <= value < 2**63 else {TAG: "int", "v": hex(value)}


def _encode_float(value: float, walk: EncodeWalk) -> Any:
    return value if math.isfinite(value) else {TAG: "float", "v": struct.pack(">d", value).hex()}


def _decode_float(node: dict[str, Any], walk: DecodeWalk) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(node["v"]))
    return float(value)


def _encode_bytes(value: bytes | bytearray, walk: EncodeWalk) -> Any:
    tag = type(value).__name__
    if len(value) <= INLINE_BYTES:
        return {TAG: tag, "v": value.hex()}
    return walk.refer(tag, ("bytes", id(value)), "U8", (len(value),), memoryview, value)


def _decoder_of_bytes(kind: Callable[[Any], Any]) -> Decoder:
    def decode(node: dict[str, Any], walk: DecodeWalk) -> Any:
        if "v" in node:
            return kind(bytes.fromhex(node["v"]))
        return _shared(node, walk, lambda raw: kind(raw.numpy().tobytes()))

    return decode


def _encode_list(value: list[Any] | tuple[Any, ...], walk: EncodeWalk) -> Any:
    if len(value) >= PACKED_ITEMS and (packed := _pack(value)) is not None:
        tag, dtype = type(value).__name__, "F64" if packed.typecode == "d" else "I64"
        return walk.refer(tag, ("packed", id(value)), dtype, (len(packed),), _packed_bytes, (packed, value))
    items = [walk.child(number, item) for number, item in enumerate(value)]
    return items if type(value) is list else {TAG: "tuple", "v": items}


def _pack(values: list[Any] | tuple[Any, ...]) -> array[Any] | None:
    kinds = set(map(type, values))
    try:
        return array("d", values) if kinds == {float} else array("q", values) if kinds == {int} else None
    except OverflowError:
        return None


def _packed_bytes(owner: tuple[array[Any], Any]) -> memoryview:
    return memoryview(owner[0]).cast("B")


def _decoder_of_items(kind: Callable[[Any], Any]) -> Decoder:
    def decode(node: dict[str, Any], walk: DecodeWalk) -> Any:
        if "v" not in node:
            return _shared(node, walk, lambda raw: kind(raw.tolist()))
        return kind(_items(node, walk))

    return decode


def _shared(node: dict[str, Any], walk: DecodeWalk, build: Callable[[Any], Any]) -> Any:
    """One object for all nodes that refer to the same data: it was one when it was saved.

    Otherwise a few bytes of JSON could ask for the same data again and again, until memory is full.
    """
    reference, raw = walk.data(node)
    key = node[TAG], reference
    if key not in walk.shared:
        walk.shared[key] = build(raw)
    return walk.shared[key]


def _items(node: dict[str, Any], walk: DecodeWalk) -> list[Any]:
    if type(node["v"]) is not list:
        raise ValueError("no list of items")
    return [walk.child(number, item) for number, item in enumerate(node["v"])]


def _encoder_of_items(tag: str) -> Encoder:
    return lambda value, walk: {TAG: tag, "v": [walk.child(number, item) for number, item in enumerate(value)]}


def _encode_deque(value: deque[Any], walk: EncodeWalk) -> Any:
    return {**_encoder_of_items("deque")(value, walk), "maxlen": value.maxlen}


def _decode_deque(node: dict[str, Any], walk: DecodeWalk) -> deque[Any]:
    return deque(_items(node, walk), node["maxlen"])


def _encode_mapping(value: Mapping[Any, Any], walk: EncodeWalk) -> Any:
    """An object where all keys are plain texts, otherwise a list of key, value pairs."""
    if all(type(key) is str and key != TAG and is_plain_text(key) for key in value):
        return {key: walk.child(key, item) for key, item in value.items()}
    return [[_encode_key(key, walk), walk.child(key, item)] for key, item in value.items()]


def _encode_key(key: object, walk: EncodeWalk) -> Any:
    walk.path.append(key)
    node = walk.encode(key)
    if type(node) is dict and node[TAG] in ("tensor", "sparse"):
        walk.refuse("a tensor as a key is told from others by its address only")
    walk.path.pop()
    return node


def _decode_mapping(pairs: Any, walk: DecodeWalk) -> Iterable[tuple[Any, Any]]:
    if type(pairs) is dict and TAG not in pairs:
        return walk.items(pairs).items()
    decoded = []
    for key_node, item in pairs:
        key = walk.child("key", key_node)
        decoded.append((key, walk.child(key, item)))
    if len(dict(decoded)) != len(decoded):
        raise ValueError("a key that stands twice")
    return decoded


def _encode_dict(value: dict[Any, Any], walk: EncodeWalk) -> Any:
    mapping = _encode_mapping(value, walk)
    return mapping if type(mapping) is dict else {TAG: "dict", "v": mapping}


def _decode_dict(node: dict[str, Any], walk: DecodeWalk) -> dict[Any, Any]:
    return dict(_decode_mapping(node["v"], walk))


def _encoder_of_dict_with_attributes(tag: str) -> Encoder:
    # Module.state_dict() hangs the versions of its modules on the OrderedDict as an attribute.
    def encode(value: Any, walk: EncodeWalk) -> Any:
        if hidden := _hidden_by(value.__dict__, type(value)):
            walk.refuse(f"its attribute {hidden!r} hides one of its class")
        node = {TAG: tag, "v": _encode_mapping(value, walk)}
        if value.__dict__:
            node["attributes"] = {name: walk.child(name, item) for name, item in value.__dict__.items()}
        return node

    return encode


def _hidden_by(attributes: Iterable[str], kind: type[Any]) -> str | None:
    """The first attribute that would take the place of a method: whoever calls it would run into a value."""
    return next((name for name in attributes if hasattr(kind, name)), None)


def _decoder_of_dict_with_attributes(kind: type[Any]) -> Decoder:
    def decode(node: dict[str, Any], walk: DecodeWalk) -> Any:
        value = kind()
        for key, item in _decode_mapping(node["v"], walk):
            value[key] = item
        attributes = node.get("attributes", {})
        if hidden := _hidden_by(attributes, kind):
            raise ValueError(f"an attribute {hidden!r}, which the class has already")
        for name, item in attributes.items():
            value.__dict__[name] = walk.child(name, item)
        return value

    return decode


def _encode_defaultdict(value: defaultdict[Any, Any], walk: EncodeWalk) -> Any:
    factory = value.default_factory
    name = next((name for name, known in _FACTORIES.items() if known is factory), None)
    if factory is not None and name is None:
        walk.refuse("its default_factory has no exact encoding")
    return {TAG: "defaultdict", "factory": name, "v": _encode_mapping(value, walk)}


def _decode_defaultdict(node: dict[str, Any], walk: DecodeWalk) -> defaultdict[Any, Any]:
    factory = None if node["factory"] is None else _FACTORIES[node["factory"]]
    return defaultdict(factory, _decode_mapping(node["v"], walk))


def _encoder_of_fields(tag: str, fields: Callable[[Any], list[Any]]) -> Encoder:
    return lambda value, walk: {TAG: tag, "v": [walk.encode(item) for item in fields(value)]}


def _decoder_of_fields(build: Callable[..., Any]) -> Decoder:
    return lambda node, walk: build(*_items(node, walk))


def _datetime_fields(value: datetime) -> list[Any]:
    return [*value.date().timetuple()[:3], *_time_fields(value)]


def _time_fields(value: time | datetime) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold]


def _build_datetime(*fields: Any) -> datetime:
    return datetime(*fields[:8], fold=fields[8])


def _build_time(*fields: Any) -> time:
    return time(*fields[:5], fold=fields[5])


def _fraction_fields(value: Fraction) -> list[Any]:
    return [value.numerator, value.denominator]


def _build_fraction(numerator: int, denominator: int) -> Fraction:
    if max(numerator.bit_length(), denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError(f"a fraction of numbers with more than {MAX_FRACTION_BITS} bits")
    return Fraction(numerator, denominator)


def _encode_fraction(value: Fraction, walk: EncodeWalk) -> Any:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_FRACTION_BITS:
        walk.refuse(f"its numbers have more than {MAX_FRACTION_BITS} bits")
    return _encoder_of_fields("Fraction", _fraction_fields)(value, walk)


def _encoder_of_text(tag: str) -> Encoder:
    return lambda value, walk: {TAG: tag, "v": walk.encode(str(value))}


def _decoder_of_text(build: Callable[[str], Any]) -> Decoder:
    return lambda node, walk: build(walk.decode(node["v"]))


ENCODERS: dict[type, Encoder] = {
    type(None): lambda value, walk: None,
    bool: lambda value, walk: value,
    str: _encode_str,
    int: _encode_int,
    float: _encode_float,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    list: _encode_list,
    tuple: _encode_list,
    dict: _encode_dict,
    set: _encoder_of_items("set"),
    frozenset: _encoder_of_items("frozenset"),
    deque: _encode_deque,
    OrderedDict: _encoder_of_dict_with_attributes("OrderedDict"),
    Counter: _encoder_of_dict_with_attributes("Counter"),
    defaultdict: _encode_defaultdict,
    type(Ellipsis): lambda value, walk: {TAG: "ellipsis"},
}
DECODERS: dict[str, Decoder] = {
    "str": _decode_str,
    "int": lambda node, walk: int(node["v"], 16),
    "float": _decode_float,
    "bytes": _decoder_of_bytes(bytes),
    "bytearray": _decoder_of_bytes(bytearray),
    "list": _decoder_of_items(list),
    "tuple": _decoder_of_items(tuple),
    "dict": _decode_dict,
    "set": _decoder_of_items(set),
    "frozenset": _decoder_of_items(frozenset),
    "deque": _decode_deque,
    "OrderedDict": _decoder_of_dict_with_attributes(OrderedDict),
    "Counter": _decoder_of_dict_with_attributes(Counter),
    "defaultdict": _decode_defaultdict,
    "ellipsis": lambda node, walk: ...,
}

_BY_FIELDS: tuple[tuple[type, Callable[[Any], list[Any]], Callable[..., Any]], ...] = (
    (complex, lambda value: [value.real, value.imag], complex),
    (range, lambda value: [value.start, value.stop, value.step], range),
    (slice, lambda value: [value.start, value.stop, value.step], slice),
    (date, lambda value: [value.year, value.month, value.day], date),
    (datetime, _datetime_fields, _build_datetime),
    (time, _time_fields, _build_time),
    (timedelta, lambda value: [value.days, value.seconds, value.microseconds], timedelta),
    (timezone, lambda value: list(value.__getinitargs__()), timezone),
)
_BY_TEXT: tuple[type[Any], ...] = (
    Decimal,
    UUID,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
    pathlib.PosixPath,
    pathlib.WindowsPath,
)

for _kind, _fields, _build in _BY_FIELDS:
    ENCODERS[_kind] = _encoder_of_fields(_kind.__name__, _fields)
    DECODERS[_kind.__name__] = _decoder_of_fields(_build)
ENCODERS[Fraction], DECODERS["Fraction"] = _encode_fraction, _decoder_of_fields(_build_fraction)
for _kind in _BY_TEXT:
    ENCODERS[_kind] = _encoder_of_text(_kind.__name__)
    DECODERS[_kind.__name__] = _decoder_of_text(_kind)
