"""Lightning's StochasticWeightAveraging, which sets itself up in `on_train_epoch_start`.

Lightning does not call that hook again in an epoch that is resumed in the middle (the epoch has started), so the
callback would forget its scheduler. Checked on lightning 2.6.6; `WeightAveraging` (EMA) needs no help.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_resume.errors import StateMismatchError
from lightning_resume.plugin import loops


def is_collecting_batch_norm(trainer: Trainer) -> bool:
    """Whether this is the extra epoch that only measures batch norm statistics for the averaged weights.

    What it needs to end well is in memory alone; a run that dies in it is resumed from the epoch before.
    """
    return any(callback._max_epochs != -1 and trainer.current_epoch > callback.swa_end for callback in _swa(trainer))


def places_set_up(trainer: Trainer) -> list[int]:
    """Which of the callbacks, by their place among them, have set themselves up."""
    return [place for place, callback in enumerate(_swa(trainer)) if callback._initialized]


def check_places(trainer: Trainer, places: Sequence[int]) -> None:
    """Refuses a checkpoint in which such a callback had set itself up that is not there now.

    Raises:
        StateMismatchError: names both numbers of callbacks.
    """
    needed, found = max(places, default=-1) + 1, len(_swa(trainer))
    if found < needed:
        raise StateMismatchError(
            "number of StochasticWeightAveraging callbacks", needed, found, "Pass the callbacks of the save."
        )


def set_up_again(trainer: Trainer, places: Sequence[int], optimizer_states: Sequence[dict[str, Any]]) -> None:
    """Lets those callbacks set themselves up as they had; puts the optimizers' settings back, which that changes."""
    if not places:
        return
    callbacks = _swa(trainer)
    for place in places:
        callbacks[place].on_train_epoch_start(trainer, trainer.lightning_module)
    for optimizer, saved in zip(trainer.optimizers, optimizer_states, strict=True):
        for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})


def _swa(trainer: Trainer) -> list[StochasticWeightAveraging]:
    return [c for c in loops.callbacks(trainer) if isinstance(c, StochasticWeightAveraging)]
