"""How numpy's scalars, arrays and dtypes are saved."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import numpy as np

from lightning_resume.format.skeleton import TAG
from lightning_resume.format.tree import Decoder, DecodeWalk, Encoder, EncodeWalk

_KINDS = "biufcSUmM"
_CHARS = frozenset(np.typecodes["All"])
_DTYPE_TEXT = re.compile(r"[<>|](?:[biufcSU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[a-zA-Zμ]{1,7}\])?)")


def _encode_array(value: np.ndarray[Any, Any], walk: EncodeWalk) -> Any:
    dtype = _describe(value.dtype, walk)
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    source = _bytes_of_transposed if order == "F" else _bytes_of
    node = walk.refer("ndarray", ("ndarray", id(value)), "U8", (value.nbytes,), source, value)
    node.update(dtype, shape=list(value.shape), order=order)
    return node


def _bytes_of(value: np.ndarray[Any, Any]) -> memoryview:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.nbytes else memoryview(b"")


def _bytes_of_transposed(value: np.ndarray[Any, Any]) -> memoryview:
    return _bytes_of(value.T)


def _decode_array(node: dict[str, Any], walk: DecodeWalk) -> Any:
    reference, raw = walk.data(node)
    key = "ndarray", reference
    if key not in walk.shared:
        dtype, shape = _dtype(node), tuple(node["shape"])
        order: Literal["C", "F"] = "F" if node["order"] == "F" else "C"
        if raw.numel():
            value = raw.numpy().view(dtype).reshape(shape, order=order).copy(order=order)
        else:
            if math.prod(shape) * dtype.itemsize:
                raise ValueError("an array without its data")
            value = np.ndarray(shape, dtype, order=order)
        walk.shared[key] = value
    return walk.shared[key]


def _encode_scalar(value: np.generic, walk: EncodeWalk) -> Any:
    return {TAG: "np.scalar", **_describe(value.dtype, walk), "v": value.tobytes().hex()}


def _decode_scalar(node: dict[str, Any], walk: DecodeWalk) -> Any:
    (value,) = np.frombuffer(bytes.fromhex(node["v"]), _dtype(node))
    return value


def _describe(dtype: np.dtype[Any], walk: EncodeWalk) -> dict[str, Any]:
    if dtype.kind not in _KINDS or not _DTYPE_TEXT.fullmatch(dtype.str):
        walk.refuse(f"there is no exact encoding for the numpy dtype {dtype}")
    text: dict[str, Any] = {"dtype": dtype.str}
    if np.dtype(dtype.str).char != dtype.char:  # one of two C types of the same size, as long and long long
        text["char"] = dtype.char
    return text


def _dtype(node: dict[str, Any]) -> np.dtype[Any]:
    if not _DTYPE_TEXT.fullmatch(node["dtype"]):
        raise ValueError(f"the unknown dtype {node['dtype']!r}")
    dtype: np.dtype[Any] = np.dtype(node["dtype"])
    if "char" in node:
        if node["char"] not in _CHARS:
            raise ValueError("an unknown C type")
        exact: np.dtype[Any] = np.dtype(node["char"]).newbyteorder(dtype.byteorder)
        return exact if exact.str == dtype.str else dtype
    return dtype


def _encode_dtype(value: np.dtype[Any], walk: EncodeWalk) -> Any:
    return {TAG: "np.dtype", **_describe(value, walk)}


ENCODERS: dict[type, Encoder] = {
    np.ndarray: _encode_array,
    np.str_: lambda value, walk: {TAG: "np.str", "v": walk.encode(str.__str__(value))},
    np.bytes_: lambda value, walk: {TAG: "np.bytes", "v": bytes(value).hex()},
}
DECODERS: dict[str, Decoder] = {
    "ndarray": _decode_array,
    "np.scalar": _decode_scalar,
    "np.str": lambda node, walk: np.str_(walk.decode(node["v"])),
    "np.bytes": lambda node, walk: np.bytes_(bytes.fromhex(node["v"])),
    "np.dtype": lambda node, walk: _dtype(node),
}
for _kind in {kind for kind in np.sctypeDict.values() if np.dtype(kind).kind in _KINDS}:
    ENCODERS.setdefault(_kind, _encode_scalar)
    ENCODERS[type(np.dtype(_kind))] = _encode_dtype
