"""JSON as the checkpoint needs it: read strictly, written the same way every time."""

from __future__ import annotations

import json
import math
from json.encoder import encode_basestring_ascii as quote
from typing import Any

__all__ = ["canonical_json", "dump_json", "parse_json", "quote"]

MAX_INT_CHARS = 20  # a signed 64-bit number; longer ints are written as hex text, whose parsing is linear
MAX_FLOAT_CHARS = 40


def parse_json(data: bytes) -> Any:
    """Parses UTF-8 JSON and refuses what JSON lets pass: duplicate keys, NaN literals, numbers of any length.

    Raises:
        ValueError: the text is not JSON of that kind; the message says why. Nothing else is raised for any input.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_int=_bounded_int,
            parse_float=_bounded_float,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def dump_json(value: Any) -> bytes:
    """Compact JSON in ASCII, keys in the order given."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":"))
    return text.encode("ascii")


def canonical_json(value: Any) -> bytes:
    """The one text of a value, whatever the order of its keys: what a digest is taken over."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.encode("ascii")


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
