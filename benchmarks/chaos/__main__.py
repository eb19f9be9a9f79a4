"""Kills a job at the file events of its saves with ckpt-chaos, in four ways, and prints what came back.

    python -m benchmarks.chaos                       AtomicResumeCallback, and Lightning's ModelCheckpoint beside it
    python -m benchmarks.chaos --max-points 40       not every point, but so many for each of the two
    python -m benchmarks.chaos --control             AtomicResumeCallback with fsync taken away: has to fail

Needs `pip install '.[chaos]'`. Exit status 0: AtomicResumeCallback had no HARD_FAIL, SILENT_DIVERGENCE, LOST_WORK.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from ckpt_chaos.runner import rejudge

from benchmarks.chaos import train
from benchmarks.chaos.server import SOCKET, serve

MODES = ("before", "torn", "term", "unsynced")
VERDICTS = ("PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK")
ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("server.py")


def crash(work, max_points, jobs, flags, pattern):
    """Runs ckpt-chaos; returns its rows."""
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--work", str(work), "--modes", ",".join(MODES)]
    command += ["--max-points", str(max_points), "--jobs", str(jobs), "--grace", "30"]
    command += ["--checkpoint-glob", "{out}/checkpoints/" + pattern, "--step-regex", r"resumed from step (\d+)"]
    command += ["--result-file", "{out}/final", "--", sys.executable, str(CLIENT), "--out", "{out}", *flags]
    subprocess.run(command, cwd=ROOT, check=False)
    return rejudge(work)


def table(rows, name):
    """One line for each mode."""
    lines = []
    for mode in MODES:
        # A job that is torn at the lock, which stays open to its end, is not killed at all; one that heeds SIGTERM may
        # end well.
        struck = [row for row in rows if row.label.endswith(f"[{mode}]") and (row.crashed or mode == "term")]
        verdicts = Counter(row.verdict for row in struck)
        cells = [name, f"`{mode}`", sum(verdicts.values()), *(verdicts[verdict] for verdict in VERDICTS)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-points", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--control", action="store_true")
    options = parser.parse_args()
    lines = ["| callback | killed | crash points | " + " | ".join(VERDICTS) + " |", "|---" * 7 + "|"]
    with tempfile.TemporaryDirectory() as work:
        os.environ[SOCKET] = os.path.join(work, "server")
        server = serve(os.environ[SOCKET], train.main)
        arguments = options.max_points, options.jobs
        flags = ["--without-fsync"] if options.control else []
        rows = crash(Path(work) / "ours", *arguments, flags, "step-*")
        lines += table(rows, "AtomicResumeCallback")
        if not options.control:
            lines += table(crash(Path(work) / "stock", *arguments, ["--stock"], "*.ckpt"), "ModelCheckpoint")
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    print("\n" + "\n".join(lines))
    return 0 if rows and all(row.verdict == "PASS" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
