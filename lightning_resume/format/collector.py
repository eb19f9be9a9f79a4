"""Python's cyclic garbage collector, which very many new objects would make walk through all old ones."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Keeps the collector still; afterwards it is on again if it was on. Nothing that is made in here is a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
