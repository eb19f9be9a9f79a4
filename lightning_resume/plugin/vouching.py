"""Whether the state after a step that an exception has ended can be vouched for, as far as code can be read.

`Recall` knows what Lightning and torch change in a step. What the user's own code may have changed besides, in state
that a checkpoint holds, can only be told from what it overrides. Where in doubt, the answer is no.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_resume.plugin import loops

# Run between a cut and the optimizer step, or before this package is told of the exception.
_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_exception",
)
_STATE = ("state_dict", "on_save_checkpoint")
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_resume", "torchmetrics", "numpy", "builtins")
_MAX_FUNCTIONS = 5000


def doubts(trainer: Trainer, own: Callback) -> str:
    """Why the user's code may have changed what a checkpoint holds; "" if nothing speaks for it.

    Args:
        trainer: whose step has ended.
        own: the callback that is exempt.
    """
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    for name in _STATE:
        if _overrides(module, LightningModule, name):
            return f"{type(module).__name__} overrides {name}"
        if data is not None and _overrides(data, LightningDataModule, name):
            return f"{type(data).__name__} overrides {name}"
    for child in module.modules():
        if _overrides(child, nn.Module, "get_extra_state"):
            return f"{type(child).__name__} overrides get_extra_state"
    for callback in loops.callbacks(trainer):
        hooks = [name for name in _HOOKS if _runs(callback, name)]
        if callback is not own and hooks and any(_overrides(callback, Callback, name) for name in _STATE):
            return f"{type(callback).__name__} has state, and {hooks[0]} may have changed it"
    owners = [*module.modules(), *loops.callbacks(trainer)]
    writer = _writes_past_autograd([*owners, *(value for owner in owners for value in vars(owner).values())])
    return f"{writer} uses `.data`, which can change a parameter unnoticed" if writer else ""


def _overrides(owner: object, base: type, name: str) -> bool:
    method = getattr(owner, name)
    return getattr(method, "__func__", method) is not getattr(base, name)


def _runs(callback: Callback, name: str) -> bool:
    if name == "on_exception" and isinstance(callback, ModelCheckpoint):
        is_stock = not _overrides(callback, ModelCheckpoint, name)
        return not is_stock or bool(getattr(callback, "save_on_exception", False))
    return _overrides(callback, Callback, name)


def _writes_past_autograd(owners: list[Any]) -> str:
    """The name of a function of the owners' classes, or of one that they call by name, that reads `something.data`."""
    classes = {cls for owner in owners for cls in type(owner).__mro__ if not _is_library(cls.__module__)}
    queue = [function for cls in classes for function in _functions(cls)]
    seen: set[CodeType] = set()
    while queue and len(seen) < _MAX_FUNCTIONS:
        function = queue.pop()
        if function.__code__ in seen or _is_library(function.__module__):
            continue
        seen.add(function.__code__)
        for code in _codes(function.__code__):
            if _reads_data(code):
                return str(function.__qualname__)
            queue.extend(_called(function, code))
    return "code too large to look through, which perhaps" if queue else ""


def _is_library(name: str | None) -> bool:
    return (name or "").split(".")[0] in _LIBRARIES


def _functions(cls: type) -> Iterator[FunctionType]:
    for value in vars(cls).values():
        for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
            if isinstance(function, FunctionType):
                yield function


def _called(function: FunctionType, code: CodeType) -> Iterator[FunctionType]:
    cells = [_contents(cell) for cell in function.__closure__ or ()]
    for value in [*(function.__globals__.get(name) for name in code.co_names), *cells]:
        if isinstance(value, FunctionType):
            yield value
        elif isinstance(value, type) and not _is_library(value.__module__):
            yield from _functions(value)


def _contents(cell: CellType) -> object:
    """What a closure holds; None where it is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _reads_data(code: CodeType) -> bool:
    """Whether `x.data` is read for an x that is not `self`."""
    before = None
    for instruction in dis.get_instructions(code):
        is_read = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval == "data"
        if is_read and (before is None or before.argval != "self"):
            return True
        before = instruction
    return False
