"""Saving behind the training: one job at a time, on a thread of its own. Knows neither torch nor Lightning."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

NICENESS = 10  # of the thread, where threads have one of their own (Linux): training goes first


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        name: of the job.
        error: what it raised, or None.
        seconds: how long it took.
    """

    name: str
    error: BaseException | None
    seconds: float


class BackgroundWriter:
    """Runs one job at a time behind its caller; all methods are for the caller's thread.

    The thread is no daemon: an interpreter that exits, by whatever exception, waits for the job. A killed process does
    not, and leaves what the job itself promises to leave.
    """

    def __init__(self) -> None:
        """Has nothing to do."""
        self._name = ""
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None

    def submit(self, name: str, job: Callable[[], object]) -> None:
        """Starts a job; where no thread can be started, it is done at once.

        Args:
            name: what `Outcome` calls it.
            job: what to do. What it raises is kept for `collect`.

        Raises:
            RuntimeError: there is a job already, or one whose outcome was not collected.
        """
        if self._thread is not None or self._outcome is not None:
            raise RuntimeError(f"{name!r} was submitted while another job was in flight")
        self._name = name
        self._thread = threading.Thread(target=self._run, args=(name, job), name=f"lightning_resume: {name}")
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is on its way out, or the system has no thread left
            self._thread = None
            self._work(name, job)

    @property
    def is_busy(self) -> bool:
        """Whether a job is being done."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """Whether there is neither a job nor an outcome to collect."""
        return self._thread is None and self._outcome is None

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits for the job, if there is one; an exception in the waiting thread leaves the job going on.

        Args:
            timeout_seconds: how long at most; None: until it is done.

        Returns:
            Whether it is done.
        """
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return not self.is_busy

    def collect(self) -> Outcome | None:
        """The outcome of a job that is done, once; None where there is none (yet).

        A process that was forked during the job does not know its outcome: for it the job has failed.
        """
        if self.is_busy:
            return None
        if self._thread is not None and self._outcome is None:
            error = ChildProcessError(errno.ECHILD, "only the process that began it knows how it ended")
            self._outcome = Outcome(self._name, error, 0.0)
        outcome, self._outcome, self._thread = self._outcome, None, None
        return outcome

    def _run(self, name: str, job: Callable[[], object]) -> None:
        if hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._work(name, job)

    def _work(self, name: str, job: Callable[[], object]) -> None:
        begun, error = time.monotonic(), None
        try:
            job()
        except BaseException as caught:  # also SystemExit: it would end this thread only, without a word
            error = caught
        self._outcome = Outcome(name, error, time.monotonic() - begun)
