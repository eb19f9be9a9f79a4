"""Two trainings and one folder of checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from inprocess import NotedToy, Stop, StopAfter, loader, make_trainer, plugin, save_some
from lightning.pytorch.callbacks import Callback
from toy import Job, assert_same, run, saved_steps

from lightning_resume import FolderLockedError, lock, scan_checkpoints
from lightning_resume.lock import FolderLock
from lightning_resume.plugin import last

HOLD = "import sys; from lightning_resume.lock import FolderLock as L; l = L(sys.argv[1]); l.acquire(); print('held', "
HOLD += "flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is refused here is refused for good: nothing is to be gained by waiting."""
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.3)


class FitsAgain(Callback):
    """Starts another fit in the same folder in the middle of the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.error: FolderLockedError | None = None
        self.module = NotedToy()

    def on_train_batch_end(self, *args: Any) -> None:
        if self.error is None:
            with pytest.raises(FolderLockedError) as caught:
                make_trainer(self.folder, plugin(self.folder)).fit(self.module, loader(), ckpt_path="last")
            self.error = caught.value


def contents(folder: Path) -> dict[str, int]:
    """Names and modification times of all that is in a folder."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the folder until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The error names the first one; when that is killed, the same command goes on."""
    folder = tmp_path / "ck"
    save_some(folder)
    process = hold(folder)
    before, module = contents(folder), NotedToy()

    with pytest.raises(FolderLockedError) as caught:
        make_trainer(tmp_path, plugin(folder)).fit(module, loader(), ckpt_path="last")
    after = contents(folder)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    make_trainer(tmp_path, plugin(folder)).fit(module, loader(), ckpt_path="last")

    assert (caught.value.folder, caught.value.pid) == (str(folder), process.pid)
    assert after == before
    assert [row["step"] for row in module.rows] == list(range(8, 16))
    assert not (folder / ".lock").exists()


def test_a_second_trainer_of_the_same_process_is_refused(tmp_path: Path) -> None:
    """While the first one trains; the first one is not disturbed."""
    again = FitsAgain(tmp_path / "ck")

    make_trainer(tmp_path, again, plugin(tmp_path / "ck"), max_epochs=1).fit(NotedToy(), loader())

    assert again.error.pid == os.getpid()
    assert again.module.rows == []
    assert saved_steps(tmp_path / "ck") == list(range(9))


class FitsFirst(NotedToy):
    """While Lightning prepares data, with "last" chosen and no lock taken, another training of the folder goes on."""

    def __init__(self, folder: Path, keep_last_k: int) -> None:
        super().__init__()
        self.folder, self.keep_last_k = folder, keep_last_k

    def prepare_data(self) -> None:
        callback = plugin(self.folder, keep_last_k=self.keep_last_k)
        make_trainer(self.folder, callback, max_steps=11, max_epochs=-1).fit(NotedToy(), loader(), ckpt_path="last")


@pytest.mark.parametrize("keep_last_k", [1, 1000], ids=["pruned", "still_there"])
def test_last_is_chosen_again_once_the_folder_is_free(
    keep_last_k: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What another process has saved between the choice and the lock is the newest now; what it pruned is no loss."""
    folder = tmp_path / "ck"
    save_some(folder)
    module = FitsFirst(folder, keep_last_k)

    with caplog.at_level("INFO"):
        make_trainer(tmp_path, plugin(folder)).fit(module, loader(), ckpt_path="last")

    assert [row["step"] for row in module.rows] == list(range(11, 16))
    assert f"resuming from '{folder}/step-00000011'" in caplog.text
    assert f"Restored all states from the checkpoint at {folder}/step-00000011" in caplog.text
    assert {info.timeline for info in scan_checkpoints(folder)} == {0}


@pytest.mark.parametrize(("num_saved", "num_pruned"), [(1, 1), (9, 1), (9, 9)])
def test_a_checkpoint_that_another_process_prunes_while_it_is_verified(
    num_saved: int, num_pruned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone, not bad: the folder is looked at again; and the error is that of the folder that is taken."""
    folder = tmp_path / "ck"
    save_some(folder, keep_last_k=num_saved)
    verify, prunes = last.verify_checkpoint, iter(range(num_pruned))

    def verify_late(path: Path) -> object:
        if next(prunes, None) is not None:
            shutil.rmtree(path)
        return verify(path)

    monkeypatch.setattr(last, "verify_checkpoint", verify_late)
    process = hold(folder)

    with warnings.catch_warnings(), pytest.raises(FolderLockedError) as caught:
        warnings.filterwarnings("error", message="(?s).* bad")
        make_trainer(tmp_path, plugin(folder)).fit(NotedToy(), loader(), ckpt_path="last")
    process.kill()
    process.communicate()

    assert caught.value.pid == process.pid


def test_the_folder_is_free_after_an_error(tmp_path: Path) -> None:
    """Also for the same Trainer, and for another one."""
    folder = tmp_path / "ck"
    trainer = make_trainer(tmp_path, StopAfter(2), plugin(folder))
    with pytest.raises(Stop):
        trainer.fit(NotedToy(), loader())

    is_free = not (folder / ".lock").exists()
    make_trainer(tmp_path, plugin(folder), max_epochs=1).fit(NotedToy(), loader(), ckpt_path="last")

    assert is_free
    assert saved_steps(folder)[-1] == 8


def test_a_killed_training_does_not_keep_the_folder(tmp_path: Path) -> None:
    """Its lock file stays behind, and the resume is exact; in the end the file is gone."""
    job = Job(loader={"num_workers": 2})
    baseline = run(job, tmp_path / "base")

    killed = run(job, tmp_path / "work", kill_after=3)
    left = (killed.folder / ".lock").exists()
    resumed = run(job, tmp_path / "work", resume=True)

    assert left
    assert_same(baseline, resumed, start=3)
    assert not (killed.folder / ".lock").exists()
    assert all(info.status == "good" for info in scan_checkpoints(killed.folder))


def test_validating_needs_no_lock(tmp_path: Path) -> None:
    """Whoever only reads a checkpoint is not refused, and neither is a dry run."""
    folder = tmp_path / "ck"
    save_some(folder)
    with FolderLock(folder):
        make_trainer(tmp_path, plugin(folder)).validate(NotedToy(), loader(), ckpt_path=str(folder / "step-00000008"))
        make_trainer(tmp_path, plugin(folder), fast_dev_run=True).fit(NotedToy(), loader())

    assert saved_steps(folder) == list(range(9))


def test_two_folders_are_two_locks(tmp_path: Path) -> None:
    """Trainings in folders of their own do not meet."""
    with FolderLock(tmp_path):
        save_some(tmp_path / "ck")

    assert saved_steps(tmp_path / "ck") == list(range(9))
