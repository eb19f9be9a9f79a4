"""The loss of every optimizer step since step 1, kept across kills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Reading a tensor's value in the middle of a step takes longer than all else here, as nothing of it is in the
# processor's cache: it is done for some at once. On a device it waits for the step.
_GROUP = 64
_GROUP_ON_DEVICE = 1000


class LossHistory:
    """Steps and losses. A checkpoint holds those of rank 0, with which all ranks go on after a resume.

    Attributes:
        steps: int64 tensor, `global_step` after each optimizer step whose loss is known.
        losses: float64 tensor of the same length: the loss of the batch that completed the step, as Lightning hands it
            to `on_train_batch_end` (divided by `accumulate_grad_batches`), and as the hooks there leave it.
    """

    def __init__(self) -> None:
        self._steps = torch.empty(0, dtype=torch.int64, device="cpu")
        self._losses = torch.empty(0, dtype=torch.float64, device="cpu")
        self._new_steps: list[int] = []
        self._new_losses: list[float] = []
        self._waiting: list[torch.Tensor] = []
        self._group = _GROUP
        self._last_step = 0

    @property
    def steps(self) -> torch.Tensor:
        """`global_step` of each entry, int64."""
        self._flush()
        return self._steps

    @property
    def losses(self) -> torch.Tensor:
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
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            if len(self._waiting) >= self._group:  # of this one, a hook after this may still change the value
                self._read()
            self._new_steps.append(global_step)
            self._waiting.append(loss.detach())

    def _read(self) -> None:
        losses, self._waiting = self._waiting, []
        if len({(loss.shape, loss.dtype, loss.device) for loss in losses}) > 1:
            losses = [loss.reshape(()).to("cpu", torch.float64) for loss in losses]
        self._group = _GROUP if losses[0].is_cpu else _GROUP_ON_DEVICE
        self._new_losses += torch.stack(losses).flatten().tolist()

    def _flush(self) -> None:
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
        self._last_step = state["last_step"]
