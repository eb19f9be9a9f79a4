"""What the driver and the job's processes have to agree on. Imports neither torch nor Lightning."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

BATCH_SIZE = 32
RECORD_FILE = "record.jsonl"
FINAL_FILE = "final.safetensors"
CHECKPOINTS_DIR = "checkpoints"


Saving = Literal["none", "atomic", "stock"]


class DemoError(Exception):
    """The demo could not be carried out; the message says why."""


@dataclass(frozen=True)
class JobSettings:
    """One process of the training job.

    Attributes:
        run_dir: Where the run's record, its checkpoints and its final state are written; shared by all its processes.
        seed: Given to ``seed_everything``. A resumed process gets another one on purpose.
        num_epochs: Epochs to train in all.
        num_items: How many of the 1437 training images are used.
        every_n_train_steps: Optimizer steps between two saves.
        saving: "atomic": by this package's callback; "stock": by Lightning's ModelCheckpoint, for comparison; "none":
            not at all, as the baseline, so that the demo also shows that the callback does not interfere.
        resume: Whether ``ckpt_path="last"`` is passed.
        last_batch: Counted from 0 at the start of training: after this batch the process waits to be killed, so that a
            busy machine cannot let it get to its end before the signal comes. None where it is not to be killed.
    """

    run_dir: str
    seed: int
    num_epochs: int
    num_items: int
    every_n_train_steps: int
    saving: Saving
    resume: bool
    last_batch: int | None

    def to_argument(self) -> str:
        """Returns the settings as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, argument: str) -> JobSettings:
        """Reads what `to_argument` wrote."""
        return cls(**json.loads(argument))


@dataclass(frozen=True)
class DemoSettings:
    """One demonstration: the baseline, and the run that is killed.

    Attributes:
        seed: Seeds the job and the moments of the kills.
        num_kills: How often the job is killed.
        num_epochs: Epochs to train in all.
        num_items: How many of the 1437 training images are used.
        every_n_train_steps: Optimizer steps between two saves.
        stock: Whether the interrupted run has Lightning's ModelCheckpoint in place of the callback.
        timeout_seconds: When to give up.
    """

    seed: int
    num_kills: int = 3
    num_epochs: int = 10
    num_items: int = 1437
    every_n_train_steps: int = 5
    stock: bool = False
    timeout_seconds: float = 300.0

    @property
    def num_epoch_batches(self) -> int:
        """Batches in an epoch."""
        return math.ceil(self.num_items / BATCH_SIZE)

    @property
    def num_batches(self) -> int:
        """Batches in all."""
        return self.num_epochs * self.num_epoch_batches

    def job(self, run_dir: Path, *, saves: bool, attempt: int, last_batch: int | None) -> JobSettings:
        """Returns the settings of a run's process number `attempt`, counted from 0."""
        return JobSettings(
            run_dir=str(run_dir),
            # A wrong seed on purpose: whatever a resumed process draws right, it has from the checkpoint.
            seed=self.seed if attempt == 0 else 999_000 + attempt,
            num_epochs=self.num_epochs,
            num_items=self.num_items,
            every_n_train_steps=self.every_n_train_steps,
            saving=("stock" if self.stock else "atomic") if saves else "none",
            resume=attempt > 0,
            last_batch=last_batch,
        )
