"""A save in the background outlives the program's last line: the interpreter waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightning_resume import read_checkpoint
from lightning_resume.writer import BackgroundWriter

PROGRAM = """
import sys, threading
import torch
from lightning_resume.format.prepared import prepare_checkpoint
from lightning_resume.writer import BackgroundWriter

prepared = prepare_checkpoint(sys.argv[1], {"state_dict": {"weights": torch.arange(3_000_000.0)}, "step": 7})

def job():
    threading.main_thread().join()  # the program's last line is behind us
    prepared.commit()

BackgroundWriter().submit("save", job)
"""
ENDS = {"at its last line": "", "by sys.exit": "sys.exit(3)", "by an exception": "raise ZeroDivisionError"}


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_waits_for_a_save_in_the_background(end: str, tmp_path: Path) -> None:
    """However the program ends, the save that it began is whole; also one that is large enough for threads."""
    path = tmp_path / "step-00000007"

    process = subprocess.run(
        [sys.executable, "-c", PROGRAM + ENDS[end], str(path)], capture_output=True, text=True, timeout=120
    )

    assert process.returncode == {"at its last line": 0, "by sys.exit": 3, "by an exception": 1}[end]
    assert "lightning_resume" not in process.stderr.replace("<string>", "")
    state = read_checkpoint(path)
    assert state["step"] == 7
    assert state["state_dict"]["weights"][-1] == 2_999_999.0
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forked children")
def test_a_forked_child_does_not_take_the_save_in_flight_for_saved() -> None:
    """Its parent may be killed before it is; what the child deletes must not rely on it."""
    writer, may_end = BackgroundWriter(), threading.Event()
    writer.submit("save", lambda: may_end.wait(60))
    pid = os.fork()
    if pid == 0:
        writer.wait()
        outcome = writer.collect()
        is_failure = outcome is not None and outcome.name == "save" and isinstance(outcome.error, ChildProcessError)
        os._exit(0 if is_failure and writer.is_idle else 1)
    may_end.set()
    writer.wait()
    outcome = writer.collect()

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert outcome is not None
    assert (outcome.name, outcome.error) == ("save", None)
