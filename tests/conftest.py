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
def _environment_is_put_back() -> Iterator[None]:
    """Lightning leaves seeds in the environment, and ranks: with LOCAL_RANK set, what a later test starts takes itself
    for a rank that somebody has launched, and waits for the others.
    """
    before = dict(os.environ)
    yield
    before.update({name: value for name, value in os.environ.items() if name == "PYTEST_CURRENT_TEST"})
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
