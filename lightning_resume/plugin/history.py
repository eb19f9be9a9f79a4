"""The loss of every optimizer step since step 1, kept across kills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_READ_AFTER = 1000  # device tensors are moved to the CPU in groups: one synchronisation for all


class LossHistory:
    """Steps and losses. A checkpoint holds those of rank 0, with which all ranks go on after a resume.

    Attributes:
        steps: int64 tensor, `global_step` after each optimizer step whose loss is known.
        losses: float64 tensor of the same length: the loss of the batch that completed the step, as Lightning hands it
            to `on_train_batch_end` (divided by `accumulate_grad_batches`).
    """

    def __init__(self) -> None:
        self._steps = torch.empty(0, dtype=torch.int64, device="cpu")
        self._losses = torch.empty(0, dtype=torch.float64, device="cpu")
        self._new_steps: list[int] = []
        self._new_losses: list[float] = []
        self._waiting: list[Tensor] = []
        self._last_step = 0
        self._is_like_last = False  # as far as is known: a number on the CPU

    @property
    def steps(self) -> Tensor:
        """`global_step` of each entry, int64."""
        self._flush()
        return self._steps

    @property
    def losses(self) -> Tensor:
        """Loss of each entry, float64."""
        self._flush()
        return self._losses

    def __len__(self) -> int:
        return len(self._steps) + len(self._new_steps)

    def note(self, global_step: int, outputs: Any) -> None:
        """Takes the loss out of a training step's outputs, if a step was made and there is a loss."""
        if global_step == self._last_step:
            return
        self._last_step = global_step
        loss = outputs.get("loss") if type(outputs) is dict or isinstance(outputs, Mapping) else outputs
        if self._is_like_last and type(loss) is Tensor:
            # In the middle of a step little is in the processor's cache: each question takes microseconds.
            value: Any = loss.tolist()
            if type(value) is float:
                self._new_steps.append(global_step)
                self._new_losses.append(value)
                return
        self._take(global_step, loss)

    def _take(self, global_step: int, loss: Any) -> None:
        """Its value now: others hold the tensor too, and may add the next losses to it."""
        self._is_like_last = False
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        self._new_steps.append(global_step)
        if loss.is_cpu:
            if self._waiting:
                self._read()
            self._new_losses.append(loss.item())
            self._is_like_last = loss.dim() == 0
        else:
            self._waiting.append(loss.detach().clone())
            if len(self._waiting) >= _READ_AFTER:
                self._read()

    def _read(self) -> None:
        losses, self._waiting = self._waiting, []
        device = losses[0].device
        self._new_losses += torch.stack([loss.reshape(()).to(device, torch.float64) for loss in losses]).tolist()

    def _flush(self) -> None:
        self._is_like_last = False
        if self._waiting:
            self._read()
        if self._new_steps:
            self._steps = torch.cat([self._steps, torch.tensor(self._new_steps, dtype=torch.int64, device="cpu")])
            self._losses = torch.cat([self._losses, torch.tensor(self._new_losses, dtype=torch.float64, device="cpu")])
            self._new_steps, self._new_losses = [], []

    def state_dict(self) -> dict[str, Any]:
        """`{"steps": int64 tensor, "losses": float64 tensor, "last_step": int}`."""
        return {"steps": self.steps, "losses": self.losses, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self._steps, self._losses = state["steps"], state["losses"]
        self._new_steps, self._new_losses, self._waiting = [], [], []
        self._last_step, self._is_like_last = state["last_step"], False
