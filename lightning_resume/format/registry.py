"""All types that can be saved: the built-in ones, and the user's own that were registered by name. No others."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from lightning_resume.errors import ResumeError, StateMismatchError, UnsupportedStateError
from lightning_resume.format import codecs, numpy_codecs, tensors
from lightning_resume.format.blobs import join_key_path
from lightning_resume.format.skeleton import TAG
from lightning_resume.format.tree import Decoder, DecodeWalk, Encoder, EncodeWalk

C = TypeVar("C", bound=type)


class Registration(NamedTuple):
    """How one class is saved and loaded.

    Attributes:
        cls: the class.
        name: what stands for it on disk.
        encode: object → state of types that can be saved.
        decode: that state → object.
    """

    cls: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_BUILT_IN: dict[type, Encoder] = {**codecs.ENCODERS, **numpy_codecs.ENCODERS, **tensors.ENCODERS}
BY_TYPE: dict[type, Registration] = {}
BY_NAME: dict[str, Registration] = {}


def register_type(
    cls: C,
    *,
    name: str | None = None,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> C:
    """Lets objects of a class be saved in checkpoints and loaded again; can be used as a decorator.

    Call it before the first save and before every load: a checkpoint only holds the name, and nothing is imported or
    run because a checkpoint names it. Objects of subclasses are not covered. Registering a class again replaces
    what was registered.

    Args:
        cls: the class.
        name: what stands for it on disk; by default module and qualified name. Give one where those may change.
        encode: object → plain values, containers, tensors or registered types. May be left out for dataclasses,
            namedtuples and enums.
        decode: what `encode` returned → object. Must be given if `encode` is.

    Returns:
        The class.

    Raises:
        TypeError: `cls` is no class, or one that has an encoding already, or needs `encode` and `decode`.
        ValueError: only one of `encode` and `decode` was given, or the name stands for another class.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_type() takes a class, not {cls!r}")
    if (encode is None) != (decode is None):
        raise ValueError(f"register_type({cls.__qualname__}) needs both encode and decode, or neither")
    if cls in _BUILT_IN:
        raise TypeError(f"register_type({cls.__qualname__}): the type has an encoding already")
    if encode is None or decode is None:
        encode, decode = _default(cls)
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    known = BY_NAME.get(name)
    if known and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"register_type(name={name!r}): the name stands for {known.cls!r} already")
    registration = Registration(cls, name, encode, decode)
    before = BY_TYPE.get(cls)
    if before:
        del BY_NAME[before.name]
    BY_TYPE[cls] = BY_NAME[name] = registration
    return cls


def encode_registered(value: Any, walk: EncodeWalk) -> dict[str, Any]:
    """The node of an object of a registered class."""
    registration = BY_TYPE[type(value)]
    try:
        state = registration.encode(value)
    except Exception as error:
        reason = f"the encoder of {registration.name} failed: {type(error).__name__}: {error}"
        raise UnsupportedStateError(walk.key_path, reason, "Mend the object or its encoder.") from error
    return {TAG: "type", "name": registration.name, "v": walk.encode(state)}


def decode_registered(node: dict[str, Any], walk: DecodeWalk) -> Any:
    """The object of such a node; refused unless its class is registered in this process."""
    key_path = join_key_path(walk.path)
    registration = BY_NAME.get(node["name"])
    if registration is None:
        reason = f"the checkpoint holds an object of the type {node['name']}, which is not registered here"
        raise UnsupportedStateError(key_path, reason, f"Call register_type(..., name={node['name']!r}) before loading.")
    state = walk.decode(node["v"])
    try:
        return registration.decode(state)
    except ResumeError:
        raise
    except Exception as error:
        reason = f"the decoder of {registration.name} failed: {type(error).__name__}: {error}"
        raise UnsupportedStateError(key_path, reason, "Mend its decoder.") from error


def find_encoder(kind: type) -> Encoder | None:
    """The encoder of a type, or None."""
    return _BUILT_IN.get(kind) or (encode_registered if kind in BY_TYPE else None)


DECODERS: dict[str, Decoder] = {
    **codecs.DECODERS,
    **numpy_codecs.DECODERS,
    **tensors.DECODERS,
    "type": decode_registered,
}


def _default(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if issubclass(cls, enum.Flag):
        return lambda flag: flag.value, cls
    if issubclass(cls, enum.Enum):
        return lambda member: member.name, lambda name: cls[name]
    if dataclasses.is_dataclass(cls):
        return _encode_dataclass, lambda fields: _decode_dataclass(cls, fields)
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make"):
        return list, cls._make
    raise TypeError(
        f"register_type({cls.__qualname__}) needs encode and decode: it is no dataclass, namedtuple or enum"
    )


def _encode_dataclass(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    extra = sorted(set(getattr(value, "__dict__", {})) - set(names))
    if extra:  # they would be lost
        raise TypeError(f"attributes that are no fields: {', '.join(extra)}")
    return {name: getattr(value, name) for name in names}


def _decode_dataclass(cls: Any, fields: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(cls)}
    if fields.keys() != names:
        raise StateMismatchError(f"fields of {cls.__qualname__}", sorted(fields), sorted(names))
    value = cls.__new__(cls)
    for name, item in fields.items():
        object.__setattr__(value, name, item)  # as it was saved, past __init__ and frozen=True
    return value
