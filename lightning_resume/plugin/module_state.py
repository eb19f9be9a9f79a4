"""What belongs to a module, and stands neither in its `state_dict` nor in Lightning's checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_resume.data.held import Generator, find_generators
from lightning_resume.plugin.checkpoint_io import STATE_KEY
from lightning_resume.plugin.loops import callbacks


def capture_module(trainer: Trainer) -> dict[str, Any]:
    """What a module's `state_dict` leaves out: modes, frozen parameters, buffers that are not persistent, gradients."""
    module = trainer.lightning_module
    saved = module.state_dict(keep_vars=True)
    parameters = list(module.named_parameters())
    with_gradients = [(name, p.grad) for name, p in parameters] if _may_look_at_gradients(trainer) else []
    return {
        "eval": [name for name, child in module.named_modules() if not child.training],
        "frozen": [name for name, parameter in parameters if not parameter.requires_grad],
        # The checkpoint's state_dict is rank 0's; where DDP does not broadcast buffers, every rank has its own.
        "buffers": {
            name: buffer for name, buffer in module.named_buffers() if name not in saved or trainer.global_rank > 0
        },
        "gradients": {name: gradient.detach() for name, gradient in with_gradients if gradient is not None},
    }


def _may_look_at_gradients(trainer: Trainer) -> bool:
    """Whether gradients of the last step may still be wanted before the next backward pass.

    With manual optimization the user alone knows when they are cleared; with automatic optimization Lightning clears
    them in the next batch, unless that is overridden, and after a hook that may look at them.
    """
    module = trainer.lightning_module
    hooks = [type(callback).on_before_zero_grad is not Callback.on_before_zero_grad for callback in callbacks(trainer)]
    names = ("optimizer_zero_grad", "on_before_zero_grad")
    return not module.automatic_optimization or any(hooks) or any(is_overridden(name, module) for name in names)


def restore_module(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Puts back what `capture_module` returned, in place."""
    module = trainer.lightning_module
    for name, child in module.named_modules():
        child.training = name not in state["eval"]
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in state["frozen"])
        gradient = state["gradients"].get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter)
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        for name, buffer in state["buffers"].items():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffers[name].copy_(buffer)
            else:  # not there yet, or of another size, in a module that was built anew
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner)._buffers[leaf] = buffer.to(trainer.strategy.root_device)


def held_generators(trainer: Trainer) -> dict[str, Generator]:
    """The random generators that modules and callbacks hold as attributes, by path."""
    owners: dict[str, object] = {"module": trainer.lightning_module, "datamodule": trainer.datamodule}  # type: ignore[attr-defined]
    numbers: Counter[str] = Counter()
    for callback in callbacks(trainer):
        name = type(callback).__name__
        owners[f"callbacks.{name}.{numbers[name]}"] = callback
        numbers[name] += 1
    own = [callback for callback in callbacks(trainer) if callback.state_key == STATE_KEY]
    return find_generators(owners, stop=[trainer, *own])


def restore_double(trainer: Trainer, state_dict: Mapping[str, Any]) -> None:
    """Copies float64 weights again: Lightning loads them into the module before it is converted, through float32."""
    live = trainer.lightning_module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in state_dict.items():
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128):
                live[name].copy_(value)


class Watched:
    """A module's parameters, submodules and optimizers, to tell whether a step has touched them.

    Autograd counts the writes to a tensor. A write through `.data` is not counted: see `vouching`.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Lists them, so that looking at them is cheap."""
        self._names, self._parameters, self._modules = _lists(trainer)
        self._optimizers = list(trainer.optimizers)
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]

    def marks(self) -> list[Any]:
        """Equal to what it was before exactly if nothing was touched."""
        owners = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        owners += [vars(scheduler) for scheduler in self._schedulers]
        return [
            *((p._version, p.data_ptr(), p.requires_grad) for p in self._parameters),
            [module.training for module in self._modules],
            [_settings(owner) for owner in owners],
        ]

    def is_other(self, trainer: Trainer) -> bool:
        """Whether there are others now."""
        names, parameters, modules = _lists(trainer)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        now = [*parameters, *modules, *trainer.optimizers, *schedulers]
        before = [*self._parameters, *self._modules, *self._optimizers, *self._schedulers]
        return names != self._names or [id(item) for item in now] != [id(item) for item in before]

    @property
    def parameter_names(self) -> frozenset[str]:
        """By which a `state_dict` has the parameters."""
        return frozenset(self._names)


def _settings(owner: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of an optimizer's group or a scheduler, and marks of its tensors."""
    settings: dict[str, Any] = {}
    for name, value in owner.items():
        if isinstance(value, torch.Tensor):
            settings[name] = id(value), value._version
        elif isinstance(value, int | float | str | tuple) or value is None:
            settings[name] = value
        elif isinstance(value, list) and name != "params":
            settings[name] = list(value)
    return settings


def _lists(trainer: Trainer) -> tuple[list[str], list[torch.nn.Parameter], list[torch.nn.Module]]:
    module = trainer.lightning_module
    named = list(module.named_parameters(remove_duplicate=False))
    return [name for name, _ in named], [parameter for _, parameter in named], list(module.modules())


def needs_gradients(trainer: Trainer) -> bool:
    """Whether the gradients of the step before are state: the module or a callback may look at them."""
    return _may_look_at_gradients(trainer)
