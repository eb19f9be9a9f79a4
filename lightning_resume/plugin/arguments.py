"""The callback's constructor arguments: wrong ones are refused before a Trainer sees them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from lightning_resume.data import changed_workers
from lightning_resume.data.identity import OVERRIDES
from lightning_resume.errors import UnsupportedSetupError
from lightning_resume.plugin import identity

_WORDS = {*OVERRIDES.values(), *identity.OVERRIDES.values(), identity.MISSING_STREAM, changed_workers.WORD}
ALLOWED = tuple(sorted(_WORDS))

_FLAGS = (
    "trainable_only",
    "async_save",
    "save_on_train_start",
    "save_on_train_end",
    "save_on_exception",
    "save_on_signal",
)
_OPTIONAL_COUNTS = ("every_n_train_steps", "archive_every_n_train_steps", "save_weights_only_every_n_train_steps")
_CHOICES = {"item_rng": ("stock", "positional"), "back_pressure": ("wait", "skip")}


@dataclass(frozen=True)
class Settings:
    """The constructor arguments of `AtomicResumeCallback` that steer it, checked; its docstring says what they mean.

    Raises:
        TypeError, ValueError: a wrong argument, named.
    """

    every_n_train_steps: int | None
    train_time_interval: timedelta | None
    keep_last_k: int
    archive_every_n_train_steps: int | None
    save_weights_only_every_n_train_steps: int | None
    trainable_only: bool
    async_save: bool
    back_pressure: str
    save_on_train_start: bool
    save_on_train_end: bool
    save_on_exception: bool
    save_on_signal: bool
    preemption_notice_seconds: float | None
    max_shard_bytes: int
    data_version: str | None
    item_rng: str

    def __post_init__(self) -> None:
        """Refuses what is wrong."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        check_counts(keep_last_k=self.keep_last_k, max_shard_bytes=self.max_shard_bytes)
        check_counts(**{name: values[name] for name in _OPTIONAL_COUNTS if values[name] is not None})
        check_flags(**{name: values[name] for name in _FLAGS})
        for name, choices in _CHOICES.items():
            check_choice(name, values[name], choices)
        if self.train_time_interval is not None:
            check_interval(self.train_time_interval)
        if self.preemption_notice_seconds is not None:
            check_seconds("preemption_notice_seconds", self.preemption_notice_seconds)
        if not isinstance(self.data_version, str | None):
            raise TypeError(f"data_version must be a str, got {self.data_version!r}")
        self._check_sense()

    def _check_sense(self) -> None:
        """Refuses arguments that contradict each other."""
        if self.preemption_notice_seconds is not None and not self.save_on_signal:
            raise ValueError("preemption_notice_seconds says how long a signal leaves, but save_on_signal=False")
        if self.back_pressure == "skip" and not self.async_save:
            raise ValueError("back_pressure='skip' is about saves in the background, but async_save=False")

    @property
    def interval_seconds(self) -> float | None:
        """Of `train_time_interval`."""
        return self.train_time_interval.total_seconds() if self.train_time_interval is not None else None

    @property
    def is_default_cadence(self) -> bool:
        """Whether the user left it to us when to save."""
        return self.every_n_train_steps is None and self.train_time_interval is None


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


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuses what is none of the choices.

    Raises:
        ValueError: names the argument.
    """
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def check_seconds(name: str, value: object) -> None:
    """Refuses what is no positive, finite number.

    Raises:
        TypeError, ValueError: names the argument.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {value}")


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
