"""No pickle, in either direction: a checkpoint can be read without running anything that it contains."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from inprocess import NotedToy, loader, make_trainer, plugin
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from toy import Job, Toy, assert_same, run

from lightning_resume import load_module, scan_checkpoints


class Rich(Toy):
    """A toy with hyper-parameters of many types."""

    def __init__(self) -> None:
        super().__init__(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
        self.save_hyperparameters(
            {"path": Path("a/b"), "shape": (1, 2), "scale": np.float32(0.1), "dtype": torch.float16, "by": {1: None}}
        )


class Holding(Callback):
    """A callback with state of many types."""

    def state_dict(self) -> dict[str, Any]:
        return {"array": np.arange(3), "random": np.random.default_rng(0).bit_generator.state, "big": 1 << 200}


def refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("something was unpickled")


def refuse_to_write(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("something was pickled")


@pytest.fixture
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every door to pickle raise, in this process and in those forked from it."""
    for name in ("loads", "load", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)


@pytest.fixture
def no_pickling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for writing to files."""
    # Not `dumps`: Lightning asks it which hyper-parameters can be pickled, and throws the text away.
    for name in ("dump", "Pickler", "_Pickler"):
        monkeypatch.setattr(pickle, name, refuse_to_write)
    monkeypatch.setattr(torch, "save", refuse_to_write)


def is_pickle(data: bytes) -> bool:
    """Whether a file's bytes are a pickle, or a zip archive as `torch.save` writes it."""
    if data.startswith(b"PK\x03\x04"):
        return True
    try:
        return any(operation.name == "STOP" for operation, _, _ in pickletools.genops(data))
    except ValueError:
        return False


@pytest.mark.usefixtures("no_unpickling", "no_pickling")
def test_a_run_saves_and_resumes_without_pickle(tmp_path: Path) -> None:
    """SEC-04: with `pickle.loads`, `Unpickler`, `torch.load` (and the writing side) made to raise, it is exact."""
    job = Job(module=Rich, callbacks=lambda: [Holding(), EarlyStopping("val_loss", patience=5)], num_val_items=8)
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=5)

    resumed = run(job, tmp_path / "work", resume=True)

    assert_same(baseline, resumed, start=5)


@pytest.mark.usefixtures("no_unpickling", "no_pickling")
def test_everything_else_works_without_pickle(tmp_path: Path) -> None:
    """ModelCheckpoint, `trainer.save_checkpoint`, `validate(ckpt_path="best")`, scans and `load_module` need none."""
    own = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_last=True)
    trainer = make_trainer(tmp_path, own, plugin(tmp_path / "ck"), max_epochs=1)
    trainer.fit(NotedToy(), loader(), loader(8, shuffle=False))

    trainer.save_checkpoint(tmp_path / "mine", weights_only=True)
    trainer.validate(NotedToy(), loader(8, shuffle=False), ckpt_path="best", verbose=False)
    module = load_module(NotedToy, tmp_path / "mine")

    assert isinstance(module, LightningModule)
    assert {info.status for info in scan_checkpoints(tmp_path / "ck", verify=True)} == {"good"}


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    """SEC-04: only JSON and safetensors files, by name and by content; also what ModelCheckpoint saves."""
    own = ModelCheckpoint(tmp_path / "best", save_last=True)
    trainer = make_trainer(tmp_path, own, Holding(), plugin(tmp_path / "ck"), max_epochs=1)
    trainer.fit(Rich(), loader())
    trainer.save_checkpoint(tmp_path / "mine.ckpt")

    files = [path for path in tmp_path.rglob("*") if path.is_file()]

    assert len(files) > 10 * 4
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert [path for path in files if is_pickle(path.read_bytes())] == []


def test_the_check_of_files_finds_pickles() -> None:
    """The helper of the test above can tell."""
    assert is_pickle(pickle.dumps({"a": 1}))
    assert is_pickle(pickle.dumps({"a": 1}, protocol=0))
    assert not is_pickle(b'{"a": 1}')
