"""Cuts at which nothing can be due are passed at once; whatever comes between is seen at the very next one."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import NotedToy, loader, make_trainer, plugin
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from toy import saved_steps

from lightning_resume import AtomicResumeCallback
from lightning_resume.format.checkpoint import read_index

NEVER = {"every_n_train_steps": 10**9, "save_on_exception": False}


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the cuts that were not passed."""
    steps: list[int] = []
    look = AtomicResumeCallback._look_at_cut

    def noting(self: AtomicResumeCallback, trainer: Trainer) -> None:
        steps.append(trainer.global_step)
        look(self, trainer)

    monkeypatch.setattr(AtomicResumeCallback, "_look_at_cut", noting)
    return steps


class At(Callback):
    """Does something at the end of a batch, counted from 1."""

    def __init__(self, batch: int, action: Any) -> None:
        self.batch, self.action, self.count = batch, action, 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1
        if self.count == self.batch:
            self.action(*args)


def test_most_cuts_are_passed(looked_at: list[int], tmp_path: Path) -> None:
    """The first of an epoch is looked at, and those until there is memory for a save in the background."""
    make_trainer(tmp_path, plugin(tmp_path / "ck", **NEVER), max_epochs=3).fit(NotedToy(), loader())

    assert looked_at == [0, 1, 8, 16]


def test_those_after_the_step_of_a_save_are_not(looked_at: list[int], tmp_path: Path) -> None:
    """Every tier counts for itself."""
    callback = plugin(
        tmp_path / "ck",
        async_save=False,
        every_n_train_steps=5,
        archive_every_n_train_steps=3,
        save_weights_only_every_n_train_steps=7,
        save_on_exception=False,
    )
    make_trainer(tmp_path, callback, max_epochs=1).fit(NotedToy(), loader(64))

    # Full saves at 3, 6, 9, 12, 15 restart the count of five; 16 is the end of training.
    assert saved_steps(tmp_path / "ck") == [0, 3, 6, 7, 9, 12, 14, 15, 16]
    assert looked_at == [0, 3, 6, 7, 9, 12, 14, 15]


def test_a_signal_is_heeded_at_the_next_cut(looked_at: list[int], tmp_path: Path) -> None:
    """Its note ends the quiet."""
    stop = At(5, lambda *args: os.kill(os.getpid(), signal.SIGTERM))

    with pytest.raises(SIGTERMException):
        make_trainer(tmp_path, stop, plugin(tmp_path / "ck", **NEVER), max_epochs=1).fit(NotedToy(), loader())

    assert looked_at == [0, 1, 5]
    assert saved_steps(tmp_path / "ck") == [0, 5]


def test_a_signal_that_lightning_has_noted_is_heeded_at_the_cut(looked_at: list[int], tmp_path: Path) -> None:
    """One that comes after Lightning has looked, at the end of a batch, and goes past this package's handler."""
    trainer = make_trainer(tmp_path, plugin(tmp_path / "ck", **NEVER), max_epochs=1)
    epoch_loop = trainer.fit_loop.epoch_loop
    real = epoch_loop.on_advance_end

    def on_advance_end(*args: Any) -> None:
        real(*args)
        trainer._signal_connector.received_sigterm = trainer.global_step == 5

    epoch_loop.on_advance_end = on_advance_end  # type: ignore[method-assign]
    with pytest.raises(SIGTERMException):
        trainer.fit(NotedToy(), loader())

    assert looked_at == [0, 1, 5]
    assert saved_steps(tmp_path / "ck") == [0, 5]


def test_a_signal_that_comes_while_a_cut_is_looked_at_is_heeded_at_the_next(
    monkeypatch: pytest.MonkeyPatch, looked_at: list[int], tmp_path: Path
) -> None:
    """After its signals were looked for, before the cut is left."""
    callback = plugin(tmp_path / "ck", **NEVER)
    next_due = callback._saver.next_due

    def interrupted() -> tuple[float, float]:
        if looked_at[-1] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return next_due()

    monkeypatch.setattr(callback._saver, "next_due", interrupted)
    with pytest.raises(SIGTERMException):
        make_trainer(tmp_path, callback, max_epochs=1).fit(NotedToy(), loader())

    assert looked_at == [0, 1, 2]
    assert saved_steps(tmp_path / "ck") == [0, 2]


def test_the_time_of_a_save_ends_it(monkeypatch: pytest.MonkeyPatch, looked_at: list[int], tmp_path: Path) -> None:
    """The clock is asked at each cut."""
    callback = AtomicResumeCallback(
        tmp_path / "ck", train_time_interval=timedelta(days=1), keep_last_k=9, save_on_exception=False, async_save=False
    )

    def a_day_goes_by(*args: Any) -> None:
        step, seconds = callback._saver._due_from
        callback._saver._due_from = step, seconds - 86_400
        callback._quiet._until_seconds -= 86_400

    make_trainer(tmp_path, At(4, a_day_goes_by), callback, max_epochs=1).fit(NotedToy(), loader())

    assert looked_at == [0, 4]
    assert saved_steps(tmp_path / "ck") == [0, 4, 8]


def test_a_look_into_the_data_is_noticed(looked_at: list[int], tmp_path: Path) -> None:
    """Somebody's pass over the training loader is not taken for the one that is trained from."""

    def look(trainer: Trainer, *args: Any) -> None:
        next(iter(trainer.train_dataloader))

    callback = plugin(tmp_path / "ck", every_n_train_steps=6, save_on_exception=False, async_save=False)
    make_trainer(tmp_path, At(3, look), callback, max_epochs=1).fit(NotedToy(), loader())

    assert looked_at == [0, 3, 6]
    assert read_index(tmp_path / "ck" / "step-00000006").batch_in_epoch == 6


def test_a_module_without_optimizer_state_is_quiet_too(looked_at: list[int], tmp_path: Path) -> None:
    """Plain SGD keeps nothing: what is waited for is the first step."""

    class Plain(NotedToy):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    make_trainer(tmp_path, plugin(tmp_path / "ck", **NEVER), max_epochs=1).fit(Plain(), loader())

    assert looked_at == [0, 1]


def test_a_remembered_cut_is_dropped_at_the_next(looked_at: list[int], tmp_path: Path) -> None:
    """With the time for remembering, each cut is looked at."""
    callback = plugin(tmp_path / "ck", every_n_train_steps=10**9)
    make_trainer(tmp_path, callback, max_epochs=1).fit(NotedToy(), loader())

    assert looked_at[:3] == [0, 1, 2]
    assert callback._recall._spent_seconds > 0


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_start"])
def test_a_module_may_turn_to_manual_optimization_in_a_hook(hook: str, tmp_path: Path) -> None:
    """Lightning counts its steps elsewhere then; they are saved, and their losses kept, all the same."""

    class Turning(NotedToy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not self.automatic_optimization:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    def turn(self: Turning, *args: Any) -> None:
        if hook == "on_train_start" or args[1] == 2:
            self.automatic_optimization = False

    setattr(Turning, hook, turn)
    callback = plugin(tmp_path / "ck", every_n_train_steps=4, save_on_exception=False, async_save=False)
    trainer = make_trainer(tmp_path, callback, max_epochs=1)
    trainer.fit(Turning(), loader())

    num_steps = trainer.global_step
    assert num_steps == (8 if hook == "on_train_start" else 6)
    assert callback.history.steps[-1] == num_steps
    assert saved_steps(tmp_path / "ck") == [0, 4, num_steps]


def test_a_subclass_that_keeps_the_losses_to_itself_saves_at_its_steps(looked_at: list[int], tmp_path: Path) -> None:
    """Where `on_train_batch_end` is its own, nobody counts the steps: each cut is looked at."""

    class Own(AtomicResumeCallback):
        def on_train_batch_end(self, *args: Any) -> None:
            """Nothing."""

    callback = Own(tmp_path / "ck", every_n_train_steps=3, keep_last_k=9, save_on_exception=False, async_save=False)
    make_trainer(tmp_path, callback, max_epochs=1).fit(NotedToy(), loader())

    assert saved_steps(tmp_path / "ck") == [0, 3, 6, 8]
    assert looked_at == [0, 1, 2, 3, 4, 5, 6, 7]
