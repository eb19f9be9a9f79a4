"""Cuts at which nothing can be due: nearly all. A few comparisons tell them from the others."""

from __future__ import annotations

from time import monotonic
from typing import Any

from lightning.pytorch import Trainer

from lightning_resume.plugin import loops


class Quiet:
    """A time in which no cut needs anything of this package; for a run in one process.

    It ends at a moment or at a step that are known when it begins, or when something comes between: SIGTERM as
    Lightning notes it, or whatever else calls `end`. Whoever counts the steps compares them with `until_step`.

    Attributes:
        until_step: `global_step` with which it is over.
    """

    def __init__(self) -> None:
        """It has not begun."""
        self.forget()

    def forget(self) -> None:
        """It is over, and nothing of the trainer is kept."""
        self._until_seconds = self.until_step = 0.0
        self._lightning: Any = None

    def begin(self, trainer: Trainer, until_seconds: float, until_step: float) -> None:
        """It lasts from now on.

        Args:
            trainer: at a cut.
            until_seconds: of `time.monotonic`.
            until_step: `global_step` with which it is over.
        """
        self._lightning = loops.sigterm_owner(trainer)
        self._until_seconds, self.until_step = until_seconds, until_step

    def end(self) -> None:
        """It is over. A signal's handler may call this."""
        self._until_seconds = 0.0

    def lasts(self) -> bool:
        """Whether the cut that training has come to can be passed. Asked at every cut."""
        return monotonic() < self._until_seconds and not self._lightning.received_sigterm
