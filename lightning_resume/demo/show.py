"""The demo from its first process to its report."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_resume.demo.comparison import compare_runs
from lightning_resume.demo.display import open_display
from lightning_resume.demo.driver import Run, run_demo
from lightning_resume.demo.report import make_report, print_report, write_report
from lightning_resume.demo.settings import DemoError, DemoSettings

REPORT_FILE = "resume-demo.json"
PICTURE_FILE = "resume-demo.png"
WORK_DIR = "resume-demo-work"


def show_demo(
    settings: DemoSettings, output_dir: Path, *, plot: bool = True, keep: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Trains both runs, shows how it goes and what came out, and writes report and picture.

    Args:
        settings: What to train and how often to kill.
        output_dir: Where ``resume-demo.json`` and ``resume-demo.png`` are written; made when it is not there.
        plot: Whether to draw the picture. Without matplotlib there is a hint instead.
        keep: Whether to leave records and checkpoints behind, in ``resume-demo-work`` below `output_dir`.
        console: Where to print; standard output by default.

    Returns:
        The report, as written.

    Raises:
        DemoError: The demo could not be carried out.
    """
    console = console or Console()
    started = time.monotonic()
    output_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if keep:
            work_dir = output_dir / WORK_DIR
            if work_dir.exists():
                raise DemoError(
                    f"there is a {str(work_dir)!r} of an earlier demo already: remove it, or choose another folder"
                )
        else:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resume-demo-")))
        console.print(
            f"Seed {settings.seed}. Two jobs train side by side; one of them gets {settings.num_kills} x SIGKILL."
        )
        with open_display(console) as display:
            baseline, interrupted = run_demo(settings, work_dir, display)
        buckets = compare_runs(baseline, interrupted)
        report = make_report(settings, baseline, interrupted, buckets, time.monotonic() - started)
        print_report(report, console)
        _write(report, baseline, interrupted, output_dir, plot, console)
        if keep:
            console.print(f"records and checkpoints: {work_dir}", soft_wrap=True)
    return report


def _write(
    report: dict[str, Any], baseline: Run, interrupted: Run, output_dir: Path, plot: bool, console: Console
) -> None:
    """Writes the report and, where that is wanted and possible, the picture."""
    write_report(report, output_dir / REPORT_FILE)
    console.print(f"report:  {output_dir / REPORT_FILE}", soft_wrap=True)
    if not plot:
        return
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: it needs matplotlib, pip install 'lightning-resume[plot]'", markup=False)
        return
    from lightning_resume.demo.plot import draw_curves

    draw_curves(baseline, interrupted, output_dir / PICTURE_FILE)
    console.print(f"picture: {output_dir / PICTURE_FILE}", soft_wrap=True)
