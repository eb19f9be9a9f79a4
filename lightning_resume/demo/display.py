"""Shows the demo while it runs: bars on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from lightning_resume.demo.driver import Display


@contextmanager
def open_display(console: Console) -> Iterator[Display]:
    """Yields the display that suits the console."""
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        yield Bars(progress)


class Bars:
    """A bar for each run; what happens is printed above them."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.tasks: dict[str, TaskID] = {}

    def advance(self, run: str, num_done: int, num_batches: int, note: str) -> None:
        """Moves the run's bar: back, too, after a kill."""
        if run not in self.tasks:
            self.tasks[run] = self.progress.add_task(run, total=None, note=note)
        self.progress.update(self.tasks[run], completed=num_done, total=num_batches or None, note=note)

    def say(self, text: str) -> None:
        """Prints a line."""
        self.progress.console.print(text, markup=False, highlight=False)


class Lines:
    """A line for every quarter of a run, and for what happens."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.last: dict[str, object] = {}

    def advance(self, run: str, num_done: int, num_batches: int, note: str) -> None:
        """Prints a line when the run has come a quarter further, or does something else than training."""
        stage: object = 4 * num_done // num_batches if num_done and num_batches else note
        if self.last.get(run) != stage:
            self.last[run] = stage
            self.say(f"{run}: {num_done}/{num_batches or '?'} batches  {note}")

    def say(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
