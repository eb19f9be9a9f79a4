"""Threads that end with the call that began them, whatever happens in it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
MAX_THREADS = 4
SMALL_BYTES = 4 * 2**20  # less than this, in all, is done before another thread has begun


def default_threads() -> int:
    """As many as there are cores that this process may use, up to `MAX_THREADS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, cores)


def threads_to_read(sizes: Iterable[int]) -> int:
    """How many threads it takes to read and to hash files of these sizes in bytes.

    One more than there are cores: each waits for the disk now and then, when nothing of its file is in memory.
    """
    return default_threads() + 1 if sum(sizes) >= SMALL_BYTES else 1


def beside(threads: Sequence[threading.Thread], action: Callable[[bool], None]) -> None:
    """Does something while threads run, none of which outlives it: not even an interrupt lets go of them.

    Args:
        threads: to be started; they end by themselves. Those that the system has no room for are left out.
        action: is told whether all of them run.
    """
    late: BaseException | None = None
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            started.append(thread)  # before: an interrupt may come when it runs, and `start` has not returned
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter is shutting down
                started.remove(thread)
        action(len(started) == len(threads))
    finally:
        for thread in started:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as error:  # a second interrupt
                    late = error
    if late is not None:
        raise late


def for_each(items: Iterable[T], action: Callable[[T], None], num_threads: int) -> None:
    """Does something with each item; every thread takes the next one when it is done with one.

    Args:
        items: in the order in which they are begun.
        action: what to do; several threads are in it at once.
        num_threads: with the calling one.

    Raises:
        BaseException: the first failure; what was not begun by then is left undone.
    """
    pending = deque(items)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                try:
                    item = pending.popleft()
                except IndexError:
                    return
                action(item)
        except BaseException as error:
            failures.append(error)
            pending.clear()

    count = min(num_threads, len(pending)) - 1
    beside([threading.Thread(target=work) for _ in range(count)], lambda _: work())
    try:
        if failures:
            raise failures[0]
    finally:  # its traceback leads here: as a circle, it would keep all that the actions hold until it is collected
        failures.clear()
