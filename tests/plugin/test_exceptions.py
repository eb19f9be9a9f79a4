"""An exception ends training: the last whole step is saved where it can be vouched for; else one warning."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torchmetrics import MeanMetric
from toy import Job, Run, Toy, ToyItems, assert_same, run, saved_steps

from lightning_resume import verify_checkpoint
from lightning_resume.plugin import recall as recall_module

SELDOM = {"every_n_train_steps": None, "train_time_interval": timedelta(hours=1)}


@pytest.fixture(autouse=True)
def any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine remembering these short steps may cost more than its share."""
    monkeypatch.setattr(recall_module, "CREDIT_SECONDS", 60.0)


class Rich(Toy):
    """The toy with batch norm, a buffer that is not saved with the weights, a metric object, a generator of its own.

    Args:
        fails: where it fails in the fifth step: "before", "forward", "logged", "backward", or nowhere.
    """

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails = fails
        self.net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
        self.register_buffer("num_seen", torch.zeros(()), persistent=False)
        self.mean = MeanMetric()
        self.generator = np.random.default_rng(7)

    def fail(self, place: str) -> None:
        if self.fails == place and self.global_step == 4:
            raise RuntimeError(f"out of luck: {place}")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.fail("before")
        self.num_seen += len(batch)
        batch = batch + float(self.generator.normal()) + float(np.random.rand()) + 0 * self.num_seen
        loss = super().training_step(batch, batch_idx)
        self.row["items"] = []
        self.row["seen"] = float(self.num_seen)
        self.fail("forward")
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.fail("logged")
        return FailsInBackward.apply(loss, self) if self.fails == "backward" else loss


class FailsInBackward(torch.autograd.Function):
    """The identity, which fails when gradients pass through."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, module: Rich) -> Tensor:
        ctx.module = module
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.fail("backward")
        return gradient, None


class FailsIn(Callback):
    """Fails in a hook, at the first step from a given one on."""

    def __init__(self, hook: str, step: int = 4, error: type[BaseException] = RuntimeError) -> None:
        self.step, self.error = step, error
        setattr(self, hook, self.fail)

    def fail(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step >= self.step and not trainer.sanity_checking:
            raise self.error("out of luck")


class FailsOnce(ToyItems):
    """Fails to read an item, once, as soon as the file "due" is there. Items draw.

    Args:
        folder: of that file, and of the one that says that it has failed.
        is_fatal: the process that reads dies.
    """

    def __init__(self, num_items: int, folder: Path, is_fatal: bool) -> None:
        super().__init__(num_items)
        self.folder, self.is_fatal = folder, is_fatal

    def __getitem__(self, index: int) -> Tensor:
        item = super().__getitem__(index) + torch.rand(()).round()
        if (self.folder / "due").exists() and not (self.folder / "failed").exists():
            (self.folder / "failed").touch()
            if self.is_fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("cannot read an item")
        return item


class MakesDue(Callback):
    """Lets the data set fail once three steps are over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            (self.folder / "due").touch()


def failed_and_resumed(job: Job, failing: Job, tmp_path: Path, *, num_batches: int = 4) -> Run:
    """Trains until the failure, checks that the last whole step is saved, resumes exactly; the failed process."""
    baseline = run(job, tmp_path / "base")

    failed = run(failing, tmp_path / "work", fails=True)

    step = saved_steps(failed.folder)[-1]
    assert failed.batches == baseline.batches[:num_batches]
    assert step == len({row["step"] for row in baseline.batches[:num_batches]})
    assert verify_checkpoint(failed.folder / f"step-{step:08d}").global_step == step
    assert any(f"its last whole step, {step}, is saved" in text for text in failed.messages)
    assert_same(baseline, run(job, tmp_path / "work", resume=True), start=num_batches)
    return failed


@pytest.mark.parametrize("place", ["before", "forward", "logged", "backward"])
def test_a_failure_in_the_step_saves_the_step_before(place: str, tmp_path: Path) -> None:
    """Dropout, batch norm, running means, metrics, streams: all are those of the last whole step, not half changed."""
    job = Job(module=Rich, plugin=SELDOM)

    failed = failed_and_resumed(job, replace(job, module=lambda: Rich(place)), tmp_path)

    assert f"RuntimeError: out of luck: {place}" in failed.error


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward", "on_after_backward"])
def test_a_failure_in_a_callback_before_the_optimizer_step(hook: str, tmp_path: Path) -> None:
    """A callback without state that fails there costs no step; a background save is waited for."""
    job = Job(module=Rich, plugin={**SELDOM, "async_save": True})

    failed_and_resumed(job, replace(job, callbacks=lambda: [FailsIn(hook)]), tmp_path)


@pytest.mark.parametrize(
    ("num_workers", "is_fatal"), [(0, False), (2, False), (2, True)], ids=["here", "in_a_worker", "worker_is_killed"]
)
def test_a_failure_to_read_data_saves_the_step_before(num_workers: int, is_fatal: bool, tmp_path: Path) -> None:
    """The resumed run reads the item again, with the draws that it would have had.

    Torch says that a worker was killed wherever training is; only in the optimizer step is that too late to save.
    """
    workers = {"num_workers": num_workers} if num_workers else {}
    job = Job(plugin=SELDOM, loader=workers, dataset=lambda n: FailsOnce(n, tmp_path, is_fatal), module=Rich)
    baseline = run(job, tmp_path / "base")

    failed = run(replace(job, callbacks=lambda: [MakesDue(tmp_path)]), tmp_path / "work", fails=True)

    step = saved_steps(failed.folder)[-1]
    assert step == len(failed.batches) or is_fatal
    assert failed.batches == baseline.batches[: len(failed.batches)]
    assert_same(baseline, run(job, tmp_path / "work", resume=True), start=step)


def test_the_first_batch_of_a_window(tmp_path: Path) -> None:
    """In an accumulation window no gradient is lost: the window is trained again from its start."""
    job = Job(trainer={"accumulate_grad_batches": 2}, plugin=SELDOM, module=Rich)

    class Fails(Callback):
        def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == 4:
                raise RuntimeError("out of luck")

    failed_and_resumed(job, replace(job, callbacks=lambda: [Fails()]), tmp_path, num_batches=4)


class Draws(IterableDataset[Tensor]):
    """Numbers, drawn as they are read; nobody knows how many."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.rand(1) for _ in range(32))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_was_fetched_ahead(num_workers: int, tmp_path: Path) -> None:
    """A loader without a length is read one batch ahead; that batch is not lost either."""
    loader = {"shuffle": False, "num_workers": num_workers}
    job = Job(plugin=SELDOM, module=Rich, dataset=lambda _: Draws(), loader=loader, max_epochs=1)

    failed_and_resumed(job, replace(job, callbacks=lambda: [FailsIn("on_before_backward")]), tmp_path)


def test_the_first_step_of_a_later_epoch(tmp_path: Path) -> None:
    """At the start of an epoch the running means are empty, and the loader has just begun."""
    job = Job(plugin=SELDOM, module=Rich, num_val_items=8)

    failed_and_resumed(job, replace(job, callbacks=lambda: [FailsIn("on_before_backward", 8)]), tmp_path, num_batches=8)


class WithState(Callback):
    """Counts batches, and says so in its state."""

    num_batches = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}


class SavesMore(Rich):
    """Adds to the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["more"] = 1


class Shrinks(Rich):
    """Changes its weights in the step, as autograd sees it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net[0].weight.mul_(0.99)
        return super().training_step(batch, batch_idx)


def shrink(module: nn.Module) -> None:
    """Changes weights behind autograd's back."""
    module.weight.data.mul_(0.99)


class ShrinksUnseen(Rich):
    """Changes its weights in the step, where autograd does not see it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        shrink(self.net[0])
        return super().training_step(batch, batch_idx)


class SetsRate(Callback):
    """A learning rate that is set by hand, batch by batch."""

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.9


class StepsTwice(Toy):
    """Steps a scheduler in the step, at a moment when that changes no learning rate."""

    def __init__(self) -> None:
        super().__init__(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.lr_schedulers().step()
        return super().training_step(batch, batch_idx)


class ForeachShrinks(Rich):
    """Changes all its weights in the step with one call."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch._foreach_mul_([parameter.detach() for parameter in self.parameters()], 0.99)
        return super().training_step(batch, batch_idx)


class Helper:
    """No module, and not called by name."""

    def shrink(self, module: nn.Module) -> None:
        shrink(module)


class ShrinksByHelper(Rich):
    """Has somebody else change its weights."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(fails)
        self.helper = Helper()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.helper.shrink(self.net[0])
        return super().training_step(batch, batch_idx)


class GrowsBuffer(Rich):
    """Gets a new buffer in the fifth step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 4:
            self.register_buffer("new", torch.zeros(3))
        return super().training_step(batch, batch_idx)


class ByHand(Rich):
    """Manual optimization; gradients are part of the state."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(fails)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.fail("by hand")
        optimizer.step()


STEP_BEGUN, STEP_OVER = "the optimizer step had begun", "the optimizer step was over"
REFUSALS: dict[str, tuple[str, Callable[[], list[Callback]], Callable[[], LightningModule]]] = {
    "batch_end": (STEP_BEGUN, lambda: [FailsIn("on_train_batch_end")], Rich),
    "validation": (STEP_OVER, lambda: [FailsIn("on_validation_start")], Rich),
    "epoch_end": (STEP_OVER, lambda: [FailsIn("on_train_epoch_end")], Rich),
    "stateful_callback": (
        "WithState has state, and on_train_batch_start may have changed it",
        lambda: [WithState(), FailsIn("on_before_backward")],
        Rich,
    ),
    "module_saves_more": (
        "SavesMore overrides on_save_checkpoint",
        lambda: [FailsIn("on_before_backward")],
        SavesMore,
    ),
    "weights": ("were changed by the step", lambda: [FailsIn("on_before_backward")], Shrinks),
    "weights_unseen": ("shrink uses `.data`", lambda: [FailsIn("on_before_backward")], ShrinksUnseen),
    "weights_all": ("were changed by the step", lambda: [FailsIn("on_before_backward")], ForeachShrinks),
    "weights_by_helper": ("shrink uses `.data`", lambda: [FailsIn("on_before_backward")], ShrinksByHelper),
    "buffers": ("other buffers than before", lambda: [FailsIn("on_before_backward")], GrowsBuffer),
    "scheduler": ("were changed by the step", lambda: [FailsIn("on_before_backward")], StepsTwice),
    "averaged": ("averaged weights", lambda: [EMAWeightAveraging(), FailsIn("on_before_backward")], Toy),
    "learning_rate": ("were changed by the step", lambda: [SetsRate(), FailsIn("on_before_backward")], Rich),
    "by_hand": ("gradients of the step before", list, lambda: ByHand("by hand")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_vouched_for_is_not_saved(name: str, tmp_path: Path) -> None:
    """One warning says why, which checkpoint is the newest, and how many steps are trained again."""
    reason, callbacks, module = REFUSALS[name]
    job = Job(plugin=SELDOM, callbacks=callbacks, module=module, num_val_items=8, trainer={"num_sanity_val_steps": 0})

    failed = run(job, tmp_path / "work", fails=True)

    assert "out of luck" in failed.error
    assert saved_steps(failed.folder) == [0]
    texts = [text for text in failed.messages if "is not saved" in text]
    assert len(texts) == 1
    assert reason in texts[0]
    assert "newest checkpoint:          'step-00000000'" in texts[0]
    assert f"trained again:  {len(failed.batches) or 4}" in texts[0]


def test_an_optimizer_step_that_has_begun_is_not_saved(tmp_path: Path) -> None:
    """The weights may be half changed."""

    class Halfway(torch.optim.SGD):
        num_steps = 0

        def step(self, closure: Callable[[], Any]) -> Any:
            loss = super().step(closure)
            self.num_steps += 1
            if self.num_steps == 5:
                raise RuntimeError("out of luck")
            return loss

    job = Job(plugin=SELDOM, module=lambda: Toy(optimizer=lambda parameters: Halfway(parameters, lr=0.1)))

    failed = run(job, tmp_path / "work", fails=True)

    assert saved_steps(failed.folder) == [0]
    assert any(STEP_BEGUN in text for text in failed.messages)


def test_an_ordinary_model_checkpoint_is_no_hindrance(tmp_path: Path) -> None:
    """Lightning's own ModelCheckpoint has state, but changes it elsewhere."""
    job = Job(plugin=SELDOM, module=Rich, callbacks=lambda: [ModelCheckpoint(tmp_path / "best")])
    failing = replace(job, callbacks=lambda: [ModelCheckpoint(tmp_path / "best"), FailsIn("on_before_backward")])

    failed_and_resumed(job, failing, tmp_path)


def test_a_keyboard_interrupt_that_is_raised_is_an_exception(tmp_path: Path) -> None:
    """Where nobody notes SIGINT, Ctrl-C comes as KeyboardInterrupt in mid-step."""
    job = Job(plugin={**SELDOM, "save_on_signal": False}, module=Rich)

    failed_and_resumed(
        job, replace(job, callbacks=lambda: [FailsIn("on_before_backward", 4, KeyboardInterrupt)]), tmp_path
    )


def test_nothing_is_saved_when_told_so(tmp_path: Path) -> None:
    """With `save_on_exception=False` there is neither a save nor a warning."""
    job = Job(plugin={**SELDOM, "save_on_exception": False}, callbacks=lambda: [FailsIn("on_before_backward")])

    failed = run(job, tmp_path / "work", fails=True)

    assert saved_steps(failed.folder) == [0]
    assert not any("ended training" in text for text in failed.messages)


def test_a_failure_right_after_a_save_needs_no_other(tmp_path: Path) -> None:
    """The step is saved already: nothing is said."""
    job = Job(callbacks=lambda: [FailsIn("on_before_backward")])

    failed = run(job, tmp_path / "work", fails=True)

    assert saved_steps(failed.folder) == [0, 1, 2, 3, 4]
    assert not any("ended training" in text for text in failed.messages)


def test_a_step_is_passed_over_where_remembering_is_too_dear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that remembering may cost is bounded; without it the step cannot be saved, and that is said."""
    monkeypatch.setattr(recall_module, "CREDIT_SECONDS", 0.0)
    monkeypatch.setattr(recall_module, "MAX_SHARE", 0.0)
    job = Job(plugin=SELDOM, callbacks=lambda: [FailsIn("on_before_backward")])

    failed = run(job, tmp_path / "work", fails=True)

    assert saved_steps(failed.folder) == [0]
    assert any("remembering each step would have cost more" in text for text in failed.messages)
