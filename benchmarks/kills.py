"""SIGKILL at random times, again and again, to a training that saves as fast as it can: each resume must be exact.

    python -m benchmarks.kills --kills 200 --seed 1

One job is trained twice: once without the callback and without a kill, and once with a save in the background after
every optimizer step, killed at random times (one in four while it is still starting or resuming) and started again
with another seed and `ckpt_path="last"`. Held against the run without kills, to the last bit: order of the items,
losses, weights and optimizer state after each step, and the random streams at the end. Exit status 0: all were equal,
no resume lost more steps than `MAX_LOST`, and no more than KEEP + 1 directories were ever there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_resume import AtomicResumeCallback, scan_checkpoints
from lightning_resume.catalog import newest_good

KEEP, CADENCE = 2, 1
MAX_LOST = 2 * CADENCE  # the save in flight, and the steps since it
STEPS_PER_KILL = 20  # of the job's length; the kills fall after about half as many
NUM_ITEMS, BATCH_SIZE = 64, 8
LIMIT_SECONDS = 600  # of one process


class Noisy(Dataset):
    """Item i has noise of its own each time it is read."""

    def __len__(self):
        return NUM_ITEMS

    def __getitem__(self, index):
        return index, torch.full((4,), index / NUM_ITEMS) + 0.1 * torch.randn(4)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        items, values = batch
        self.items = items.tolist()
        loss = (self.net(values).squeeze(1) - items / NUM_ITEMS).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.99)]


class Rows(Callback):
    """One line for each step, written with one call, so that a kill leaves whole lines."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **row):
        os.write(self.fd, (json.dumps(row) + "\n").encode())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.write(
            step=trainer.global_step,
            items=module.items,
            loss=outputs["loss"].item().hex(),
            weights=exact(module.state_dict()),
            optimizer=exact(trainer.optimizers[0].state_dict()["state"]),
            rate=trainer.optimizers[0].param_groups[0]["lr"].hex(),
        )

    def on_train_end(self, trainer, module):
        streams = {"torch": exact({"": torch.get_rng_state()}), "python": hash(random.getstate())}
        self.write(end=trainer.global_step, **streams, mean=trainer.callback_metrics["loss_epoch"].item().hex())


def exact(state):
    """A number that stands for every bit of a nested dict of tensors."""
    return hash(
        tuple((str(name), exact(value) if isinstance(value, dict) else raw(value)) for name, value in state.items())
    )


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def train(log, seed, num_steps, folder=None):
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    seed_everything(seed, workers=True, verbose=False)
    callbacks = [Rows(log)]
    if folder is not None:
        callbacks.append(AtomicResumeCallback(folder, every_n_train_steps=CADENCE, keep_last_k=KEEP))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=-1,
        max_steps=num_steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=log.parent,
    )
    loader = DataLoader(Noisy(), BATCH_SIZE, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path=None if folder is None else "last")


def start(*arguments):
    """Trains in a forked process, which has imported everything already and counts strings' hashes alike."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        train(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(pid):
    """Exit status; -SIGKILL where the process was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read(log):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def has_ended(pid):
    """Whether a process is over; it stays to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_at_random(pid, log, random_numbers, step_seconds):
    """Kills a process at a random time; False where it had ended before."""
    deadline = time.monotonic() + LIMIT_SECONDS
    is_early = random_numbers.random() < 0.25
    while not is_early and not (log.exists() and log.stat().st_size) and not has_ended(pid):
        if time.monotonic() > deadline:
            raise SystemExit(f"no step within {LIMIT_SECONDS} s")
        time.sleep(0.001)
    time.sleep(random_numbers.uniform(0, STEPS_PER_KILL * step_seconds))
    os.kill(pid, signal.SIGKILL)
    return wait(pid) == -signal.SIGKILL


class Findings:
    """What is held against the run without kills, process after process."""

    def __init__(self, baseline, folder):
        self.baseline, self.folder = {row.get("step", "end"): row for row in baseline}, folder
        self.faults, self.reached, self.seen = [], 0, set()
        self.num_lost, self.most_lost, self.most_directories, self.num_rows = 0, 0, 0, 0

    def look(self, number, rows):
        """Looks at one process's rows and at what it left on disk."""
        for row in rows:
            key = row.get("step", "end")
            self.seen.add(key)
            self.num_rows += 1
            if row != self.baseline.get(key):
                self.faults.append(f"process {number}: row {key} differs")
        steps = [row["step"] for row in rows if "step" in row]
        if steps:
            if steps != list(range(steps[0], steps[0] + len(steps))):
                self.faults.append(f"process {number}: its steps are no sequence")
            lost = self.reached - (steps[0] - 1)
            self.num_lost, self.most_lost = self.num_lost + lost, max(self.most_lost, lost)
            if not 0 <= lost <= MAX_LOST:
                self.faults.append(f"process {number}: {lost} steps were lost")
            self.reached = steps[-1]
        names = [path.name for path in self.folder.glob("*") if path.is_dir()]
        self.most_directories = max(self.most_directories, len(names))
        if len(names) > KEEP + 1:
            self.faults.append(f"process {number}: {len(names)} directories: {sorted(names)}")
        if any(name.startswith("step-") for name in names) and newest_good(self.folder, verify=True) is None:
            self.faults.append(f"process {number}: no good checkpoint in {sorted(names)}")

    def look_at_end(self):
        """Looks at what is there after the last process has ended well."""
        if missing := len(set(self.baseline) - self.seen):
            self.faults.append(f"{missing} rows are missing")
        left = [(info.path.name, info.status) for info in scan_checkpoints(self.folder, verify=True)]
        if len(left) != KEEP or any(status != "good" for _, status in left):
            self.faults.append(f"left at the end: {left}")


def measure(num_kills, seed, work):
    """Trains without kills, then with them; returns the report."""
    random_numbers, num_steps = random.Random(seed), num_kills * STEPS_PER_KILL + 2 * STEPS_PER_KILL
    begun = time.monotonic()
    if wait(start(work / "baseline", seed, num_steps)):
        raise SystemExit("the run without kills failed")
    step_seconds = (time.monotonic() - begun) / num_steps
    findings, num_processes, killed = Findings(read(work / "baseline"), work / "checkpoints"), 0, 0
    while True:
        log = work / f"process-{num_processes}"
        pid = start(log, seed + num_processes, num_steps, work / "checkpoints")
        num_processes += 1
        is_killed = killed < num_kills and kill_at_random(pid, log, random_numbers, step_seconds)
        killed += is_killed
        if not is_killed and killed == num_kills and wait(pid):
            findings.faults.append(f"process {num_processes - 1} failed")
        findings.look(num_processes - 1, read(log))
        if not is_killed:
            break
        # The first process's seed is the run's; until it has saved, a start is a first start.
        if not findings.folder.exists() or newest_good(findings.folder) is None:
            num_processes = 0
            log.unlink(missing_ok=True)
    findings.look_at_end()
    return {
        "kills": killed,
        "seed": seed,
        "steps": num_steps,
        "rows compared": findings.num_rows,
        "steps lost per kill": round(findings.num_lost / max(killed, 1), 2),
        "most steps lost": findings.most_lost,
        "most directories": findings.most_directories,
        "seconds": round(time.monotonic() - begun),
        "faults": findings.faults,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        report = measure(options.kills, options.seed, Path(work))
    print(json.dumps(report, indent=2))
    return 0 if report["kills"] == options.kills and not report["faults"] else 1


if __name__ == "__main__":
    sys.exit(main())
