"""Settings for every test: one thread for each process, so that tests in parallel do not fight for the cores."""

from __future__ import annotations

import os

# Read when torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
