"""Saves that fail: the first one stops the run, a later one warns, and no good checkpoint is ever lost."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from held_writer import HeldWriter
from inprocess import NotedToy, Stop, StopAfter, loader, make_trainer, plugin
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from toy import saved_steps, step_dir

from lightning_resume import CheckpointWriteError, UnsupportedStateError, scan_checkpoints, verify_checkpoint
from lightning_resume.plugin import recall

FAULTS = {"write": errno.ENOSPC, "fsync": errno.EIO, "rename": errno.EACCES, "mkdir": errno.EDQUOT}


class Faults(Callback):
    """Makes one file operation fail while training stands at certain steps.

    Args:
        patch: sets an attribute of `os`.
        operation: name of the function in `os`.
        steps: values of `global_step` at which it fails.
    """

    def __init__(self, patch: Callable[[Any, str, Any], None], operation: str, steps: set[int]) -> None:
        self.steps, self.trainer, self.num_faults = steps, None, 0
        real = getattr(os, operation)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if self.trainer is not None and self.trainer.global_step in self.steps:
                self.num_faults += 1
                raise OSError(FAULTS[operation], os.strerror(FAULTS[operation]))
            return real(*args, **kwargs)

        patch(os, operation, failing)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainer = trainer

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.trainer = None


class Holder(Callback):
    """A callback whose state is whatever it was given."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"nested": [{"value": self.value}]}


class Opaque:
    """A class that nobody registered."""


@pytest.mark.parametrize("operation", FAULTS)
def test_a_failed_periodic_save_warns_and_training_goes_on(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full (or fails) for two saves: a warning for each, every batch is trained, later saves succeed."""
    module = NotedToy()
    faults = Faults(monkeypatch.setattr, operation, {4, 5})
    trainer = make_trainer(tmp_path, faults, plugin(tmp_path / "ck", async_save=False), max_epochs=1)

    with pytest.warns(UserWarning, match="FAILED; training goes on") as warned:
        trainer.fit(module, loader())

    texts = [str(warning.message) for warning in warned if "FAILED" in str(warning.message)]
    assert faults.num_faults >= 2
    assert [str(step_dir(tmp_path / "ck", step)) in text for step, text in zip((4, 5), texts, strict=True)] == [
        True
    ] * 2
    assert all(os.strerror(FAULTS[operation]) in text for text in texts)
    assert len(module.rows) == 8
    assert saved_steps(tmp_path / "ck") == [0, 1, 2, 3, 6, 7, 8]
    assert all(verify_checkpoint(step_dir(tmp_path / "ck", step)).global_step == step for step in (3, 6, 8))


def test_a_failed_save_costs_no_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `keep_last_k=1` the only one stays until its successor is durable; fit raises if its end is not on disk."""
    faults = Faults(monkeypatch.setattr, "write", set(range(4, 100)))
    trainer = make_trainer(tmp_path, faults, plugin(tmp_path / "ck", keep_last_k=1, async_save=False), max_epochs=1)

    with (
        pytest.warns(UserWarning, match="No space left on device"),
        pytest.raises(CheckpointWriteError, match="No space left on device"),
    ):
        trainer.fit(NotedToy(), loader())

    assert [(info.path.name, info.status) for info in scan_checkpoints(tmp_path / "ck", verify=True)] == [
        ("step-00000003", "good")
    ]


def test_training_after_failed_saves_is_the_same_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failing saves move no random stream: batches and losses are those of a run whose saves succeed."""
    modules = NotedToy(), NotedToy()
    torch.manual_seed(5)
    modules[0].load_state_dict(modules[1].state_dict())
    start = torch.get_rng_state()
    make_trainer(tmp_path, plugin(tmp_path / "good"), max_epochs=1).fit(modules[0], loader())
    torch.set_rng_state(start)
    faults = Faults(monkeypatch.setattr, "write", {2, 5, 6})

    with pytest.warns(UserWarning, match="FAILED"):
        make_trainer(tmp_path, faults, plugin(tmp_path / "bad", async_save=False), max_epochs=1).fit(
            modules[1], loader()
        )

    assert modules[0].rows == modules[1].rows


@pytest.mark.parametrize("operation", FAULTS)
def test_a_failing_first_save_stops_the_run(operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be saved is told before the first batch, not after hours; nothing is left behind."""
    module = NotedToy()
    trainer = make_trainer(
        tmp_path, Faults(monkeypatch.setattr, operation, set(range(100))), plugin(tmp_path / "ck"), max_epochs=1
    )

    with pytest.raises(CheckpointWriteError) as caught:
        trainer.fit(module, loader())

    assert caught.value.errno == FAULTS[operation]
    assert caught.value.path == str(step_dir(tmp_path / "ck", 0))
    assert module.rows == []
    assert saved_steps(tmp_path / "ck") == []


def test_the_first_save_stops_the_run_also_when_it_is_a_periodic_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a save before the first batch, the first one after it takes its part: its failure stops the run."""
    module = NotedToy()
    faults = Faults(monkeypatch.setattr, "write", {3})
    callback = plugin(tmp_path / "ck", every_n_train_steps=3, save_on_train_start=False)

    with pytest.raises(CheckpointWriteError) as caught:
        make_trainer(tmp_path, faults, callback, max_epochs=1).fit(module, loader())

    assert caught.value.errno == errno.ENOSPC
    assert len(module.rows) == 3


@pytest.mark.parametrize("save_on_train_start", [True, False])
def test_state_that_cannot_be_saved_stops_the_run_at_once(save_on_train_start: bool, tmp_path: Path) -> None:
    """The first save names the key path of what has no encoding."""
    module = NotedToy()
    callback = plugin(tmp_path / "ck", save_on_train_start=save_on_train_start)

    with pytest.raises(UnsupportedStateError, match="Opaque") as caught:
        make_trainer(tmp_path, Holder(Opaque()), callback, max_epochs=1).fit(module, loader())

    assert caught.value.key_path == "callbacks.Holder.nested.0.value"
    assert "register_type" in str(caught.value)
    assert len(module.rows) == (0 if save_on_train_start else 1)
    assert saved_steps(tmp_path / "ck") == []


def test_hyper_parameters_that_cannot_be_saved_stop_the_run_at_once(tmp_path: Path) -> None:
    """The first save names the hyper-parameter."""
    module = NotedToy()
    module.save_hyperparameters({"tool": Opaque(), "size": 3})

    with pytest.raises(UnsupportedStateError, match="Opaque") as caught:
        make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1).fit(module, loader())

    assert caught.value.key_path == "hyper_parameters.tool"
    assert module.rows == []


def test_state_that_becomes_unsavable_warns_with_its_key_path(tmp_path: Path) -> None:
    """A periodic save that meets such a value is a failed save: earlier checkpoints stay, training goes on."""
    module, holder = NotedToy(), Holder(1)

    def spoil(*args: Any) -> None:
        holder.value = Opaque() if module.global_step == 4 else 1

    holder.on_train_batch_end = spoil

    with pytest.warns(UserWarning, match=r"callbacks\.Holder\.nested\.0\.value"):
        make_trainer(tmp_path, holder, plugin(tmp_path / "ck"), max_epochs=1).fit(module, loader())

    assert len(module.rows) == 8
    assert saved_steps(tmp_path / "ck") == [0, 1, 2, 3, 5, 6, 7, 8]


@pytest.mark.parametrize(("good", "num_steps"), [(3, 8), (3, 6), (0, 4)], ids=["told", "in_flight", "the_first"])
def test_steps_to_be_trained_again_are_counted_from_the_disk(
    good: int, num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A background save that failed, or is in flight when training dies and fails then, counts for nothing."""

    def fail(number: int) -> None:
        if number > good // 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    held = HeldWriter(monkeypatch.setattr, before_commit=fail)
    callback = plugin(tmp_path / "ck", every_n_train_steps=3, async_save=True)

    with pytest.warns(UserWarning, match="is not saved") as warned, pytest.raises(Stop):
        make_trainer(tmp_path, held, StopAfter(num_steps), callback).fit(NotedToy(), loader())

    (text,) = [str(warning.message) for warning in warned if "is not saved" in str(warning.message)]
    assert f"newest checkpoint:          'step-{good:08d}'\n" in text
    assert text.endswith(f"steps to be trained again:  {num_steps - good}")
    assert saved_steps(tmp_path / "ck") == sorted({0, good})


def test_a_last_save_that_fails_is_told_with_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception ends training on a full disk: one warning, which does not say that training goes on."""
    monkeypatch.setattr(recall, "CREDIT_SECONDS", 60.0)
    stop = Callback()
    stop.on_before_backward = lambda trainer, *args: StopAfter(1).on_train_batch_end() if trainer.global_step else None
    faults = Faults(monkeypatch.setattr, "write", {1})
    callback = plugin(tmp_path / "ck", every_n_train_steps=3)

    with pytest.warns(UserWarning, match="ended training") as warned, pytest.raises(Stop):
        make_trainer(tmp_path, faults, stop, callback).fit(NotedToy(), loader())

    (text,) = [str(warning.message) for warning in warned if "No space left" in str(warning.message)]
    assert "its last whole step is not saved: saving failed: CheckpointWriteError: " in text
    assert text.endswith("  newest checkpoint:          'step-00000000'\n  steps to be trained again:  1")


def test_a_failed_background_save_is_made_again_before_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop signal at the cut whose save is in flight: that one fails, and the same step is saved at once."""

    def fail(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    stop = Callback()
    stop.on_train_batch_end = lambda trainer, *args: trainer.global_step == 3 and signal.raise_signal(signal.SIGTERM)
    held = HeldWriter(monkeypatch.setattr, before_commit=fail)
    trainer = make_trainer(tmp_path, held, stop, plugin(tmp_path / "ck", every_n_train_steps=3))

    with pytest.warns(UserWarning, match="FAILED"), pytest.raises(SIGTERMException):
        trainer.fit(NotedToy(), loader())

    assert saved_steps(tmp_path / "ck") == [0, 3]


@pytest.fixture(autouse=True)
def _unpatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends every fault before pytest itself writes again."""
    yield
    monkeypatch.undo()
