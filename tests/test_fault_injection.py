"""The tests' own power cut takes what it should: otherwise surviving one would mean nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import Faults


def after_power_cut(folder: Path, actions: Callable[[Path], None], how: str = "power") -> dict[str, str]:
    """What is in the folder, name → contents, after a process did something there and lost power at its next mkdir."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            Faults(folder, how, 1, only={"mkdir"}).install()
            actions(folder)
            os.mkdir(folder / "never")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return {os.fspath(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write(path: Path, *, sync: bool = True, sync_name: bool = True) -> None:
    """Creates a file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"data")
    if sync:
        os.fsync(fd)
    os.close(fd)
    if sync_name:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes its names durable."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@pytest.mark.parametrize("how", ["power", "power-names"])
def test_what_was_synced_stays(how: str, tmp_path: Path) -> None:
    """Contents and name."""
    assert after_power_cut(tmp_path, lambda folder: write(folder / "a"), how) == {"a": "data"}


@pytest.mark.parametrize("how", ["power", "power-names"])
def test_contents_that_were_not_synced_are_gone(how: str, tmp_path: Path) -> None:
    """The name is there, and the file is empty."""
    assert after_power_cut(tmp_path, lambda folder: write(folder / "a", sync=False), how) == {"a": ""}


def test_a_name_that_was_not_synced_may_be_gone(tmp_path: Path) -> None:
    """Or be there: both happen."""
    for how, left in (("power", {}), ("power-names", {"a": "data"})):
        folder = tmp_path / how
        folder.mkdir()

        assert after_power_cut(folder, lambda folder: write(folder / "a", sync_name=False), how) == left


def test_a_rename_that_was_not_synced_may_not_have_happened(tmp_path: Path) -> None:
    """Nor one of a file that was renamed twice."""

    def twice(folder: Path) -> None:
        write(folder / "a")
        os.rename(folder / "a", folder / "b")
        os.rename(folder / "b", folder / "c")

    assert after_power_cut(tmp_path, twice) == {"a": "data"}


def test_a_rename_that_was_synced_stays_with_what_was_not_synced_inside(tmp_path: Path) -> None:
    """A directory that was renamed too early has lost its files, and their contents."""

    def too_early(folder: Path) -> None:
        write(folder / "temp" / "unsynced", sync=False)
        write(folder / "temp" / "unnamed", sync_name=False)
        os.rename(folder / "temp", folder / "done")
        sync_directory(folder)

    (tmp_path / "temp").mkdir()

    assert after_power_cut(tmp_path, too_early) == {"done/unsynced": ""}
