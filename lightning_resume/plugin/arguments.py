"""The callback's constructor arguments: wrong ones are refused before a Trainer sees them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import timedelta

from lightning_resume.data import changed_workers
from lightning_resume.data.identity import OVERRIDES
from lightning_resume.errors import UnsupportedSetupError
from lightning_resume.plugin import identity

_WORDS = {*OVERRIDES.values(), *identity.OVERRIDES.values(), identity.MISSING_STREAM, changed_workers.WORD}
ALLOWED = tuple(sorted(_WORDS))


def folder(dirpath: str | os.PathLike[str] | None) -> str | None:
    """The absolute path of the folder, or None where the Trainer is to choose.

    Raises:
        TypeError: neither str nor PathLike.
        ValueError: no path for a folder.
        UnsupportedSetupError: a remote folder: rename and fsync mean nothing there.
    """
    if dirpath is None:
        return None
    path = os.fspath(dirpath) if isinstance(dirpath, str | os.PathLike) else dirpath
    if not isinstance(path, str):
        raise TypeError(f"dirpath must be a str or os.PathLike, got {dirpath!r}")
    if not path or "\0" in path:
        raise ValueError(f"dirpath must name a folder, got {dirpath!r}")
    if "://" in path:
        raise UnsupportedSetupError(
            f"dirpath={path!r}", "atomic renames and fsync need a local file system", "Pass a plain local path."
        )
    return os.path.abspath(path)


def check_counts(**counts: object) -> None:
    """Refuses what is no int, or less than 1.

    Raises:
        TypeError, ValueError: names the argument.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def check_flags(**flags: object) -> None:
    """Refuses what is no bool.

    Raises:
        TypeError: names the argument.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")


def check_item_rng(item_rng: object) -> None:
    """Refuses what is neither "stock" nor "positional".

    Raises:
        ValueError: names the argument.
    """
    if item_rng not in ("stock", "positional"):
        raise ValueError(f"item_rng must be 'stock' or 'positional', got {item_rng!r}")


def check_interval(train_time_interval: object) -> None:
    """Refuses what is no positive timedelta.

    Raises:
        TypeError, ValueError: names the argument.
    """
    if not isinstance(train_time_interval, timedelta):
        raise TypeError(f"train_time_interval must be a datetime.timedelta, got {train_time_interval!r}")
    if train_time_interval <= timedelta(0):
        raise ValueError(f"train_time_interval must be positive, got {train_time_interval}")


def allowed(allow: object) -> tuple[str, ...]:
    """The words of `allow`; a single one may stand alone.

    Raises:
        TypeError, ValueError: names the argument and the words that there are.
    """
    if isinstance(allow, str):
        allow = (allow,)
    if not isinstance(allow, Iterable) or isinstance(allow, Mapping):
        raise TypeError(f"allow must be a sequence of str, got {allow!r}")
    words = tuple(allow)
    for word in words:
        if word not in ALLOWED:
            raise ValueError(f"allow knows no {word!r}; there are: {', '.join(ALLOWED)}")
    return words
