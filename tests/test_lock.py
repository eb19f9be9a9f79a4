"""One writer for a folder: refused while the first lives, taken over when it is dead, and never in anybody's way."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_resume import lock as lock_module
from lightning_resume.catalog import clean_incomplete, scan_checkpoints
from lightning_resume.errors import FolderLockedError
from lightning_resume.format.hidden import process_token
from lightning_resume.lock import FolderLock

HOLD = """
import sys
from lightning_resume.lock import FolderLock
lock = FolderLock(sys.argv[1])
lock.acquire("their-run")
print("held", flush=True)
sys.stdin.readline()
lock.release()
print("left", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder; a line to it makes it leave, the next one end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str]) -> str:
    """Sends a line and gives back the answer."""
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def is_refused(folder: Path) -> FolderLockedError | None:
    """The error with which a new lock is refused, or None; the folder is left again."""
    lock = FolderLock(folder)
    try:
        lock.acquire()
    except FolderLockedError as error:
        return error
    lock.release()
    return None


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is refused here is refused for good: nothing is to be gained by waiting."""
    monkeypatch.setattr(lock_module, "PATIENCE_SECONDS", 0.3)


@pytest.fixture
def without_record_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has none."""

    def lockf(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "lockf", lockf)


def write_owner(folder: Path, **facts: Any) -> Path:
    """A lock file that somebody has left."""
    owner = {"host": "h", "pid": 1, "process": "0" * 16, "since": "2024-01-02T03:04:05+00:00", "run_id": "r", **facts}
    (folder / ".lock").write_text(json.dumps(owner))
    return folder / ".lock"


def test_the_file_names_its_owner_and_goes_when_the_folder_is_left(tmp_path: Path) -> None:
    """Who, where, since when, and for which run."""
    lock = FolderLock(tmp_path)

    lock.acquire()
    lock.note_run("run")
    owner = json.loads((tmp_path / ".lock").read_bytes())
    lock.release()

    assert owner.pop("since").endswith("+00:00")
    assert owner == {"host": platform.node(), "pid": os.getpid(), "process": process_token(), "run_id": "run"}
    assert list(tmp_path.iterdir()) == []
    assert not lock.is_held


def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    """The error names the folder and the first one; when that leaves, the folder is free."""
    with holder(tmp_path) as first:
        error = is_refused(tmp_path)
        answer = tell(first)
        after = is_refused(tmp_path)

    assert (error.folder, error.pid, error.host, error.run_id) == (
        str(tmp_path),
        first.pid,
        platform.node(),
        "their-run",
    )
    assert f"process {first.pid} on" in str(error)
    assert str(error).endswith("once it has ended, the folder is free by itself.")
    assert (answer, after) == ("left\n", None)


def test_a_folder_that_is_left_soon_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training's successor may be quicker than its end."""
    monkeypatch.setattr(lock_module, "PATIENCE_SECONDS", 60.0)
    with holder(tmp_path) as process:
        leaves = threading.Timer(0.3, tell, [process])
        leaves.start()

        error = is_refused(tmp_path)
        leaves.join()

    assert error is None


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    """SIGKILL leaves the file, which the next one takes over without waiting, and removes in the end."""
    with holder(tmp_path) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        left = (tmp_path / ".lock").exists()

        with FolderLock(tmp_path) as lock:
            owner = json.loads((tmp_path / ".lock").read_bytes())
            is_held = lock.is_held

    assert left
    assert is_held
    assert owner["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_process_holds_the_folder_on(tmp_path: Path) -> None:
    """A process that does nothing for a while is not dead."""
    with holder(tmp_path) as first:
        first.send_signal(signal.SIGSTOP)

        assert is_refused(tmp_path).pid == first.pid


def test_a_second_lock_of_the_same_process_is_refused(tmp_path: Path) -> None:
    """A record lock would let it pass, and its end would end the first one's."""
    (tmp_path / "ck").mkdir()
    (tmp_path / "link").symlink_to("ck")
    first = FolderLock(tmp_path / "ck")
    first.acquire()
    first.acquire()

    error = is_refused(tmp_path / "link")
    answer = answer_to_another(tmp_path / "ck")
    first.release()

    assert error.pid == os.getpid()
    assert "FolderLockedError" in answer
    assert is_refused(tmp_path / "ck") is None


def test_a_forked_child_neither_holds_nor_ends_the_lock(tmp_path: Path) -> None:
    """A worker process that outlives its parent does not keep the folder, and its end does not free it."""
    lock = FolderLock(tmp_path)
    lock.acquire()
    pid = os.fork()
    if pid == 0:
        os._exit(1 if lock.is_held or lock.release() or is_refused(tmp_path) is None else 0)

    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert status == 0
    assert (tmp_path / ".lock").exists()
    assert "FolderLockedError" in answer_to_another(tmp_path)
    lock.release()


def answer_to_another(folder: Path) -> str:
    """What is said by another process that wants the folder."""
    code = f"import lightning_resume.lock\nlightning_resume.lock.PATIENCE_SECONDS = 0.3\n{HOLD}"
    result = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    return result.stdout + result.stderr


def test_an_orphaned_child_does_not_hold_the_folder(tmp_path: Path) -> None:
    """The writer is killed while its worker processes live on: the folder is free at once."""
    code = HOLD.replace(
        'print("held"', 'import os\npid = os.fork()\nif not pid:\n    sys.stdin.readline()\nprint("held"'
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()

    error = is_refused(tmp_path)
    process.stdin.close()
    process.stdout.close()

    assert error is None


def test_a_copy_holds_nothing(tmp_path: Path) -> None:
    """A callback may be copied; its copy's end does not free the folder."""
    lock = FolderLock(tmp_path)
    lock.acquire()

    again = copy.deepcopy(lock)
    held = again.is_held
    del again

    assert not held
    assert lock.is_held
    assert (tmp_path / ".lock").exists()
    lock.release()


def test_a_lock_that_nobody_can_reach_is_left(tmp_path: Path) -> None:
    """A Trainer that was thrown away after an error does not block the next one."""
    lock = FolderLock(tmp_path)
    lock.acquire()

    del lock

    assert is_refused(tmp_path) is None


def test_a_file_that_was_removed_by_hand_is_not_taken_for_the_lock(tmp_path: Path) -> None:
    """The lock that is left does not remove the file of its successor."""
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    (tmp_path / ".lock").unlink()
    lock_module._held.clear()
    second.acquire()

    first.release()

    assert (tmp_path / ".lock").exists()
    second.release()


def test_a_lock_that_a_reader_of_the_file_has_ended_is_taken_again(tmp_path: Path) -> None:
    """A backup of the folder in the same process closes the file, which ends a record lock."""
    lock = FolderLock(tmp_path)
    lock.acquire()
    (tmp_path / ".lock").read_bytes()

    lock.refresh()

    assert "FolderLockedError" in answer_to_another(tmp_path)
    lock.release()


def test_a_file_that_goes_between_opening_and_locking_is_not_locked_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner removes it while we open it: the one that is in place then is locked."""
    write_owner(tmp_path)
    lockf, removed = lock_module.fcntl.lockf, []

    def lockf_late(*arguments: Any) -> None:
        if not removed:
            removed.append((tmp_path / ".lock").unlink())
        lockf(*arguments)

    monkeypatch.setattr(lock_module.fcntl, "lockf", lockf_late)
    lock = FolderLock(tmp_path)

    lock.acquire()

    assert "FolderLockedError" in answer_to_another(tmp_path)
    lock.release()


def test_an_owner_that_cannot_be_read_is_a_process_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is held by a record lock, whatever the file says."""
    monkeypatch.setattr(lock_module, "OWNER_TRIES", 2)
    with holder(tmp_path):
        with (tmp_path / ".lock").open("r+") as file:
            file.truncate(3)

        error = is_refused(tmp_path)

    assert (error.pid, error.host, error.since) == (None, None, None)
    assert "held by: a process unknown" in str(error)


@pytest.mark.parametrize("what", ["missing", "directory", "link"])
def test_a_folder_that_cannot_be_locked_is_a_warning(what: str, tmp_path: Path) -> None:
    """The lock is advisory: a training does not fail for it."""
    folder = tmp_path if what != "missing" else tmp_path / "missing"
    if what == "directory":
        (tmp_path / ".lock").mkdir()
    elif what == "link":
        (tmp_path / "other").write_text("mine")
        (tmp_path / ".lock").symlink_to("other")
    lock = FolderLock(folder)

    with pytest.warns(UserWarning, match="cannot be locked"):
        lock.acquire()

    assert not lock.is_held
    assert what != "link" or (tmp_path / "other").read_text() == "mine"


def test_a_full_disk_does_not_keep_anybody_from_locking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner cannot be written; the folder is held all the same."""

    def write(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    lock = FolderLock(tmp_path)
    lock.acquire()
    monkeypatch.undo()

    assert lock.is_held
    lock.release()


@pytest.mark.usefixtures("without_record_locks")
def test_without_record_locks_a_free_folder_is_taken_and_left(tmp_path: Path) -> None:
    """As with record locks."""
    lock = FolderLock(tmp_path)

    lock.acquire()
    owner = json.loads((tmp_path / ".lock").read_bytes())
    lock.release()

    assert owner["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_record_locks")
def test_without_record_locks_a_live_owner_is_respected_however_old_the_file(tmp_path: Path) -> None:
    """A process of this machine can be asked."""
    with holder(tmp_path) as first:
        os.utime(tmp_path / ".lock", (0, 0))

        assert is_refused(tmp_path).pid == first.pid


@pytest.mark.usefixtures("without_record_locks")
def test_without_record_locks_a_dead_owner_is_followed_at_once(tmp_path: Path) -> None:
    """A process of this machine that has ended; also one whose number another one has now."""
    for process, pid in ((process_token(), dead_pid()), (process_token()[:8] + "0" * 8, os.getpid())):
        write_owner(tmp_path, process=process, pid=pid)

        assert is_refused(tmp_path) is None
        assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_record_locks")
def test_without_record_locks_an_owner_elsewhere_is_followed_when_it_is_silent(tmp_path: Path) -> None:
    """Another machine's process cannot be asked: its file must have grown older than an hour."""
    path = write_owner(tmp_path, process="f" * 16, host="elsewhere", pid=7)

    early = is_refused(tmp_path)
    os.utime(path, (time.time() - 3700,) * 2)
    late = is_refused(tmp_path)

    assert (early.host, early.pid) == ("elsewhere", 7)
    assert late is None


@pytest.mark.usefixtures("without_record_locks")
def test_without_record_locks_a_sign_of_life_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most once a minute; the file's time says it."""
    lock = FolderLock(tmp_path)
    lock.acquire()
    times = []
    for now in (1000.0, 1030.0, 1061.0):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        os.utime(tmp_path / ".lock", (0, 0))
        lock.refresh()
        times.append((tmp_path / ".lock").stat().st_mtime > 0)
    lock.release()

    assert times == [True, False, True]


@pytest.mark.usefixtures("without_record_locks")
def test_without_record_locks_an_owner_that_is_quicker_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two find the same dead owner: the slower one gives the quicker one's file back."""
    path = write_owner(tmp_path, process=process_token(), pid=dead_pid())
    rename, swapped = os.rename, []

    def rename_late(source: Any, target: Any) -> None:
        if not swapped:
            swapped.append(path.unlink())
            write_owner(tmp_path, process="f" * 16, host="quicker")
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_late)

    assert is_refused(tmp_path).host == "quicker"


def dead_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_no_scan_and_no_cleaning_sees_the_lock(tmp_path: Path) -> None:
    """It is no checkpoint, nothing foreign, and no rubbish; also one that a killed process left."""
    write_owner(tmp_path)

    assert scan_checkpoints(tmp_path) == []
    assert clean_incomplete(tmp_path) == []
    assert (tmp_path / ".lock").exists()
