"""The loss of every optimizer step since step 1, kept across kills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_FLUSH_AFTER = 1000  # device tensors are moved to the CPU in groups: one synchronisation for all


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
        self._new_losses: list[torch.Tensor | float] = []
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
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._new_steps.append(global_step)
            # On the CPU a number costs less than a tensor that stays alive; on a device it would wait for the step.
            self._new_losses.append(loss.item() if _is_ready(loss) else loss.detach().reshape(()))
            if len(self._new_steps) >= _FLUSH_AFTER:
                self._flush()

    def _flush(self) -> None:
        if not self._new_steps:
            return
        waiting = [loss.to(torch.float64) for loss in self._new_losses if isinstance(loss, torch.Tensor)]
        arrived = iter(torch.stack(waiting).tolist() if waiting else ())
        new = [next(arrived) if isinstance(loss, torch.Tensor) else loss for loss in self._new_losses]
        self._steps = torch.cat([self._steps, torch.tensor(self._new_steps, dtype=torch.int64, device="cpu")])
        self._losses = torch.cat([self._losses, torch.tensor(new, dtype=torch.float64, device="cpu")])
        self._new_steps, self._new_losses = [], []

    def state_dict(self) -> dict[str, Any]:
        """`{"steps": int64 tensor, "losses": float64 tensor, "last_step": int}`."""
        return {"steps": self.steps, "losses": self.losses, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self._steps, self._losses = state["steps"], state["losses"]
        self._new_steps, self._new_losses = [], []
        self._last_step = state["last_step"]


def _is_ready(loss: torch.Tensor) -> bool:
    return loss.is_cpu and loss.is_floating_point()
