"""Which checkpoint is "last", which stay, and what a stop signal leaves."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from chain import kill_in_turn
from inprocess import NotedToy, loader, make_trainer, plugin, save_some, val_loader
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from toy import Job, run, saved_steps, step_dir

from lightning_resume import AtomicResumeCallback, UnsupportedSetupError, read_checkpoint, scan_checkpoints


def snapshot(folder: Path) -> dict[str, tuple[int, str]]:
    """Modification time and digest of every file in a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class RemovesOldest(Callback):
    """Deletes the oldest checkpoint before each batch, as a user's clean-up job might."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_removed = folder, 0

    def on_train_batch_end(self, *args: Any) -> None:
        steps = saved_steps(self.folder)
        if len(steps) > 1:
            shutil.rmtree(step_dir(self.folder, steps[0]))
            self.num_removed += 1


def test_last_is_found_in_a_new_process(tmp_path: Path) -> None:
    """RET-01: a new process with the same folder goes on at the very next batch."""
    _, resumed = kill_in_turn(Job(), tmp_path, {3: 3})

    assert resumed.places[0] == (0, 3, 3)


def test_the_first_start_with_last_trains_from_scratch(tmp_path: Path) -> None:
    """RET-02: no checkpoint yet: one info line, no warning, and the run is the run without "last"."""
    baseline = run(Job(), tmp_path / "base")

    first = run(Job(), tmp_path / "work", resume=True, seed=1)

    assert [text for text in first.messages if "starts from scratch" in text] == [
        f"No checkpoint in '{first.folder}' yet: training starts from scratch."
    ]
    assert not [text for text in first.messages if "no last checkpoint" in text]
    assert first.records == baseline.records


def test_a_fresh_start_over_another_run_is_refused(tmp_path: Path) -> None:
    """Without "last" in a used folder two runs' checkpoints would mix: an error before training, nothing changed."""
    save_some(tmp_path / "ck")
    before = snapshot(tmp_path / "ck")
    module = NotedToy()

    with pytest.raises(UnsupportedSetupError, match="another run") as caught:
        make_trainer(tmp_path, plugin(tmp_path / "ck")).fit(module, loader())

    assert "step-00000008" in str(caught.value)
    assert module.rows == []
    assert snapshot(tmp_path / "ck") == before


def test_another_folders_checkpoints_are_never_pruned(tmp_path: Path) -> None:
    """RET-03: a run that goes on from folder A into folder B with `keep_last_k=1` changes nothing in A."""
    save_some(tmp_path / "a")
    before = snapshot(tmp_path / "a")
    module = NotedToy()

    trainer = make_trainer(tmp_path, plugin(tmp_path / "b", keep_last_k=1), max_epochs=2)
    trainer.fit(module, loader(), ckpt_path=step_dir(tmp_path / "a", 4))

    assert module.rows[0]["step"] == 4
    assert snapshot(tmp_path / "a") == before
    assert saved_steps(tmp_path / "b") == [16]


@pytest.mark.parametrize("shared", [True, False])
def test_keeping_one_keeps_the_best_too(shared: bool, tmp_path: Path) -> None:
    """RET-06: with `keep_last_k=1` the newest stays, and the user's ModelCheckpoint's best, even in the same folder."""
    folder = tmp_path / "ck"
    own = ModelCheckpoint(folder if shared else tmp_path / "best", monitor="val_loss", save_top_k=1)
    module = NotedToy(metric=[0.5, 0.9, 0.7])

    make_trainer(tmp_path, own, plugin(folder, keep_last_k=1), max_epochs=3).fit(module, loader(), val_loader())

    assert saved_steps(folder) == [24]
    assert read_checkpoint(own.best_model_path)["global_step"] == 8
    assert sorted(info.status for info in scan_checkpoints(folder)) == ["good"] * (2 if shared else 1)


def test_the_newest_k_stay(tmp_path: Path) -> None:
    """Pruning counts by step number and leaves exactly `keep_last_k`."""
    save_some(tmp_path / "ck", keep_last_k=3)

    assert saved_steps(tmp_path / "ck") == [6, 7, 8]


def test_default_names_are_plain(tmp_path: Path) -> None:
    """ENV-01: folder, checkpoint and file names have letters, digits, dots, underscores and hyphens only."""
    make_trainer(tmp_path, AtomicResumeCallback(every_n_train_steps=4), max_epochs=1).fit(NotedToy(), loader())

    names = [path.name for path in tmp_path.rglob("*")]
    assert saved_steps(tmp_path / "checkpoints") == [0, 4, 8]
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9._-]+", name)] == []


def test_checkpoints_that_the_user_removes_are_not_missed(tmp_path: Path) -> None:
    """CRA-12: old checkpoints are gone before pruning looks at them; training ends normally."""
    removes, module = RemovesOldest(tmp_path / "ck"), NotedToy()

    make_trainer(tmp_path, removes, plugin(tmp_path / "ck", keep_last_k=2)).fit(module, loader())

    assert removes.num_removed > 0
    assert len(module.rows) == 16
    assert saved_steps(tmp_path / "ck") == [15, 16]


def test_a_checkpoint_that_goes_while_it_is_pruned_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRA-12: somebody else deletes it between the look and the deletion: a warning, and training ends normally."""
    rename, module = os.rename, NotedToy()

    def renames(source: Any, target: Any) -> None:
        if str(target).endswith(".trash") and Path(source).name == "step-00000002":
            shutil.rmtree(source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", renames)

    with pytest.warns(UserWarning, match="step-00000002.*was gone already"):
        make_trainer(tmp_path, plugin(tmp_path / "ck", keep_last_k=2), max_epochs=1).fit(module, loader())

    assert len(module.rows) == 8
    assert saved_steps(tmp_path / "ck") == [7, 8]
