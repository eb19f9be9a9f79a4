"""The last cut, remembered: what an exception in the step after it leaves half changed.

Between a cut and the optimizer step that follows it, a step moves random streams, the place in the data, counters,
logged values and buffers. Parameters, optimizers and schedulers stay. So the cut can still be saved when an exception
ends the step, if the former were remembered and the latter were not touched.

Remembering costs time at every cut. Where it has cost more than `MAX_SHARE` of the training time, beyond a credit for
short runs, a cut is passed over and cannot be saved later.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_resume.data.held import Generator
from lightning_resume.data.streams import Streams, pack
from lightning_resume.plugin import loops, module_state
from lightning_resume.plugin.checkpoint_io import RANK_STATES
from lightning_resume.plugin.metrics import capture_metrics
from lightning_resume.rng import RNGState

MAX_SHARE = 0.001
CREDIT_SECONDS = 0.01

_NEVER = "no moment at which it could be saved has been reached"
_TOO_DEAR = "remembering each step would have cost more than 0.1 % of the training time"


class Recall:
    """Remembers the newest cut until the optimizer step after it begins.

    Attributes:
        missing: why there is nothing to save, or "".
        is_held: whether a cut is remembered.
        was_held: whether one was when the step began.
        needs_gradients: whether gradients of the step before are part of a cut; they are not remembered.
    """

    def __init__(self) -> None:
        """Remembers nothing yet."""
        self.missing = _NEVER
        self.is_held = self.was_held = False
        self._begun, self._spent_seconds = time.monotonic(), 0.0
        self._watched: module_state.Watched | None = None
        self._marks: list[Any] = []
        self._generators: dict[str, Generator] = {}
        self._parts: dict[str, Any] = {}
        self.needs_gradients = False

    def begin(self, trainer: Trainer) -> None:
        """Training begins, or goes on."""
        self.drop(_NEVER)
        self._begun, self._spent_seconds, self._watched = time.monotonic(), 0.0, None
        self.needs_gradients = module_state.needs_gradients(trainer)

    @property
    def may_note_from(self) -> float:
        """Moment of `time.monotonic` from which on `may_note` is true."""
        debt = self._spent_seconds - CREDIT_SECONDS
        return self._begun + (debt / MAX_SHARE if MAX_SHARE else debt * math.inf) if debt > 0 else 0.0

    def may_note(self) -> bool:
        """Whether the time for it is there; forgets the cut before if not. To be called at each cut."""
        if self._spent_seconds <= CREDIT_SECONDS + MAX_SHARE * (time.monotonic() - self._begun):
            return True
        self.drop(_TOO_DEAR)
        return False

    def note(self, trainer: Trainer) -> None:
        """At a cut that can be saved. Draws no number, moves no stream, and changes nothing."""
        if trainer.world_size > 1:
            self.drop("in a run of several processes the others cannot be asked for their part")
            return
        if self._watched is None:
            if loops.is_lazy(trainer):
                self.drop("parameters have no shape yet")
                return
            self._watched = module_state.Watched(trainer)
            self._generators = module_state.held_generators(trainer)
        begun = time.monotonic()
        ahead = loops.num_batches_ahead(trainer)
        self._marks = self._watched.marks()
        self._parts = {
            "streams": RNGState.capture(),
            "batch_in_epoch": loops.batch_in_epoch(trainer),
            "generators": Streams(self._generators).capture_generators(),
            "loaders": _copied([loader.state_dict(ahead) for loader in loops.train_loaders(trainer)]),
            "combined": loops.combined_state(trainer),
            "extras": loops.capture_extras(trainer),
            "metrics": _copied(capture_metrics(trainer)),
            "buffers": {name: b.detach().clone() for name, b in trainer.lightning_module.named_buffers()},
            "progress": loops.capture_progress(trainer),
        }
        self.missing = ""
        self.is_held = self.was_held = True
        self._spent_seconds += time.monotonic() - begun

    def drop(self, missing: str) -> None:
        """Forgets the cut: the state is no longer what follows from it in ways that are known."""
        self.missing, self.is_held = missing, False
        if self._parts:
            self._parts = {}

    def end_step(self) -> None:
        """A step is over; to be called where `was_held`."""
        self.drop("the optimizer step was over, and what belongs to the step besides was not")
        self.was_held = False

    def changed(self, trainer: Trainer) -> str:
        """What has changed since the cut and was not remembered; "" if nothing."""
        if self._watched is None or self._watched.is_other(trainer):
            return "the module has other parameters or submodules than before"
        if self._watched.marks() != self._marks:
            return "parameters, training modes, or settings of an optimizer or scheduler were changed by the step"
        if {name for name, _ in trainer.lightning_module.named_buffers()} != set(self._parts["buffers"]):
            return "the module has other buffers than before"
        found = module_state.held_generators(trainer)
        if {name: id(g) for name, g in found.items()} != {name: id(g) for name, g in self._generators.items()}:
            return "other random generators are held than when training began"
        return ""

    @contextmanager
    def lent(self, trainer: Trainer) -> Iterator[None]:
        """While it lasts, the loaders say where they stood at the cut."""
        loaders = loops.train_loaders(trainer)
        for loader, state in zip(loaders, self._parts["loaders"], strict=True):
            loader.pin(state)
        try:
            yield
        finally:
            for loader in loaders:
                loader.pin(None)

    def put_into(self, checkpoint: dict[str, Any]) -> None:
        """Replaces what the step has changed in a checkpoint of the live state.

        Raises:
            RuntimeError: the checkpoint holds more than was remembered.
        """
        if self._watched is None:
            raise RuntimeError("no cut is remembered")
        if "current_model_state" in checkpoint:
            raise RuntimeError("averaged weights stand in the place of the module's own")
        (state,) = checkpoint[RANK_STATES]
        buffers, parts = self._parts["buffers"], self._parts
        names = set(checkpoint["state_dict"]) - self._watched.parameter_names
        if unknown := sorted(names - set(buffers)):
            raise RuntimeError(f"the module's state_dict has {unknown[0]!r}, which is neither parameter nor buffer")
        checkpoint["state_dict"].update({name: buffers[name] for name in names})
        loops.put_progress(checkpoint, parts["progress"])
        state["module"]["buffers"] = {name: buffers[name] for name in state["module"]["buffers"]}
        state.update({key: parts[key] for key in ("batch_in_epoch", "combined", "extras", "metrics")})
        state["generators"] = pack(parts["generators"])
        state["rng"] = parts["streams"].state_dict()


def _copied(value: Any) -> Any:
    """A copy that no step can change; what has no parts is shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(part) for part in value)
    if value is None or type(value) in (bool, int, float, str, bytes, torch.dtype):
        return value
    return copy.deepcopy(value)
