"""JSON as the checkpoint needs it: read strictly, written the same way every time."""

from __future__ import annotations

import json
import math
from itertools import chain
from json.encoder import encode_basestring_ascii as quote
from typing import Any

__all__ = ["canonical_json", "dump_json", "parse_json", "quote"]

MAX_INT_CHARS = 20  # a signed 64-bit number; longer ints are written as hex text, whose parsing is linear
MAX_FLOAT_CHARS = 40

# The hooks that look at each int and each object take most of the parsing, so texts that cannot hold what they refuse
# are parsed without them. Every digit as a zero, to find a long row of them:
_DIGITS = bytes(ord("0") if chr(byte).isascii() and chr(byte).isdigit() else ord(" ") for byte in range(256))
_CONTAINERS = frozenset({dict, list})
_LONG_DIGITS = b"0" * MAX_INT_CHARS  # in any shorter row, with a sign, are at most so many characters


def parse_json(data: bytes, expected_levels: int | None = None) -> Any:
    """Parses UTF-8 JSON and refuses what JSON lets pass: duplicate keys, NaN literals, numbers of any length.

    Args:
        data: the text.
        expected_levels: of objects in objects, if that is known; a text with more of them only takes longer.

    Raises:
        ValueError: the text is not JSON of that kind; the message says why. Nothing else is raised for any input.
    """
    try:
        text = data.decode("utf-8")
        if _LONG_DIGITS not in data.translate(_DIGITS):
            document = json.loads(text, parse_constant=_refuse_constant, parse_float=_bounded_float)
            if _has_unique_keys(data, document, expected_levels):
                return document
        return json.loads(
            text,
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_int=_bounded_int,
            parse_float=_bounded_float,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def require_whole_characters(document: Any) -> None:
    """Refuses halves of surrogate pairs, in keys too: they are no characters, and cannot be printed or written.

    Raises:
        ValueError: there is one.
    """
    pending = [document]
    while pending:
        value = pending.pop()
        if type(value) is dict:
            pending += [*value, *value.values()]
        elif type(value) is list:
            pending += value
        elif type(value) is str and any("\ud800" <= char <= "\udfff" for char in value):
            raise ValueError("half of a surrogate pair")


def require_few_parts(data: bytes, limit: int) -> None:
    """Refuses JSON of many parts before it is parsed: each of its empty lists takes 20 times its text in memory.

    Args:
        data: the text.
        limit: of quotes, brackets and commas outside of strings, taken together.

    Raises:
        ValueError: there are more.
    """
    if _count_marks(data) + data.count(b'"') <= limit:  # mostly, and quickly
        return
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that is left begins or ends a string
    count = bare.count(b'"')
    if count <= limit:
        count += sum(map(_count_marks, bare.split(b'"')[::2]))
    if count > limit:
        raise ValueError(f"more than {limit} quotes, brackets and commas")


def _count_marks(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b",")


def dump_json(value: Any) -> bytes:
    """Compact JSON in ASCII, keys in the order given."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":"))
    return text.encode("ascii")


def canonical_json(value: Any) -> bytes:
    """The one text of a value, whatever the order of its keys: what a digest is taken over."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.encode("ascii")


def _has_unique_keys(data: bytes, document: Any, expected_levels: int | None) -> bool:
    """Whether the text surely has no key twice: then as many keys came out as it can have.

    Behind each key stands a colon; it follows a quote or white space. Strings can only add more of these.
    """
    num_keys = _count_keys(document, expected_levels)
    return num_keys == data.count(b":") or num_keys == sum(map(data.count, (b'":', b" :", b"\t:", b"\n:", b"\r:")))


def _count_keys(document: Any, max_levels: int | None) -> int:
    """Keys of all objects in a document down to a level; level by level, so that few steps are python's."""
    count, level, depth = 0, [document], 0
    while level:
        depth += 1
        objects = [value for value in level if type(value) is dict]
        lists = [value for value in level if type(value) is list]
        count += sum(map(len, objects))
        if depth == max_levels:
            break
        level = [*chain.from_iterable(map(dict.values, objects)), *chain.from_iterable(lists)]
        if _CONTAINERS.isdisjoint(map(type, level)):
            break
    return count


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:100]!r} stands twice")
            seen.add(key)
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _bounded_int(text: str) -> int:
    if len(text) > MAX_INT_CHARS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _bounded_float(text: str) -> float:
    value = float(text) if len(text) <= MAX_FLOAT_CHARS else math.inf
    if math.isinf(value):
        raise ValueError(f"the number {text[:MAX_FLOAT_CHARS]} is too long or too large")
    return value
