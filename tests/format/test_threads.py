"""Threads that help with a call: they end with it, whatever happens in it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import weakref
from typing import Any

import pytest

from lightning_resume.format.threads import default_threads, for_each, threads_to_read


@pytest.mark.parametrize("num_threads", [1, 3, 50])
def test_everything_is_done_once(num_threads: int) -> None:
    """Whatever the number of threads."""
    done: list[int] = []

    for_each(range(20), done.append, num_threads)

    assert sorted(done) == list(range(20))


def test_nothing_to_do_is_done_at_once() -> None:
    """No action is called."""
    done: list[int] = []

    for_each([], done.append, 3)

    assert done == []


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_failure_stops_the_others_and_is_raised(num_threads: int) -> None:
    """What was not begun is left undone, and no thread goes on."""
    begun: list[int] = []
    before = set(threading.enumerate())

    def act(number: int) -> None:
        begun.append(number)
        if number == 2:
            raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        for_each(range(10_000), act, num_threads)

    assert len(begun) < 10_000
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_failure_lets_go_of_what_the_actions_hold(num_threads: int) -> None:
    """At once, when the error is dealt with: a refused load of some GB must not wait for the collector of cycles."""

    class Memory:
        pass

    def fail() -> weakref.ref[Memory]:
        memory = Memory()

        def act(number: int, held: Memory = memory) -> None:
            raise OSError(28, f"full at {number}")

        with contextlib.suppress(OSError):
            for_each(range(9), act, num_threads)
        return weakref.ref(memory)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_an_interrupt_waits_for_the_threads() -> None:
    """Not even Ctrl-C lets a thread go on in memory that the caller takes for its own again."""
    main, is_begun = threading.get_ident(), threading.Event()
    finished: list[int] = []
    before = set(threading.enumerate())

    def act(number: int) -> None:
        if threading.get_ident() == main:
            is_begun.set()
            os.kill(os.getpid(), signal.SIGINT)  # raises KeyboardInterrupt here, or at the next statement
            threading.Event().wait(30)
        else:
            is_begun.wait(30)  # for the other item to be the main thread's
            finished.append(number)

    with pytest.raises(KeyboardInterrupt):
        for_each(range(2), act, 2)

    assert len(finished) == 1
    assert set(threading.enumerate()) <= before


def test_an_interrupt_in_a_threads_start_waits_for_it(monkeypatch: Any) -> None:
    """It runs, although the call that started it did not return."""
    real = threading.Thread.start
    finished: list[int] = []
    before = set(threading.enumerate())

    def start(thread: threading.Thread) -> None:
        real(thread)
        raise KeyboardInterrupt

    def act(number: int) -> None:
        threading.Event().wait(0.05)
        finished.append(number)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        for_each(range(3), act, 2)

    assert finished == [0, 1, 2]
    assert set(threading.enumerate()) <= before


def test_threads_are_as_many_as_cores_up_to_four(monkeypatch: Any) -> None:
    """Of those that this process may use; for little data there are none."""
    for cores, expected in ((1, 1), (2, 2), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)

        assert default_threads() == expected
        assert threads_to_read([2**20] * 100) == expected + 1
        assert threads_to_read([10, 20]) == 1


def test_where_cores_cannot_be_asked_for_the_machines_are_counted(monkeypatch: Any) -> None:
    """Not every system binds processes to cores."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)

    assert default_threads() == 1
