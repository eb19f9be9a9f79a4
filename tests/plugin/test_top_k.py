"""The best checkpoints of the user's ModelCheckpoint, where a resume has another folder for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from inprocess import NotedToy, Stop, StopAfter, loader, make_trainer, plugin, val_loader
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

SCORES = [0.1, 0.7, 0.3, 0.5]  # of each epoch: the best is of the first


class Scored(NotedToy):
    """The toy, whose score is known in advance."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("score", SCORES[self.current_epoch])


def fit(folder: Path, best: Path, *callbacks: Any, resume: bool = False) -> ModelCheckpoint:
    own = ModelCheckpoint(best, monitor="score", mode="min", save_top_k=2, filename="{epoch}")
    trainer = make_trainer(folder, own, *callbacks, plugin(folder / "ck"), max_epochs=4)
    trainer.fit(Scored(), loader(), val_loader(), ckpt_path="last" if resume else None)
    return own


def chosen(own: ModelCheckpoint) -> tuple[str, dict[str, float], float | None]:
    """The best, the best two, and the best score."""
    names = {Path(path).name: float(score) for path, score in own.best_k_models.items()}
    return Path(own.best_model_path).name, names, float(own.best_model_score)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("moved", [False, True])
def test_the_best_checkpoints_are_those_of_the_uninterrupted_run(
    moved: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new folder, as a logger's next version is; or all was moved to another place. Nothing old is deleted."""
    whole = fit(tmp_path / "whole", tmp_path / "whole" / "best")
    before, after = tmp_path / "before", tmp_path / "after"
    with pytest.raises(Stop):
        fit(before, before / "best", StopAfter(20))
    old = sorted(path.name for path in (before / "best").iterdir())
    shutil.copytree(before, after)
    if moved:
        shutil.rmtree(before)
    else:
        shutil.rmtree(after / "best")

    resumed = fit(after, after / "best", resume=True)

    assert chosen(resumed) == chosen(whole)
    assert "exact; best checkpoints of ModelCheckpoint(monitor='score') are those from" in caplog.text
    assert all(Path(path).exists() for path in resumed.best_k_models)
    assert moved or sorted(path.name for path in (before / "best").iterdir()) == old


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_best_checkpoints_that_are_gone_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Then they cannot be compared with, and the resume is not exact."""
    with pytest.raises(Stop):
        fit(tmp_path, tmp_path / "old", StopAfter(20))
    shutil.rmtree(tmp_path / "old")

    fit(tmp_path, tmp_path / "new", resume=True)

    assert "NOT exact: best checkpoints of ModelCheckpoint(monitor='score'), not compared with" in caplog.text
    assert "is not there" in caplog.text
