"""Which checkpoint is "last", which stay, and what a stop signal leaves."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from chain import kill_in_turn
from inprocess import NotedToy, Stop, StopAfter, loader, make_trainer, plugin, save_some, val_loader
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from toy import Job, assert_same, run, saved_steps, step_dir

from lightning_resume import AtomicResumeCallback, UnsupportedSetupError, read_checkpoint, scan_checkpoints
from lightning_resume.plugin.retention import spare_bytes


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
            with contextlib.suppress(FileNotFoundError):  # pruning, behind the training, takes the same one
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


def test_archived_checkpoints_stay(tmp_path: Path) -> None:
    """The first at or after each multiple of `archive_every_n_train_steps` stays for ever, besides the newest."""
    settings = {"every_n_train_steps": 2, "keep_last_k": 1, "archive_every_n_train_steps": 5}

    save_some(tmp_path / "ck", **settings)
    make_trainer(tmp_path, plugin(tmp_path / "ck", **settings)).fit(NotedToy(), loader(), ckpt_path="last")

    assert saved_steps(tmp_path / "ck") == [5, 10, 15, 16]


def test_weights_stay_and_do_not_count(tmp_path: Path) -> None:
    """The weights-only tier is kept for ever, and takes no place of a full checkpoint."""
    settings = {"every_n_train_steps": 2, "keep_last_k": 2, "save_weights_only_every_n_train_steps": 3}

    save_some(tmp_path / "ck", **settings)
    kinds = {info.global_step: info.kind for info in scan_checkpoints(tmp_path / "ck")}

    assert kinds == {3: "weights", 6: "full", 8: "full"}


def test_a_run_that_went_back_is_resumed_where_it_went_on(tmp_path: Path) -> None:
    """Resumed from step 3 in a folder that goes up to 8, its steps 4 and 5 are "last", and the old ones are pruned."""
    save_some(tmp_path / "ck")
    module, stop = NotedToy(), StopAfter(2)
    with pytest.raises(Stop):
        make_trainer(tmp_path, stop, plugin(tmp_path / "ck", save_on_exception=False)).fit(
            module, loader(), ckpt_path=step_dir(tmp_path / "ck", 3)
        )
    infos = [(info.timeline, info.global_step) for info in scan_checkpoints(tmp_path / "ck")]

    again = NotedToy()
    make_trainer(tmp_path, plugin(tmp_path / "ck", keep_last_k=2), max_epochs=1).fit(again, loader(), ckpt_path="last")

    assert infos == [*[(0, step) for step in (0, 1, 2, 5, 6, 7, 8)], (1, 3), (1, 4)]
    assert again.rows[0]["step"] == 4
    assert [(info.timeline, info.global_step) for info in scan_checkpoints(tmp_path / "ck")] == [(1, 7), (1, 8)]


def test_a_run_that_went_back_and_is_killed_at_once_comes_back_where_it_went(tmp_path: Path) -> None:
    """ "last" is the checkpoint that was named, and no longer the newest step of what was left; and it is exact."""
    job = Job(plugin={"every_n_train_steps": 3})
    baseline = run(job, tmp_path / "base")
    work = run(job, tmp_path / "work", kill_after=10).folder

    run(job, tmp_path / "work", resume=step_dir(work, 3), kill_at=4)
    newest = scan_checkpoints(work)[-1]
    resumed = run(job, tmp_path / "work", resume=True)

    assert (newest.timeline, newest.global_step) == (1, 3)
    assert_same(baseline, resumed, start=3)


def test_going_back_twice_makes_two_timelines(tmp_path: Path) -> None:
    """Each one is newer than all before it; going on from the newest stays on it."""
    folder = tmp_path / "ck"
    save_some(folder, every_n_train_steps=4)

    for step, max_steps in ((4, 5), (0, 2), (2, 3)):
        trainer = make_trainer(tmp_path, plugin(folder), max_steps=max_steps, max_epochs=-1)
        trainer.fit(NotedToy(), loader(), ckpt_path=step_dir(folder, step))

    timelines = {info.global_step: info.timeline for info in scan_checkpoints(folder)}
    assert timelines == {8: 0, 4: 1, 5: 1, 0: 2, 1: 2, 2: 2, 3: 2}
    assert scan_checkpoints(folder)[-1].global_step == 3


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_folder_can_be_moved_or_copied_and_still_resumes(how: str, tmp_path: Path) -> None:
    """There are no absolute paths inside: the run goes on exactly in the new place."""
    job = Job(plugin={"every_n_train_steps": 1, "keep_last_k": 2})
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=5)
    new = tmp_path / "elsewhere" / "deep"
    new.parent.mkdir()
    (shutil.move if how == "moved" else shutil.copytree)(tmp_path / "work", new)

    resumed = run(job, new, resume=True)

    assert_same(baseline, resumed, start=5)
    assert (tmp_path / "work").exists() is (how == "copied")


def test_one_checkpoint_can_be_copied_to_another_folder(tmp_path: Path) -> None:
    """A directory carries all that it needs: it is "last" where it is put."""
    save_some(tmp_path / "a")
    shutil.copytree(step_dir(tmp_path / "a", 5), step_dir(tmp_path / "b", 5))
    module = NotedToy()

    make_trainer(tmp_path, plugin(tmp_path / "b"), max_epochs=1).fit(module, loader(), ckpt_path="last")

    assert module.rows[0]["step"] == 5
    assert saved_steps(tmp_path / "b") == [5, 6, 7, 8]


def test_resuming_again_and_again_leaves_one_last(tmp_path: Path) -> None:
    """RET-09: after three resumes there is one newest checkpoint, and nothing is named after being the last."""
    save_some(tmp_path / "ck", keep_last_k=1)

    for num_steps in (9, 10, 11):
        trainer = make_trainer(tmp_path, plugin(tmp_path / "ck", keep_last_k=1), max_steps=num_steps, max_epochs=-1)
        trainer.fit(NotedToy(), loader(), ckpt_path="last")

    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["step-00000011"]


def test_files_of_others_in_the_folder_are_not_touched(tmp_path: Path) -> None:
    """RET-13: ten saves with `keep_last_k=1` leave the user's files and directories as they were."""
    folder = tmp_path / "ck"
    (folder / "mydata").mkdir(parents=True)
    (folder / "mydata" / "index.json").write_text('{"mine": 1}')
    (folder / "notes.txt").write_text("mine")
    before = snapshot(folder)

    save_some(folder, keep_last_k=1)

    after = snapshot(folder)
    assert {name: after[name] for name in before} == before
    assert sorted(path.name for path in folder.iterdir()) == ["mydata", "notes.txt", "step-00000008"]


def test_a_full_disk_is_made_room_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space for a save: the oldest go first, also within `keep_last_k`, and a warning says so."""
    folder = tmp_path / "ck"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=spare_bytes(0) + 10))

    with pytest.warns(UserWarning, match="deleted step-00000000, step-00000001 in .* to make room"):
        save_some(folder, keep_last_k=5, async_save=False)

    assert saved_steps(folder) == [7, 8]


def test_bad_entries_are_told_when_training_starts(tmp_path: Path) -> None:
    """By index and sizes only: one warning that names each, and the command that tells more."""
    folder = tmp_path / "ck"
    save_some(folder)
    (step_dir(folder, 2) / "state.json").write_text("x")
    (step_dir(folder, 3) / "index.json").unlink()
    (folder / "notes.txt").write_text("mine")

    with pytest.warns(UserWarning, match="cannot be resumed from") as caught:
        make_trainer(tmp_path, plugin(folder), max_steps=9, max_epochs=-1).fit(NotedToy(), loader(), ckpt_path="last")

    (text,) = [str(warning.message) for warning in caught if "cannot be resumed from" in str(warning.message)]
    assert "step-00000002: corrupt, state.json" in text
    assert "step-00000003: incomplete" in text
    assert "lightning-resume verify" in text
    assert "notes" not in text


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
