"""Measuring in a process that has just begun: it lays out its memory anew, and its peak is of nothing else."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def in_new_process(measure: Callable[..., T], *arguments: Any) -> T:
    """What a function returns there; its failure is raised here.

    Args:
        measure: a module's function.
        arguments: for it; they and the result are sent.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *arguments).result()
