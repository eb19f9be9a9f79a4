"""A script that trains the toy in two processes which Lightning starts, and sends some of them SIGTERM.

    python ddp_job.py FOLDER RUN CHECKPOINT [RANK:HOOK:STEP ...]

Each rank writes its records to FOLDER/RUN-RANK.jsonl. CHECKPOINT is "last" or "none". RANK gets SIGTERM in HOOK when
`global_step` is STEP.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from toy import Toy, ToyItems
from toy_records import Recorder, open_log

from lightning_resume import AtomicResumeCallback

TIME_LIMIT_SECONDS = 110  # the stacks are printed then, and the process ends


class Sends(Callback):
    """Sends SIGTERM to one rank."""

    def __init__(self, rank: int, hook: str, step: int) -> None:
        self.rank, self.step = rank, step
        setattr(self, hook, self.send)

    def send(self, trainer: Trainer, *args: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path, name: str, checkpoint: str, *sends: str) -> None:
    """Trains."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    # Below the ports that the system hands out: the free one that Lightning looks for may be another job's by the time
    # it is used. The second process inherits it.
    os.environ.setdefault("MASTER_PORT", str(10_000 + os.getpid() % 20_000))
    open_log(folder / f"{name}-{rank}.jsonl", folder / f"{name}-{rank}.err")
    faulthandler.dump_traceback_later(TIME_LIMIT_SECONDS, exit=True, file=2)
    torch.set_num_threads(1)
    seed_everything(1 if checkpoint == "none" else 999, workers=True, verbose=False)
    senders = [Sends(int(rank), hook, int(step)) for rank, hook, step in (send.split(":") for send in sends)]
    callback = AtomicResumeCallback(folder / "checkpoints", train_time_interval=timedelta(hours=1))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        callbacks=[Recorder(None), *senders, callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Toy(), DataLoader(ToyItems(256), 4, shuffle=True), ckpt_path=None if checkpoint == "none" else "last")
    torch.distributed.destroy_process_group()  # else its threads may abort the process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
