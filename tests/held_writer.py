"""Holds saves in the background until training has gone on: what is written then is the copy, or the test fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lightning_resume.format.prepared import PreparedCheckpoint
from lightning_resume.writer import BackgroundWriter

DEADLINE_SECONDS = 30


class HeldWriter(Callback):
    """Holds each commit in the background until training is at a later batch, or waits for it.

    Args:
        patch: sets an attribute.
        num_batches: for so many more batches, or until training waits for the save; None: until it does.
        before_commit: called in the background when the hold is over, with the number of the commit, from 1.

    Attributes:
        held: for each commit in the background: the step that it is of, and the steps taken when it was let go.
    """

    def __init__(
        self,
        patch: Callable[[Any, str, Any], None] = setattr,
        num_batches: int | None = None,
        before_commit: Callable[[int], object] = lambda number: None,
    ) -> None:
        self.num_batches, self.held = num_batches, []
        self._step = 0
        self._gate = threading.Condition()
        self._is_awaited = False
        commit, wait = PreparedCheckpoint.commit, BackgroundWriter.wait

        def held_commit(prepared: PreparedCheckpoint, *arguments: Any, **keywords: Any) -> object:
            if threading.current_thread() is not threading.main_thread():
                self._hold(int(prepared.path.name.removeprefix("step-")))
                before_commit(len(self.held))
            return commit(prepared, *arguments, **keywords)

        def noted_wait(writer: BackgroundWriter, *arguments: Any) -> bool:
            with self._gate:
                self._is_awaited = True
                self._gate.notify_all()
            try:
                return wait(writer, *arguments)
            finally:
                self._is_awaited = False

        patch(PreparedCheckpoint, "commit", held_commit)
        patch(BackgroundWriter, "wait", noted_wait)

    def _hold(self, begun: int) -> None:
        last = begun + self.num_batches if self.num_batches is not None else sys.maxsize
        with self._gate:
            may_go = self._gate.wait_for(lambda: self._is_awaited or self._step >= last, DEADLINE_SECONDS)
            if not may_go:
                raise AssertionError(f"training did not go on behind the save of step {begun}")
            self.held.append((begun, self._step))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with self._gate:
            self._step = trainer.global_step
            self._gate.notify_all()
