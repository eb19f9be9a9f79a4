"""`Retention`: what it deletes and what it never touches, and how it makes room on a full disk."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resume.catalog import newest_good, prune_checkpoints, step_dirname
from lightning_resume.format.checkpoint import write_checkpoint
from lightning_resume.plugin import retention
from lightning_resume.plugin.retention import Retention, spare_bytes

Usage = namedtuple("Usage", "total used free")


def save(
    folder: Path, step: int, name: str | None = None, *, run_id: str = "run", num: int = 8, **arguments: Any
) -> Path:
    """Writes a small checkpoint of a step, with so many weights."""
    path = folder / (name or step_dirname(step))
    counters = {"global_step": step, "current_epoch": 0, "batch_in_epoch": step}
    write_checkpoint(path, {"state_dict": {"w": torch.ones(num)}}, counters=counters, run_id=run_id, **arguments)
    return path


def names(folder: Path) -> list[str]:
    """What is in a folder; a step's directory as its number."""
    return sorted(path.name.removeprefix("step-").lstrip("0") for path in folder.iterdir())


def disk_bytes(file: Path) -> int:
    """What a file takes, in whole blocks."""
    return file.stat().st_blocks * 512


class Disk:
    """A disk with so much free space, which the deletion of each checkpoint makes larger."""

    def __init__(self, folder: Path, free: int) -> None:
        self.folder, self.free = folder, free
        self.full = self._used()

    def _used(self) -> int:
        return sum(disk_bytes(file) for file in self.folder.rglob("*") if file.is_file())

    def __call__(self, path: str) -> Usage:
        assert Path(path) == self.folder
        return Usage(2**60, 0, self.free + self.full - self._used())


def test_the_newest_k_of_the_run_stay(tmp_path: Path) -> None:
    """Ordered by number, and only full ones count."""
    for step in (1, 2, 3, 20, 100):
        save(tmp_path, step)

    pruned = Retention(str(tmp_path), 2).prune("run", tmp_path / step_dirname(100))

    assert [path.name for path in pruned] == [step_dirname(step) for step in (1, 2, 3)]
    assert names(tmp_path) == ["100", "20"]


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    """RET-13: other runs, weights, a ModelCheckpoint's directories, user files, foreign and damaged directories."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 0, run_id="other")
    save(tmp_path, 4, kind="weights")
    save(tmp_path, 1, "epoch=0-step=1.ckpt")
    save(tmp_path, 1, "step-1")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mydata").mkdir()
    (tmp_path / "step-00000006").mkdir()
    (tmp_path / "step-00000007").symlink_to(save(tmp_path, 1, "elsewhere"))
    before = set(tmp_path.iterdir())

    Retention(str(tmp_path), 1).prune("run", tmp_path / step_dirname(3))

    assert before - set(tmp_path.iterdir()) == {tmp_path / step_dirname(1), tmp_path / step_dirname(2)}


def test_archived_ones_stay(tmp_path: Path) -> None:
    """The first at or after each multiple of `archive_every_n_train_steps`, besides the newest K."""
    for step in (0, 4, 10, 12, 21, 25, 28):
        save(tmp_path, step)

    Retention(str(tmp_path), 1, archive_every_n_train_steps=10).prune("run", tmp_path / step_dirname(28))

    assert names(tmp_path) == ["10", "21", "28"]


def test_the_one_that_was_just_saved_stays_even_if_others_are_newer(tmp_path: Path) -> None:
    """Whatever the counters say, what was written last is not deleted."""
    for step, timeline in ((3, 0), (7, 1), (8, 1)):
        save(tmp_path, step, timeline=timeline)

    Retention(str(tmp_path), 1).prune("run", tmp_path / step_dirname(3))

    assert names(tmp_path) == ["3", "8"]


def test_a_folder_that_cannot_be_listed_is_a_warning(tmp_path: Path) -> None:
    """Training goes on."""
    (tmp_path / "file").write_text("")

    with pytest.warns(UserWarning, match="could not delete old checkpoints"):
        assert Retention(str(tmp_path / "file"), 1).prune("run", None) == []


def test_two_processes_may_prune_the_same_folder(tmp_path: Path) -> None:
    """CRA-12: what the other one has deleted already is at most a warning, and the newest stays."""
    for step in range(30):
        save(tmp_path, step)
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def prune() -> None:
        barrier.wait()
        try:
            Retention(str(tmp_path), 2).prune("run", tmp_path / step_dirname(29))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=prune) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert errors == []
    assert names(tmp_path) == ["28", "29"]


def test_with_enough_space_nothing_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check alone costs one call, and is silent."""
    for step in (1, 2):
        save(tmp_path, step)
    monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path, 1000 + spare_bytes(1000)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Retention(str(tmp_path), 1).make_room(1000, "run")

    assert names(tmp_path) == ["1", "2"]


def test_the_oldest_go_until_a_new_one_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within `keep_last_k`, but no more of them than are needed."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    one = sum(disk_bytes(file) for file in (tmp_path / step_dirname(1)).iterdir())
    monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path, spare_bytes(one + 1)))

    with pytest.warns(UserWarning, match="deleted step-00000001, step-00000002 .* to make room"):
        assert Retention(str(tmp_path), 3).make_room(one + 1, "run", tmp_path / step_dirname(4))

    assert names(tmp_path) == ["3", "4"]


def test_a_small_disk_needs_no_more_than_small_checkpoints_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of 197 kB on a disk of 700 kB: deleting one makes room for the next one, and two stay."""
    for step in (1, 2, 3):
        save(tmp_path, step, num=49_000)
    monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path, 100_000))

    with pytest.warns(UserWarning, match="deleted step-00000001 in .* to make room"):
        assert Retention(str(tmp_path), 3).make_room(197_000, "run", tmp_path / step_dirname(3))

    assert names(tmp_path) == ["2", "3"]


def test_what_cannot_be_enough_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all stay, and a warning has both numbers."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path, 77))

    text = "needs 1,000,000,000 bytes, and 10,065,536 for its index and directory, but '.*' has 77 bytes of free space"
    with pytest.warns(UserWarning, match=text):
        assert not Retention(str(tmp_path), 1).make_room(10**9, "run", tmp_path / step_dirname(3))

    assert names(tmp_path) == ["1", "2", "3"]


def test_room_is_never_made_of_the_newest_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the one that was resumed from, nor of archived ones, weights and other runs."""
    for step in (2, 10, 11, 12):
        save(tmp_path, step)
    save(tmp_path, 1, run_id="other")
    save(tmp_path, 3, kind="weights")
    monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path, spare_bytes(0) - 1))

    with pytest.warns(UserWarning, match="deleted step-00000011"):
        Retention(str(tmp_path), 1, 10).make_room(0, "run", tmp_path / step_dirname(2))

    assert names(tmp_path) == ["1", "10", "12", "2", "3"]


def test_the_newest_is_not_taken_for_good_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint that this process knows, the newest one that passes a full verification stays."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    file = tmp_path / step_dirname(3) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path, spare_bytes(0) - 1))

    with pytest.warns(UserWarning, match="deleted step-00000001"):
        Retention(str(tmp_path), 1).make_room(0, "run")

    assert newest_good(tmp_path, verify=True).global_step == 2


def test_a_file_that_another_checkpoint_shares_makes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard link less frees nothing: deleting it would cost a checkpoint in vain."""
    for step in (1, 2):
        save(tmp_path, step)
    for file in (tmp_path / step_dirname(1)).iterdir():
        os.link(file, tmp_path / f"{file.name}.kept")
    monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path, spare_bytes(0) - 1))

    with pytest.warns(UserWarning, match="free some space"):
        assert not Retention(str(tmp_path), 1).make_room(0, "run", tmp_path / step_dirname(2))

    assert (tmp_path / step_dirname(1)).exists()


def test_one_that_vanishes_while_room_is_made_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else prunes at the same time."""
    for step in (1, 2):
        save(tmp_path, step)
    monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path, spare_bytes(0) - 1))
    prunable = retention.to_prune

    def to_prune(*arguments: Any) -> Any:
        prune_checkpoints([tmp_path / step_dirname(1)])
        return prunable(*arguments)

    monkeypatch.setattr(retention, "to_prune", to_prune)

    with pytest.warns(UserWarning, match="could not make room"):
        Retention(str(tmp_path), 1).make_room(0, "run", tmp_path / step_dirname(2))

    assert names(tmp_path) == ["2"]
