"""Settings for every test: one thread for each process, so that tests in parallel do not fight for the cores."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# Read when torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs behind it with Ctrl-C ignored, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeds_are_taken_back() -> Iterator[None]:
    """`seed_everything` leaves the seed in the environment; what runs next in this process is to find none."""
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
