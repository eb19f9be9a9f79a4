"""Measuring in a process that has just begun: memory is laid out as at a program's start, a peak is of nothing else."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
PRELOADED = ["benchmarks.states", "lightning.pytorch", "lightning_resume"]


def in_new_process(measure: Callable[..., T], *arguments: Any, is_layout_new: bool = False) -> T:
    """What a function returns there; its failure is raised here.

    Args:
        measure: a module's function.
        arguments: for it; they and the result are sent.
        is_layout_new: at other addresses than all before it. Otherwise it is forked from a process that has imported
            torch and Lightning, and has done nothing else: that takes some seconds less.
    """
    context = multiprocessing.get_context("spawn" if is_layout_new else "forkserver")
    if not is_layout_new:
        context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(measure, *arguments).result()
