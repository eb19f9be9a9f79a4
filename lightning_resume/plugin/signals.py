"""Signals that ask training to stop: noted when they come, heeded at the next cut, after the save.

A signal's handler runs between any two instructions, in the middle of a step. The handlers here only take a note. What
the handler before them would have done (Lightning's, or the user's own) is done at the cut, when the state is saved.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_resume.plugin import loops
from lightning_resume.plugin.ranks import largest

Handler = Callable[[int, FrameType | None], Any] | int | None

ASK_EVERY_SECONDS = 0.1
"""Several ranks ask each other at the first cut after so much time."""

_HINT = b"\nTraining stops when this batch is over and saved; Ctrl-C again stops it at once, without a save.\n"


class Signals:
    """SIGTERM, SIGINT, and the signal with which SLURM asks for a requeue, while training runs.

    Notes them in the main thread of the process that trains; a process that was forked from it is left to die of them.
    A second SIGINT is not waited with: it does at once what the handler before would have done.
    """

    def __init__(self, tell: Callable[[], object] = int) -> None:
        """Takes no notes yet.

        Args:
            tell: is called when one is noted, by the signal's handler.
        """
        self._tell = tell
        self._older: dict[int, Handler] = {}
        self._oldest: dict[int, Handler] = {}
        self._passed_on = -1
        self._noted: Counter[int] = Counter()
        self._requeue_signal: int | None = None
        self._pid = -1
        self._tells = False
        self._asked_at = 0.0
        self._num_cuts = self._ask_after = 1  # since the ranks asked each other

    @property
    def is_impatient(self) -> bool:
        """Whether SIGINT came twice: no save is waited for."""
        return self._noted[signal.SIGINT] > 1

    def may_be_noted(self, trainer: Trainer) -> bool:
        """Whether `heed` has anything to do, or to ask the other ranks. To be called at each cut, on all ranks."""
        self._num_cuts += 1
        if trainer.world_size > 1:
            return self._num_cuts > self._ask_after
        return bool(self._noted) or trainer.received_sigterm

    def install(self, trainer: Trainer) -> None:
        """Training begins. Does nothing outside the main thread, or where a signal is ignored or handled in C.

        May be called again, for a handler that somebody has installed since.
        """
        self._requeue_signal = loops.requeue_signal(trainer)
        self._pid, self._tells = os.getpid(), trainer.is_global_zero
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in self._kinds():
            older = signal.getsignal(signum)
            if older == self._note or (older == signal.SIG_DFL and signum == self._requeue_signal):
                continue
            if callable(older) or older == signal.SIG_DFL:
                if signum in self._older:
                    self._oldest.setdefault(signum, self._older[signum])
                self._older[signum] = older
                signal.signal(signum, self._note)

    def remove(self) -> None:
        """Training is over. Puts the older handlers back, except where somebody else has put another one there."""
        if threading.current_thread() is threading.main_thread():
            for signum, older in self._older.items():
                if signal.getsignal(signum) in (self._note, self._pass_over):
                    signal.signal(signum, self._oldest.get(signum, older))
        self._older.clear()
        self._oldest.clear()
        self._noted.clear()
        self._num_cuts = self._ask_after = 1

    def leave(self, trainer: Trainer) -> None:
        """An exception ends training, of whatever kind: what was noted before it and is not heeded is handed on."""
        if self._noted[signal.SIGTERM] and trainer.world_size == 1:  # Lightning's handler waits for all ranks
            self._pass_on(signal.SIGTERM)
        self.remove()

    @property
    def are_noted(self) -> bool:
        """Whether this process has noted one that is not heeded yet."""
        return bool(self._noted)

    def heed(
        self, trainer: Trainer, save: Callable[[], str], at_cut: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """At a cut: if any rank has noted a signal, saves, then lets the older handlers act. All ranks must call.

        In several processes it costs a reduction of a few numbers, in place of Lightning's broadcast at every batch.

        Args:
            trainer: at the cut, or at the end of training.
            save: saves where the last save was of an earlier step; says where the step is saved, or what is newest.
            at_cut: what the older handlers run in; a checkpoint that one of them makes is one of the cut.

        Raises:
            SIGTERMException: Lightning was asked to end.
            KeyboardInterrupt: and whatever else an older handler raises.
        """
        signums = self._wanted(trainer)
        if not signums:
            return
        where = save()
        names = " and ".join(signal.Signals(signum).name for signum in signums)
        rank_zero_info(f"{names} came: heeded at global_step {trainer.global_step}, between two batches; {where}.")
        for signum in signums:
            if signum != signal.SIGTERM or not trainer.received_sigterm:
                with at_cut():
                    self._pass_on(signum)
            self._noted.pop(signum, None)
            if signum == signal.SIGTERM and trainer.received_sigterm:
                raise SIGTERMException
        self._mind_workers()

    def _wanted(self, trainer: Trainer) -> list[int]:
        """The signals that any rank has noted. From the slowest one's pace follows when to ask again."""
        now = time.monotonic()
        pace = int(1e6 * (now - self._asked_at) / self._num_cuts)
        *wanted, pace = largest(trainer, [*(self._is_noted(trainer, signum) for signum in self._kinds()), pace])
        self._asked_at, self._num_cuts = now, 0
        self._ask_after = int(1e6 * ASK_EVERY_SECONDS / max(pace, 1))
        return [signum for signum, is_wanted in zip(self._kinds(), wanted, strict=True) if is_wanted]

    def _kinds(self) -> list[int]:
        requeue = [] if self._requeue_signal in (None, signal.SIGTERM, signal.SIGINT) else [self._requeue_signal]
        return [*requeue, signal.SIGTERM, signal.SIGINT]

    def _is_noted(self, trainer: Trainer, signum: int) -> bool:
        return self._noted[signum] > 0 or (signum == signal.SIGTERM and trainer.received_sigterm)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _note_in_worker(signum)
            return
        if signum == self._passed_on:  # a handler that was installed in training calls the one before, which is this
            _act(self._oldest.get(signum), signum)
            return
        self._noted[signum] += 1
        self._tell()
        if signum == signal.SIGTERM:
            self._pass_over_workers()
        elif signum == signal.SIGINT and self.is_impatient:
            self._pass_on(signum)
        elif signum == signal.SIGINT and self._tells:
            os.write(2, _HINT)  # nothing that buffers may be entered here

    def _pass_on(self, signum: int) -> None:
        """Does what would have happened without this class."""
        self._passed_on = signum
        try:
            _act(self._older.get(signum, signal.getsignal(signum)), signum)
        finally:
            self._passed_on = -1

    def _pass_over_workers(self) -> None:
        """Keeps torch from raising in mid-step that a worker process has died: a whole group was signalled.

        The cut needs no further batch. If one is needed all the same, fetching it says that the worker is gone.
        """
        older = signal.getsignal(signal.SIGCHLD)
        if callable(older) and older != self._pass_over:
            self._older[signal.SIGCHLD] = older
            signal.signal(signal.SIGCHLD, self._pass_over)

    def _pass_over(self, signum: int, frame: FrameType | None) -> None:
        older = self._older.get(signum)
        if callable(older):
            with contextlib.suppress(RuntimeError):
                older(signum, frame)

    def _mind_workers(self) -> None:
        """Training goes on: an older handler did not end it."""
        older = self._older.pop(signal.SIGCHLD, None)
        if older is not None:
            signal.signal(signal.SIGCHLD, older)


def _act(handler: Handler, signum: int) -> None:
    if callable(handler):
        handler(signum, inspect.currentframe())
    elif handler == signal.SIG_DFL:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)


def _note_in_worker(signum: int) -> None:
    """In a process that was forked from the training one: it ends as it would have without this package."""
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    if signum == signal.SIGTERM:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
    # The requeue is none of its business, and training goes on after it.
