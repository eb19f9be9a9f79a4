"""The header of a safetensors file: 8 bytes of length (little-endian), JSON, then the data without a hole.

Knows no torch. The layout is that of the safetensors library, whose readers load every file written here; the parser is
strict about all that its documentation asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, BinaryIO, NamedTuple

from lightning_resume.format.strict_json import dump_json, parse_json, quote, require_few_parts

MAX_HEADER_BYTES = 100_000_000  # the library refuses longer ones
MAX_PARTS = 2_000_000  # quotes, brackets and commas; a writer begins another file long before
MAX_DIMENSIONS = 64  # torch has no more
ALIGNMENT = 8

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


class Entry(NamedTuple):
    """One tensor of a safetensors file.

    Attributes:
        name: its name in the file.
        dtype: its safetensors dtype, a key of `DTYPE_BYTES`.
        shape: its shape.
        begin: offset of its first byte, counted from the end of the header.
        end: offset behind its last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """A parsed header.

    Attributes:
        num_bytes: size of length and JSON together: where the data begins.
        entries: the tensors, in the order of their data.
        metadata: the file's own texts.
    """

    num_bytes: int
    entries: list[Entry]
    metadata: dict[str, str]


_FIELDS = {"dtype", "shape", "data_offsets"}
_NUM_FIELDS = len(_FIELDS)
_LIMIT = 2**63  # of sizes and offsets
# What a named tuple's own does after a call more.
_new_entry: Callable[[type[Entry], tuple[object, ...]], Entry] = tuple.__new__
_PLACE = itemgetter(Entry._fields.index("begin"), Entry._fields.index("end"))


def build_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON for tensors whose data follows in the order given.

    Args:
        tensors: name, safetensors dtype and shape of each; names are unique.
        metadata: the file's own texts.

    Returns:
        The bytes before the data, padded with spaces so that the data is aligned to 8 bytes.

    Raises:
        ValueError: the header would be longer than readers accept, or have more parts.
    """
    # Put together by hand: `json.dumps` of 10^5 nested dicts takes three times as long.
    pieces = ['{"__metadata__":', dump_json(dict(metadata)).decode("ascii")]
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + DTYPE_BYTES[dtype] * math.prod(shape)
        sizes = ",".join(map(str, shape))
        pieces.append(f',{quote(name)}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}')
    pieces.append("}")
    text = "".join(pieces).encode("ascii")
    text += b" " * (-len(text) % ALIGNMENT)
    require_few_parts(text, MAX_PARTS)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes, more than {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def read_header(file: BinaryIO, file_bytes: int) -> tuple[Header, bytes]:
    """Reads and checks the header of an open file, which is then left where the data begins.

    Args:
        file: at its beginning.
        file_bytes: size of the whole file.

    Returns:
        The header, and the bytes that were read for it (for a digest).

    Raises:
        ValueError: the file is not a safetensors file, or not whole.
    """
    prefix = read_exactly(file, 8)
    length = int.from_bytes(prefix, "little")
    if length > min(file_bytes - 8, MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {file_bytes}")
    text = read_exactly(file, length)
    return parse_header(text, file_bytes - 8 - length), prefix + text


def read_exactly(file: BinaryIO, num_bytes: int) -> bytes:
    """Reads so many bytes, or raises `ValueError` where the file ends before."""
    data = bytearray(num_bytes)
    read_into(file, memoryview(data))
    return bytes(data)


def read_into(file: BinaryIO, view: memoryview) -> None:
    """Fills memory from a file, or raises `ValueError` where the file ends before."""
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"the file ends {len(view) - done} bytes too early")
        done += count


def parse_header(text: bytes, data_bytes: int) -> Header:
    """Parses the JSON of a header and checks it against the size of the data.

    Args:
        text: the JSON, padding included.
        data_bytes: size of what follows it in the file.

    Raises:
        ValueError: malformed, or names, dtypes, shapes, offsets and size do not fit each other.
    """
    if not text.startswith(b"{"):
        raise ValueError("a header that is no JSON object")
    require_few_parts(text, MAX_PARTS)
    document = parse_json(text, expected_levels=2)
    metadata = document.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise ValueError("a __metadata__ that does not map texts to texts")
    entries = [_parse_entry(name, fields) for name, fields in document.items()]
    entries.sort(key=_PLACE)
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise ValueError(f"a hole or an overlap before {entry.name!r}")
        end = entry.end
    if end != data_bytes:
        raise ValueError(f"{data_bytes} bytes of data for tensors of {end} bytes")
    return Header(8 + len(text), entries, metadata)


def _parse_entry(name: str, fields: Any) -> Entry:
    # Runs 10^5 times: a call of another function, or a test more, would be a good part of it.
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        num_bytes = DTYPE_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        raise ValueError(_what_is_wrong(name, fields)) from None
    if len(fields) != _NUM_FIELDS:
        raise ValueError(f"malformed fields for {name!r}")
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"a malformed shape or place for {name!r}")
    for size in shape:
        if type(size) is not int or not 0 <= size < _LIMIT:
            raise ValueError(f"a malformed shape or place for {name!r}")
        num_bytes *= size
    if type(begin) is not int or type(end) is not int or not (0 <= begin < _LIMIT and 0 <= end < _LIMIT):
        raise ValueError(f"a malformed shape or place for {name!r}")
    if end - begin != num_bytes:
        raise ValueError(f"dtype, shape and size of {name!r} do not fit each other")
    return _new_entry(Entry, (name, dtype, tuple(shape), begin, end))


def _what_is_wrong(name: str, fields: Any) -> str:
    if type(fields) is not dict or not fields.keys() >= _FIELDS:
        return f"malformed fields for {name!r}"
    dtype = fields["dtype"]
    if type(dtype) is not str or dtype not in DTYPE_BYTES:
        shown = repr(dtype[:40]) if type(dtype) is str else f"of type {type(dtype).__name__}"
        return f"the unknown dtype {shown} of {name!r}"
    return f"a malformed shape or place for {name!r}"
