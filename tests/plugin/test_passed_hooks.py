"""Hooks of a step that Lightning passes over: only those in which nothing would be done, and only while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inprocess import NotedToy, loader, make_trainer, plugin

from lightning_resume import AtomicResumeCallback

HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward")


def test_hooks_of_the_users_own_are_called(tmp_path: Path) -> None:
    """On the object, or in a subclass."""
    called: list[str] = []

    class Own(AtomicResumeCallback):
        def on_train_batch_start(self, *args: Any) -> None:
            super().on_train_batch_start(*args)
            called.append("in the class")

    callback = Own(tmp_path / "ck", every_n_train_steps=1)
    callback.on_after_backward = lambda *args: called.append("on the object")  # type: ignore[method-assign]
    make_trainer(tmp_path, callback, max_epochs=1).fit(NotedToy(), loader())

    assert called == ["in the class", "on the object"] * 8


def test_hooks_can_be_called_when_training_is_over(tmp_path: Path) -> None:
    """A callback is left as it was found."""
    callback = plugin(tmp_path / "ck")

    make_trainer(tmp_path, callback, max_epochs=1).fit(NotedToy(), loader())

    assert all(callable(getattr(callback, name)) for name in HOOKS)
