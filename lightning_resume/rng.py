"""The global random streams: python's, numpy's, torch's on the CPU and on every CUDA device.

A stream's state is read without drawing from it. `RNGState` holds all of them at one moment; the functions below
it turn the state of one stream into plain containers and tensors (what a checkpoint can hold) and back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_resume.errors import MissingStateError, StateMismatchError

STREAMS = ("python", "numpy", "torch")


@dataclass(frozen=True)
class RNGState:
    """The state of every global random stream at one moment.

    Attributes:
        python: what `random.getstate()` returns.
        numpy: what `numpy.random.get_state(legacy=False)` returns.
        torch: state of torch's CPU stream, a uint8 tensor.
        cuda: one uint8 tensor per CUDA device, in device order; empty where CUDA has not been initialised
            (its streams are then untouched and start from the seed).

    Capturing and restoring draw no number. Any thread may call them, but the streams are global to the process:
    only a moment at which nobody else draws is worth capturing.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: Tensor
    cuda: tuple[Tensor, ...] = ()

    @classmethod
    def capture(cls) -> RNGState:
        """Reads the streams as they stand now."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        return cls(random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Sets every stream to this state, or none of them.

        Raises:
            StateMismatchError: there are other CUDA devices than at the capture, or a state does not fit its stream.
        """
        if self.cuda and torch.cuda.device_count() != len(self.cuda):
            raise StateMismatchError("CUDA devices", len(self.cuda), torch.cuda.device_count())
        before = RNGState.capture()
        try:
            self._set()
        except Exception as error:
            before._set()
            raise StateMismatchError("random streams", "a state that fits its stream", f"{error}") from error

    def require_fitting(self) -> None:
        """Tries the states of python, numpy and torch on streams of their own; those of the process are not touched.

        Raises:
            StateMismatchError: one does not fit its stream; the error names it.
        """
        trials: dict[str, Callable[[], object]] = {
            "python": lambda: random.Random().setstate(self.python),
            "numpy": lambda: np.random.RandomState(0).set_state(self.numpy),
            "torch": lambda: torch.Generator().set_state(self.torch),
        }
        for name, trial in trials.items():
            try:
                trial()
            except Exception as error:
                raise StateMismatchError(f"random stream {name!r}", f"{error}", "a state that fits it") from error

    def _set(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))

    def state_dict(self) -> dict[str, Any]:
        """Returns plain containers and tensors: `{"python": …, "numpy": …, "torch": …, "cuda": […]}`."""
        return {
            "python": python_to_plain(self.python),
            "numpy": numpy_to_plain(self.numpy),
            "torch": self.torch.clone(),
            "cuda": [state.clone() for state in self.cuda],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RNGState:
        """Builds the state that `state_dict` returned; no stream is touched.

        Raises:
            MissingStateError: a stream is not in `state`; the error names it.
        """
        for name in (*STREAMS, "cuda"):
            if name not in state:
                raise MissingStateError(f"random stream {name!r}")
        return cls(
            plain_to_python(state["python"]), plain_to_numpy(state["numpy"]), state["torch"], tuple(state["cuda"])
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RNGState):
            return NotImplemented
        return (
            self.python == other.python
            and _numpy_key(self.numpy) == _numpy_key(other.numpy)
            and torch.equal(self.torch, other.torch)
            and len(self.cuda) == len(other.cuda)
            and all(torch.equal(a, b) for a, b in zip(self.cuda, other.cuda, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]  # holds tensors


def python_to_plain(state: tuple[Any, ...]) -> dict[str, Any]:
    """`random.getstate()` as a dict: version, the Mersenne Twister's words (int64 tensor), the pending gaussian."""
    version, words, gauss_next = state
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss_next": gauss_next}


def plain_to_python(plain: Mapping[str, Any]) -> tuple[Any, ...]:
    """The inverse of `python_to_plain`: tuples, as `random.setstate` demands."""
    return plain["version"], tuple(plain["words"].tolist()), plain["gauss_next"]


def numpy_to_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """A numpy bit generator's state with its arrays as int64 tensors; integers of any size stay as they are."""
    return {key: _plain_value(value) for key, value in state.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return numpy_to_plain(value)
    if isinstance(value, np.ndarray):
        # uint64 words (Philox, SFC64) do not fit into int64 as numbers, but do as bits.
        return {"dtype": value.dtype.str, "words": torch.from_numpy(value.astype(np.uint64).view(np.int64).copy())}
    return value


def plain_to_numpy(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `numpy_to_plain`."""
    return {key: _numpy_value(value) for key, value in plain.items()}


def _numpy_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"dtype", "words"}:
            return value["words"].numpy().view(np.uint64).astype(np.dtype(value["dtype"]))
        return plain_to_numpy(value)
    return value


def _numpy_key(state: Mapping[str, Any]) -> Any:
    """A numpy state in a form that `==` compares."""
    if isinstance(state, Mapping):
        return {key: _numpy_key(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
