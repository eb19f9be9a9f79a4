"""A save in the background outlives the program's last line: the interpreter waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_resume import read_checkpoint

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
