"""Training the toy in this very process, with nothing around it: for a process that somebody else watches."""

from __future__ import annotations

import gc
from pathlib import Path

from toy import FIRST_SEED, Job, _train
from toy_records import open_log


def train_here(job: Job, workdir: Path) -> None:
    """Trains the job; its records and messages go to files in `workdir`."""
    gc.freeze()
    open_log(workdir / "log.jsonl", workdir / "errors")
    _train(job, workdir, False, None, FIRST_SEED)
