"""Frozen weights that change in training, whatever changes them: every checkpoint has them as they were at its step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from held_writer import HeldWriter
from hidden_changes import HIDDEN_CHANGES, change_by_data
from inprocess import loader, make_trainer, plugin
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from toy import digest, saved_steps, step_dir

from lightning_resume import AtomicResumeCallback, read_checkpoint, scan_checkpoints
from lightning_resume.plugin import recall


class Adapted(LightningModule):
    """A frozen weight of 12 MiB, and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(3 * 2**20), requires_grad=False)
        self.adapter = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.adapter(batch) + self.base[:1]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.adapter.parameters(), lr=1e-2)


class ChangeAndNote(Callback):
    """Changes the frozen weight after a step, and notes what all weights are after each."""

    def __init__(self, change: Callable[[nn.Parameter], None], after_step: int) -> None:
        self.change, self.after_step = change, after_step
        self.digests: dict[int, str] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.digests[0] = digest(pl_module.state_dict())

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.after_step:
            self.change(pl_module.base)
        self.digests[trainer.global_step] = digest(pl_module.state_dict())


@pytest.mark.parametrize("num_batches_late", [0, 1])
@pytest.mark.parametrize("change", HIDDEN_CHANGES)
def test_a_frozen_weight_that_changes_is_saved_as_it_was_at_each_step(
    change: Callable[[nn.Parameter], None], num_batches_late: int, tmp_path: Path
) -> None:
    """Found at once or too late for that save: then it is made again at the next step."""
    note = ChangeAndNote(change, after_step=6)
    callbacks = [HeldWriter(num_batches=num_batches_late)] if num_batches_late else []
    trainer = make_trainer(tmp_path, *callbacks, note, plugin(tmp_path / "ck"))

    trainer.fit(Adapted(), loader())

    steps = saved_steps(tmp_path / "ck")
    saved = {step: digest(read_checkpoint(step_dir(tmp_path / "ck", step))["state_dict"]) for step in steps}
    assert len(set(note.digests.values())) == 17
    assert saved == {step: note.digests[step] for step in saved}
    given_up = set(range(17)) - set(steps)
    assert given_up
    assert given_up <= {5, 6}


class FailsIn(Callback):
    """Fails in the backward pass that follows a step."""

    def __init__(self, after_step: int) -> None:
        self.after_step = after_step

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.after_step:
            raise RuntimeError("out of luck")


def test_an_exception_behind_a_save_that_is_given_up_saves_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save in flight is found to be wrong when training has ended: the last whole step is saved all the same."""
    monkeypatch.setattr(recall, "CREDIT_SECONDS", 60.0)
    resume = plugin(tmp_path / "ck")

    def change(weight: nn.Parameter) -> None:
        resume._saver.wait()  # for the save before, which is right then
        change_by_data(weight)

    note = ChangeAndNote(change, after_step=6)
    trainer = make_trainer(tmp_path, note, resume, FailsIn(after_step=6))

    with pytest.warns(UserWarning, match="changed while step-0+6 was"), pytest.raises(RuntimeError, match="of luck"):
        trainer.fit(Adapted(), loader())

    assert saved_steps(tmp_path / "ck") == [0, 1, 2, 3, 4, 5, 6]
    assert digest(read_checkpoint(step_dir(tmp_path / "ck", 6))["state_dict"]) == note.digests[6]


class WaitForSaves(Callback):
    """Ends no batch before the save that was begun ahead of it is over."""

    def __init__(self, resume: AtomicResumeCallback) -> None:
        self.resume = resume

    def on_train_batch_end(self, *args: Any) -> None:
        self.resume._saver.wait()


def given_up(folder: Path, after_step: int, **settings: Any) -> dict[int, str]:
    """Kind of each checkpoint of a run in which the save of a step is given up; all are what they should be."""
    resume = plugin(folder, **settings)

    note = ChangeAndNote(change_by_data, after_step)
    make_trainer(folder.parent, WaitForSaves(resume), note, resume).fit(Adapted(), loader())
    infos = {int(info.path.name.removeprefix("step-")): info for info in scan_checkpoints(folder)}
    saved = {step: digest(read_checkpoint(info.path)["state_dict"]) for step, info in infos.items()}
    assert saved == {step: note.digests[step] for step in saved}
    return {step: str(info.kind) for step, info in sorted(infos.items())}


def test_a_last_save_that_is_given_up_is_made_at_the_end(tmp_path: Path) -> None:
    """Also where the end by itself is not to be saved: there is no next step."""
    saved = given_up(tmp_path / "ck", 15, every_n_train_steps=5, save_on_train_end=False)

    assert list(saved) == [0, 5, 10, 16]


def test_weights_alone_that_are_given_up_are_saved_at_the_next_step(tmp_path: Path) -> None:
    """As weights alone, which nothing prunes."""
    tiers = {"every_n_train_steps": 100, "save_weights_only_every_n_train_steps": 4}
    saved = given_up(tmp_path / "ck", 12, **tiers, save_on_train_end=False)

    assert saved == {0: "full", 4: "weights", 8: "weights", 13: "weights"}
