"""Runs the demo's two jobs side by side, and kills the processes of one of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lightning_resume.demo.records import Place, Record, Tail, of_kind, place_of
from lightning_resume.demo.settings import DemoError, DemoSettings

POLL_SECONDS = 0.002


class Display(Protocol):
    """Whoever shows the demo to a person while it runs."""

    def advance(self, run: str, num_done: int, num_batches: int, note: str) -> None:
        """`num_done` of a run's `num_batches` batches are trained; `note` says what it does now."""

    def say(self, text: str) -> None:
        """Something happened that is worth a line."""


@dataclass(frozen=True)
class Moment:
    """When to kill.

    Attributes:
        batch: The batch to die in, counted from 0 at the start of training.
        delay: How long after that batch has begun, as a fraction of the duration of a batch.
    """

    batch: int
    delay: float


@dataclass
class Kill:
    """One SIGKILL, and what became of it.

    Attributes:
        drawn_batch: The batch that was drawn to die in, counted from 0 at the start of training.
        killed_at: The batch that had last begun when the process died, and the optimizer steps made by then.
        resumed_from: The first batch that the next process trained.
        num_batches_again: Batches that had been finished before the kill and were trained again.
        startup_seconds: From the start of the next process to its first batch, its imports included.
    """

    drawn_batch: int
    killed_at: Place
    resumed_from: Place | None = None
    num_batches_again: int = 0
    startup_seconds: float = 0.0

    @property
    def num_steps_again(self) -> int:
        """Optimizer steps that had been made before the kill and were made again."""
        return self.killed_at.global_step - self.resumed_from.global_step if self.resumed_from else 0


@dataclass
class Run:
    """A job from its start to its end, through any number of processes.

    Attributes:
        name: "baseline" or "interrupted".
        run_dir: Where it writes.
        records: What its processes have written down.
        kills: What was done to it.
        seconds: From the start of its first process to the end of its last one.
    """

    name: str
    run_dir: Path
    records: list[Record] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    seconds: float = 0.0


def draw_moments(settings: DemoSettings) -> list[Moment]:
    """Draws when to kill: once in each of `num_kills` equal parts of the run, so that each process gets somewhere."""
    stream = random.Random(settings.seed)
    # The process may get into the batch after the drawn one, and waits at the start of the one after that.
    num_batches = settings.num_batches - 2
    fractions = ((part + stream.random()) / settings.num_kills for part in range(settings.num_kills))
    return [Moment(int(fraction * num_batches), stream.random()) for fraction in fractions]


def run_demo(settings: DemoSettings, work_dir: Path, display: Display) -> tuple[Run, Run]:
    """Trains the baseline and the interrupted run side by side.

    Args:
        settings: What to train and how often to kill.
        work_dir: A folder for the records, the checkpoints and what the processes print.
        display: Is told how it goes.

    Returns:
        The baseline and the interrupted run, both trained to their ends.

    Raises:
        DemoError: A process failed, could not be killed in time, or the whole took too long. No process is left behind.
    """
    baseline, interrupted = Run("baseline", work_dir / "baseline"), Run("interrupted", work_dir / "interrupted")
    deadline = time.monotonic() + settings.timeout_seconds
    jobs: list[_Job] = []
    try:
        jobs.append(_Job(baseline, settings, [], display))
        jobs.append(_Job(interrupted, settings, draw_moments(settings), display))
        while not all([job.poll() for job in jobs]):
            if time.monotonic() > deadline:
                raise DemoError(f"the demo did not come to its end within {settings.timeout_seconds:.0f} seconds")
            time.sleep(POLL_SECONDS)
    finally:
        for job in jobs:
            job.kill()
    return baseline, interrupted


class _Job:
    """The processes of a run, one after the other; `moments` are the kills that are still to come."""

    def __init__(self, run: Run, settings: DemoSettings, moments: list[Moment], display: Display) -> None:
        self.run, self.settings, self.moments, self.display = run, settings, moments, display
        run.run_dir.mkdir(parents=True)
        self.tail = Tail(run.run_dir)
        self.num_done = 0
        self.begun: tuple[Place, float] | None = None  # this process's newest batch, and when it began
        self.batch_seconds = 0.0
        self.kill_time: float | None = None
        self.started = time.monotonic()
        self.start_process()

    def start_process(self) -> None:
        """Starts a fresh interpreter, at the head of a process group: its worker processes die with it."""
        attempt = len(self.run.kills)
        last_batch = self.moments[0].batch + 1 if self.moments else None
        saves = self.run.name != "baseline"
        job = self.settings.job(self.run.run_dir, saves=saves, attempt=attempt, last_batch=last_batch)
        self.output_file = self.run.run_dir / f"output-{attempt}.txt"
        self.process_started = time.monotonic()
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lightning_resume.demo.job", job.to_argument()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.show(f"process {attempt + 1} starts")

    def kill(self) -> None:
        """Kills the process and its workers, if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def poll(self) -> bool:
        """Reads what is new, kills when it is time, starts the next process. Returns whether the run is at its end."""
        if self.run.seconds:
            return True
        status = self.process.poll()  # asked before the record is read: all that a dead process wrote is then seen
        self.read()
        if status is not None:
            self.finish(status)
        elif self.kill_time is not None and time.monotonic() >= self.kill_time:
            self.kill()
            self.read()
            self.note_kill()
            self.start_process()
        return bool(self.run.seconds)

    def read(self) -> None:
        """Follows the record."""
        for record in self.tail.read():
            self.run.records.append(record)
            if record["kind"] == "begin":
                self.note_begin(place_of(record))
            elif record["kind"] == "batch" and self.begun:
                self.begun = place_of(record), self.begun[1]  # its optimizer step is made now
                self.show(f"epoch {record['epoch']}  loss {float.fromhex(record['loss']):.3f}")

    def note_begin(self, place: Place) -> None:
        """A batch has begun: the first one after a kill tells where the job went on; the drawn one is to die in."""
        now = time.monotonic()
        if self.begun:
            self.batch_seconds = now - self.begun[1]
        elif self.run.kills:
            self.note_resume(self.run.kills[-1], place)
        self.begun = place, now
        if self.moments and self.kill_time is None and self.index(place) >= self.moments[0].batch:
            self.kill_time = now + self.moments[0].delay * self.batch_seconds

    def note_resume(self, kill: Kill, place: Place) -> None:
        """Completes what is known about the last kill."""
        kill.resumed_from = place
        kill.startup_seconds = time.monotonic() - self.process_started
        done = {place_of(record)[:2] for record in of_kind(self.run.records, "batch")}
        kill.num_batches_again = sum(place_of_batch >= place[:2] for place_of_batch in done)
        self.display.say(
            f"resumed in epoch {place.epoch}, batch {place.batch}, at step {place.global_step}; "
            f"steps to make again: {kill.num_steps_again}"
        )

    def note_kill(self) -> None:
        """Notes where the process died; the next one is to be started."""
        if self.begun is None:
            raise DemoError("a process was to be killed that had not trained yet")
        place, moment = self.begun[0], self.moments.pop(0)
        self.run.kills.append(Kill(moment.batch, place))
        number = len(self.run.kills)
        self.display.say(f"SIGKILL {number} in epoch {place.epoch}, batch {place.batch}, at step {place.global_step}")
        self.begun = self.kill_time = None

    def finish(self, status: int) -> None:
        """The process has ended by itself: well, and with nothing left to do, or the demo has failed."""
        if status != 0:
            output = self.output_file.read_text(errors="replace").strip()
            raise DemoError(f"the {self.run.name} job failed with status {status}:\n{output[-2000:]}")
        if self.moments:
            raise DemoError(f"the {self.run.name} job came to its end before it was killed")
        self.run.seconds = time.monotonic() - self.started
        self.show("done")

    def index(self, place: Place) -> int:
        """Returns the number of a batch, counted from 0 at the start of training."""
        return place.epoch * self.settings.num_epoch_batches + place.batch

    def show(self, note: str) -> None:
        """Tells the display how far the run has come."""
        if self.begun:
            self.num_done = self.index(self.begun[0]) + 1
        self.display.advance(self.run.name, self.num_done, self.settings.num_batches, note)
