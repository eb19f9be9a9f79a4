"""Checkpoints that `fit` cannot go on from: a clear error before anything is changed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inprocess import NotedToy, Stop, StopAfter, loader, make_trainer, plugin, refused, save_some
from toy import step_dir

from lightning_resume import (
    AtomicCheckpointIO,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingStateError,
    NoGoodCheckpointError,
    UnsupportedSetupError,
    WeightsOnlyError,
    load_module,
)
from lightning_resume.format.checkpoint import read_index


@pytest.mark.parametrize("while_training", [True, False])
def test_a_model_only_checkpoint_is_refused(while_training: bool, tmp_path: Path) -> None:
    """PAR-02: the error says that it is a model-only save, and what to do; saved while training or after it."""
    stop = StopAfter(3)
    trainer = make_trainer(tmp_path, plugin(tmp_path / "ck"), stop)
    if while_training:
        stop.on_exception = lambda *_: trainer.save_checkpoint(tmp_path / "model", weights_only=True)
    with pytest.raises(Stop):
        trainer.fit(NotedToy(), loader())
    if not while_training:
        trainer.save_checkpoint(tmp_path / "model", weights_only=True)

    error = refused(NotedToy(), tmp_path / "model", tmp_path, WeightsOnlyError)

    assert error.path == str(tmp_path / "model")
    assert "model-only save" in str(error)
    assert "read_checkpoint" in str(error)


def test_a_checkpoint_without_the_callbacks_state_is_refused(tmp_path: Path) -> None:
    """What AtomicCheckpointIO saved alone has no place in the data; the error says so."""
    trainer = make_trainer(tmp_path, plugins=[AtomicCheckpointIO()], enable_checkpointing=False)
    trainer.fit(NotedToy(), loader())
    trainer.save_checkpoint(tmp_path / "full")

    error = refused(NotedToy(), tmp_path / "full", tmp_path, MissingStateError)

    assert "AtomicResumeCallback" in error.field


@pytest.mark.parametrize("use", ["fit", "load_module"])
def test_a_folder_of_checkpoints_is_told_from_an_unfinished_one(use: str, tmp_path: Path) -> None:
    """The folder in place of one of its checkpoints: the error names the newest by number, and `"last"`."""
    save_some(tmp_path / "ck", NotedToy())
    shutil.copytree(step_dir(tmp_path / "ck", 4), tmp_path / "ck" / ".step-00000009.0123abcd-1.tmp")
    (tmp_path / "ck" / "step-00000009").mkdir()

    if use == "fit":
        error = refused(NotedToy(), tmp_path / "ck", tmp_path, IncompleteCheckpointError)
    else:
        with pytest.raises(IncompleteCheckpointError) as caught:
            load_module(NotedToy, tmp_path / "ck")
        error = caught.value

    newest = str(step_dir(tmp_path / "ck", 8))
    assert error.inside[-2:] == ("step-00000007", "step-00000008")
    assert "it is a folder of checkpoints, not one of them" in str(error)
    assert f'Pass the newest, {newest!r}, or another one of them; fit(ckpt_path="last")' in str(error)


def truncate(file: Path) -> None:
    """Cuts the last 10 bytes off."""
    file.write_bytes(file.read_bytes()[:-10])


def flip(file: Path) -> None:
    """Changes one bit of the last byte."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


FILES = [
    "model.safetensors",
    "optimizer.safetensors",
    "state.safetensors",
    "state.json",
    "rank-00000.json",
    "rank-00000.safetensors",
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sound checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("sound")
    save_some(folder)
    return folder


def copied(source: Path, target: Path, *steps: int) -> None:
    """Copies the checkpoints of some steps."""
    for step in steps:
        step_dir(target, step).mkdir(parents=True)
        for file in step_dir(source, step).iterdir():
            (step_dir(target, step) / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_refused(file: str, damage: Callable[[Path], None], sound: Path, tmp_path: Path) -> None:
    """A truncated, edited or missing file is named, and nothing is restored: not even the sound parts."""
    copied(sound, tmp_path / "ck", 4)
    damage(step_dir(tmp_path / "ck", 4) / file)

    error = refused(NotedToy(), step_dir(tmp_path / "ck", 4), tmp_path, CorruptCheckpointError)

    assert error.file == file
    assert error.path == str(step_dir(tmp_path / "ck", 4))


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_index_is_refused(damage: Callable[[Path], None], sound: Path, tmp_path: Path) -> None:
    """The index has a digest of its own."""
    copied(sound, tmp_path / "ck", 4)
    damage(step_dir(tmp_path / "ck", 4) / "index.json")

    error = refused(NotedToy(), step_dir(tmp_path / "ck", 4), tmp_path, CorruptCheckpointError)

    assert error.file == "index.json"


def test_an_unfinished_checkpoint_is_refused(sound: Path, tmp_path: Path) -> None:
    """Without its index a directory was never committed."""
    copied(sound, tmp_path / "ck", 4)
    (step_dir(tmp_path / "ck", 4) / "index.json").unlink()

    error = refused(NotedToy(), step_dir(tmp_path / "ck", 4), tmp_path, IncompleteCheckpointError)

    assert error.path == str(step_dir(tmp_path / "ck", 4))


def test_a_path_where_nothing_is_is_refused(tmp_path: Path) -> None:
    """The error is a FileNotFoundError too, and nothing is trained from scratch."""
    error = refused(NotedToy(), tmp_path / "nothing", tmp_path, CheckpointNotFoundError)

    assert isinstance(error, FileNotFoundError)
    assert error.path == str(tmp_path / "nothing")


def test_lightnings_own_file_is_refused_unopened(tmp_path: Path) -> None:
    """A `.ckpt` file is a pickle: it is not opened, and the error tells where it can be loaded."""
    trainer = make_trainer(tmp_path, enable_checkpointing=False, max_epochs=1)
    trainer.fit(NotedToy(), loader())
    trainer.save_checkpoint(tmp_path / "stock.ckpt")

    error = refused(NotedToy(), tmp_path / "stock.ckpt", tmp_path, UnsupportedSetupError)

    assert "pickle" in error.reason
    assert str(tmp_path / "stock.ckpt") in error.setup


@pytest.mark.parametrize("damage", [truncate, flip])
def test_last_passes_over_a_damaged_checkpoint(damage: Callable[[Path], None], sound: Path, tmp_path: Path) -> None:
    """The newest *good* one is taken: training goes on from the checkpoint before it, with a warning that names it."""
    copied(sound, tmp_path / "ck", 2, 4)
    damage(step_dir(tmp_path / "ck", 4) / "model.safetensors")
    module = NotedToy()

    with pytest.warns(UserWarning, match="is resumed from") as warned:
        make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1).fit(module, loader(), ckpt_path="last")

    (text,) = [str(warning.message) for warning in warned if "step-00000004" in str(warning.message)]
    first, second, third = text.split("\n")
    assert first == (f"step-00000002 in '{tmp_path}/ck' is resumed from: what is newer is bad, and is passed over.")
    assert second.startswith("  step-00000004: corrupt, model.safetensors: expected ")
    assert third.startswith("Training repeats the steps after it.")
    assert [row["step"] for row in module.rows] == [2, 3, 4, 5, 6, 7]


def test_last_passes_over_a_checkpoint_with_damage_in_any_file(sound: Path, tmp_path: Path) -> None:
    """Whatever reads a file, a flipped bit in it is found, and training goes on from the checkpoint before it."""
    names = sorted(file.name for file in step_dir(sound, 4).iterdir())
    assert {"index.json", "state.json", "rank-00000.json", "model.safetensors", "optimizer.safetensors"} <= set(names)
    for name in names:
        folder = tmp_path / name
        copied(sound, folder, 2, 4)
        flip(step_dir(folder, 4) / name)
        module = NotedToy()

        with pytest.warns(UserWarning, match=rf"step-00000004: corrupt, {name}") as warned:
            make_trainer(tmp_path, plugin(folder), max_epochs=1).fit(module, loader(), ckpt_path="last")

        assert len([warning for warning in warned if "is resumed from" in str(warning.message)]) == 1
        assert [row["step"] for row in module.rows] == [2, 3, 4, 5, 6, 7]


def test_last_is_read_once(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is verified while it is loaded: a resume does not read and hash a large state twice."""
    copied(sound, tmp_path / "ck", 2, 4)
    hashed: list[Any] = []

    def hash_and_note(*data: Any) -> Any:
        hashed.append(hashlib.new("sha256", *data))
        return hashed[-1]

    monkeypatch.setattr(hashlib, "sha256", hash_and_note)
    index = read_index(step_dir(tmp_path / "ck", 4))
    make_trainer(tmp_path, plugin(tmp_path / "ck"), max_steps=4).fit(NotedToy(), loader(), ckpt_path="last")

    digests = [digest.hexdigest() for digest in hashed]
    assert [digests.count(entry.sha256) for entry in index.files.values()] == [1] * len(index.files)


@pytest.mark.parametrize("damage", [truncate, flip])
def test_last_with_only_damaged_checkpoints_trains_nothing(
    damage: Callable[[Path], None], sound: Path, tmp_path: Path
) -> None:
    """RET-02: checkpoints, but not one that is good: an error that lists them, and no fresh start over them."""
    copied(sound, tmp_path / "ck", 2, 4)
    for step in (2, 4):
        damage(step_dir(tmp_path / "ck", step) / "model.safetensors")
    module = NotedToy()

    with pytest.raises(NoGoodCheckpointError) as caught:
        make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1).fit(module, loader(), ckpt_path="last")

    assert [name for name in ("step-00000002", "step-00000004") if name in str(caught.value)] == [
        "step-00000002",
        "step-00000004",
    ]
    assert module.rows == []
