"""When an exception ends training: the last whole step is saved, or it is said what is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_resume.plugin.recall import Recall
from lightning_resume.plugin.saver import Saver
from lightning_resume.plugin.vouching import doubts

Amend = Callable[[dict[str, Any]], None]


def save_last_cut(
    trainer: Trainer,
    exception: BaseException,
    *,
    recall: Recall,
    saver: Saver,
    save: Callable[[Amend], None],
    own: Callback,
    refusal: str = "",
) -> None:
    """Saves the remembered cut if all of it can be vouched for; otherwise warns. Never raises an error of its own.

    Args:
        trainer: whose training an exception has ended.
        exception: the one.
        recall: remembers the cut.
        saver: knows what is saved already.
        save: saves the live state as an ordinary checkpoint, once what it is given has amended it.
        own: this package's callback.
        refusal: a reason not to try.
    """
    num_steps = saver.steps_since_save(trainer)
    if num_steps <= 0:
        return
    name = type(exception).__name__
    reason = refusal or recall.missing
    try:
        reason = reason or recall.changed(trainer) or doubts(trainer, own)
        if not reason:
            with recall.lent(trainer):
                save(recall.put_into)
    except Exception as error:  # a device that has failed, for one; the exception that ended training comes first
        reason = f"saving failed: {type(error).__name__}: {error}"
    if not reason and saver.steps_since_save(trainer) == 0:
        rank_zero_info(f"{name} ended training; its last whole step, {trainer.global_step}, is saved.")
    elif reason:
        newest = repr(os.path.basename(saver.last_path)) if saver.last_path else "none"
        rank_zero_warn(
            f"{name} ended training, and its last whole step is not saved: {reason}.\n"
            f"  newest checkpoint:          {newest}\n"
            f"  steps to be trained again:  {num_steps}"
        )
