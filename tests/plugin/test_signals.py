"""SIGTERM, SIGINT and SLURM's requeue signal: heeded between two batches, after a save, wherever they come."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import loader, make_trainer, plugin
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from toy import Job, Toy, ToyItems, assert_same, emit, run, saved_steps

from lightning_resume.plugin.signals import Signals

SELDOM = {"every_n_train_steps": None, "train_time_interval": timedelta(hours=1)}


class Sends(Callback):
    """Sends signals to this process in a hook, the first time that so many batches were trained before it."""

    def __init__(self, hook: str, num_batches: int, *signums: int) -> None:
        self.num_batches, self.signums = num_batches, signums or (signal.SIGTERM,)
        setattr(self, hook, self.send)

    def send(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step >= self.num_batches and not trainer.sanity_checking:
            signums, self.signums = self.signums, ()
            for signum in signums:
                os.kill(os.getpid(), signum)


class SendsInBackward(torch.autograd.Function):
    """The identity, which sends SIGTERM when gradients pass through."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return gradient


class SignalledInBackward(Toy):
    """The toy; SIGTERM comes in the middle of the fifth backward pass."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return SendsInBackward.apply(loss) if self.global_step == 4 else loss


class SendsOnce(ToyItems):
    """Reading item 17 sends SIGTERM, once for all processes that know the same file.

    Args:
        marker: made when it was sent.
        target: whom to send it to, called in the process that reads.
        send: `os.kill` or `os.killpg`.
    """

    def __init__(
        self, num_items: int, marker: Path, target: Callable[[], int], send: Callable[[int, int], None]
    ) -> None:
        super().__init__(num_items)
        self.marker, self.target, self.send = marker, target, send

    def __getitem__(self, index: int) -> Tensor:
        if index == 17 and not self.marker.exists():
            self.marker.touch()
            self.send(self.target(), signal.SIGTERM)
        return super().__getitem__(index)


def stopped_and_resumed(job: Job, signalled: Job, tmp_path: Path, *, error: str = "SIGTERMException") -> list[int]:
    """Trains until the signal, checks that it ended so, resumes exactly, and returns the steps that were saved."""
    baseline = run(job, tmp_path / "base")

    stopped = run(signalled, tmp_path / "work", fails=True)

    steps = saved_steps(stopped.folder)
    assert error in stopped.error
    assert stopped.batches == baseline.batches[: len(stopped.batches)]
    assert len(stopped.batches) == steps[-1]
    assert_same(baseline, run(job, tmp_path / "work", resume=True), start=steps[-1])
    return steps


@pytest.mark.parametrize(
    ("hook", "num_batches", "step", "is_async"),
    [
        ("on_train_start", 0, 0, False),
        ("on_train_epoch_start", 0, 0, True),
        ("on_train_batch_start", 4, 5, True),
        ("on_before_optimizer_step", 4, 5, False),
        ("on_train_batch_end", 5, 5, True),
        ("on_validation_start", 5, 6, False),
        ("on_validation_batch_end", 5, 6, True),
        ("on_train_epoch_end", 8, 8, False),
        ("on_train_epoch_start", 8, 8, True),
    ],
)
def test_a_stop_signal_saves_the_last_whole_step(
    hook: str, num_batches: int, step: int, is_async: bool, tmp_path: Path
) -> None:
    """CRA-10: wherever SIGTERM comes, the batch and its validation are finished and saved, and nothing is repeated."""
    job = Job(num_val_items=8, trainer={"val_check_interval": 3}, plugin={**SELDOM, "async_save": is_async})

    steps = stopped_and_resumed(job, replace(job, callbacks=lambda: [Sends(hook, num_batches)]), tmp_path)

    assert steps == sorted({0, step})


@pytest.mark.parametrize(
    ("hook", "num_batches", "settings", "where"),
    [
        ("on_train_batch_end", 5, {}, "5, between two batches; saved in '{}/step-00000005'"),
        ("on_train_batch_end", 6, {"every_n_train_steps": 3}, "6, between two batches; saved in '{}/step-00000006'"),
        ("on_train_end", 16, {}, "16, between two batches; saved in '{}/step-00000016'"),
        (
            "on_train_end",
            16,
            {"save_on_train_end": False},
            "16, between two batches; not saved: the newest checkpoint is '{}/step-00000000'",
        ),
    ],
    ids=["at_a_cut", "in_flight", "at_the_end", "not_saved"],
)
def test_the_message_says_where_the_step_is_saved(
    hook: str, num_batches: int, settings: dict[str, Any], where: str, tmp_path: Path
) -> None:
    """The path of the checkpoint; where the user wants none at the end, the one that the next start goes on from."""
    job = Job(plugin={**SELDOM, **settings}, callbacks=lambda: [Sends(hook, num_batches)])

    stopped = run(job, tmp_path / "work", fails=True)

    (text,) = [text for text in stopped.messages if "SIGTERM came" in text]
    assert text == f"SIGTERM came: heeded at global_step {where.format(stopped.folder)}."


def test_a_stop_signal_from_inside_backward(tmp_path: Path) -> None:
    """CRA-09: SIGTERM in the middle of the backward pass does not catch the model in mid-step."""
    job = Job(plugin=SELDOM)

    assert stopped_and_resumed(job, replace(job, module=SignalledInBackward), tmp_path) == [0, 5]


def test_a_second_stop_signal_changes_nothing(tmp_path: Path) -> None:
    """An impatient scheduler: SIGTERM three times in a row, and the step is saved all the same."""
    job = Job(plugin=SELDOM)
    signalled = replace(job, callbacks=lambda: [Sends("on_before_backward", 4, *[signal.SIGTERM] * 3)])

    assert stopped_and_resumed(job, signalled, tmp_path) == [0, 5]


class SignalledWhileSaving(Callback):
    """Sends SIGTERM at the n-th fsync after step 3, in whatever thread saves."""

    def __init__(self, number: int) -> None:
        self.number, self.trainer = number, None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        real = os.fsync

        def fsync(fd: int) -> None:
            if trainer.global_step >= 3:
                self.number -= 1
                if self.number in (0, -1):
                    os.kill(os.getpid(), signal.SIGTERM)
            real(fd)

        os.fsync = fsync


@pytest.mark.parametrize(("number", "is_async"), [(1, False), (6, False), (1, True), (3, True), (6, True)])
def test_a_stop_signal_during_a_save_does_not_break_it(number: int, is_async: bool, tmp_path: Path) -> None:
    """SIGTERM twice while a checkpoint is being written: that checkpoint becomes whole."""
    job = Job(plugin={"every_n_train_steps": 3, "async_save": is_async})

    steps = stopped_and_resumed(job, replace(job, callbacks=lambda: [SignalledWhileSaving(number)]), tmp_path)

    assert steps[:2] == [0, 3]
    assert steps[-1] < 8


@pytest.mark.parametrize(
    ("num_workers", "target", "send"),
    [(0, os.getpid, os.kill), (2, os.getppid, os.kill), (2, os.getpgrp, os.killpg)],
    ids=["own_process", "worker_to_parent", "whole_group"],
)
def test_a_stop_signal_while_data_is_read(
    num_workers: int, target: Callable[[], int], send: Callable[[int, int], None], tmp_path: Path
) -> None:
    """SIGTERM from a worker, or to the whole group, whose workers die at once: the last whole step is saved."""

    def job_in(folder: Path) -> Job:
        folder.mkdir()
        marker = folder / "sent"
        workers = {"num_workers": num_workers} if num_workers else {}
        return Job(plugin=SELDOM, loader=workers, dataset=lambda n: SendsOnce(n, marker, target, send))

    quiet, signalled = job_in(tmp_path / "a"), job_in(tmp_path / "b")
    (tmp_path / "a" / "sent").touch()
    baseline = run(quiet, tmp_path / "base")
    stopped = run(signalled, tmp_path / "work", fails=True)

    assert "SIGTERMException" in stopped.error
    step = saved_steps(stopped.folder)[-1]
    assert stopped.batches == baseline.batches[:step]
    assert_same(baseline, run(quiet, tmp_path / "work", resume=True), start=step)


class WithLastingWorkers(Toy):
    """Validates with a worker process that outlives each validation."""

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(ToyItems(8), 4, num_workers=1, persistent_workers=True)


class SendsToGroup(Callback):
    """Signals the whole group in the eleventh step, after a validation, and waits until the workers are gone."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 10:
            os.killpg(os.getpgrp(), self.signum)
            for child in multiprocessing.active_children():
                if child._parent_pid == os.getpid():  # others belong to the test runner, from which this was forked
                    child.join(20)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_workers_that_are_gone_do_not_hinder_the_save(signum: int, tmp_path: Path) -> None:
    """Ctrl-C, or a scheduler, signals the whole group; workers of training and validation end at once."""
    job = Job(plugin=SELDOM, module=WithLastingWorkers, loader={"num_workers": 2, "persistent_workers": True})
    error = "SIGTERMException" if signum == signal.SIGTERM else "KeyboardInterrupt"

    steps = stopped_and_resumed(job, replace(job, callbacks=lambda: [SendsToGroup(signum)]), tmp_path, error=error)

    assert steps == [0, 11]


def test_a_stop_signal_in_a_window_is_heeded_after_it(tmp_path: Path) -> None:
    """SIGTERM in an accumulation window: the optimizer step that it leads to is taken first."""
    job = Job(trainer={"accumulate_grad_batches": 3}, plugin=SELDOM)
    baseline = run(job, tmp_path / "base")

    stopped = run(replace(job, callbacks=lambda: [Sends("on_train_batch_start", 1)]), tmp_path / "work", fails=True)

    assert len(stopped.batches) == 6
    assert saved_steps(stopped.folder) == [0, 2]
    assert_same(baseline, run(job, tmp_path / "work", resume=True), start=6)


@pytest.mark.parametrize("hook", ["on_train_end", "on_train_epoch_end"])
def test_a_stop_signal_at_the_end_is_not_forgotten(hook: str, tmp_path: Path) -> None:
    """After the last batch training ends as usual, is saved, and only then the process is asked to end."""
    stopped = run(Job(plugin=SELDOM, callbacks=lambda: [Sends(hook, 16)]), tmp_path / "work", fails=True)

    assert "SIGTERMException" in stopped.error
    assert stopped.end["step"] == 16
    assert saved_steps(stopped.folder) == [0, 16]


def test_ten_stop_signals_leave_no_more_than_is_kept(tmp_path: Path) -> None:
    """CRA-15: a job that is preempted again and again does not fill the disk; it ends as if it never was."""
    job = Job(plugin={**SELDOM, "keep_last_k": 2})
    baseline = run(job, tmp_path / "base")

    for cycle in range(10):
        signalled = replace(job, callbacks=lambda n=cycle: [Sends("on_before_backward", n)])
        stopped = run(signalled, tmp_path / "work", resume=cycle > 0, seed=1 + cycle, fails=True)
        assert stopped.batches == baseline.batches[cycle : cycle + 1]
        assert len(list(stopped.folder.glob("step-*"))) <= 2
        assert saved_steps(stopped.folder)[-1] == cycle + 1

    assert_same(baseline, run(job, tmp_path / "work", resume=True), start=10)


def test_a_signal_is_left_to_lightning_when_told_so(tmp_path: Path) -> None:
    """With `save_on_signal=False` no handler is installed and nothing is saved."""
    job = Job(
        plugin={"every_n_train_steps": 3, "save_on_signal": False},
        callbacks=lambda: [Sends("on_train_batch_start", 4)],
    )

    stopped = run(job, tmp_path / "work", fails=True)

    assert len(stopped.batches) == 5
    assert saved_steps(stopped.folder) == [0, 3]


def test_an_interrupt_saves_the_last_whole_step(tmp_path: Path) -> None:
    """Ctrl-C once: the batch is finished and saved, then Lightning shuts down as it always does."""
    job = Job(plugin=SELDOM)
    signalled = replace(job, callbacks=lambda: [Sends("on_before_backward", 4, signal.SIGINT)])

    assert stopped_and_resumed(job, signalled, tmp_path, error="KeyboardInterrupt") == [0, 5]


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    """Ctrl-C twice in a batch: no save is waited for, and the checkpoint before is the one to use."""
    job = Job(plugin={"every_n_train_steps": 3})
    baseline = run(job, tmp_path / "base")
    signalled = replace(job, callbacks=lambda: [Sends("on_before_backward", 4, signal.SIGINT, signal.SIGINT)])

    stopped = run(signalled, tmp_path / "work", fails=True)

    assert "KeyboardInterrupt" in stopped.error
    assert len(stopped.batches) == 4
    assert saved_steps(stopped.folder) == [0, 3]
    assert_same(baseline, run(job, tmp_path / "work", resume=True), start=3)


class Handler(Callback):
    """A user's own handler, installed before training; it asks Lightning to stop, or does nothing."""

    def __init__(self, signum: int, stops: bool) -> None:
        self.signum, self.stops = signum, stops

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def handle(signum: int, frame: Any) -> None:
            emit("handled", step=trainer.global_step)
            trainer.should_stop = self.stops

        signal.signal(self.signum, handle)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_users_handler_acts_at_the_cut(signum: int, tmp_path: Path) -> None:
    """An older handler is called once, after the save; where it does not end training, training goes on unchanged."""
    job = Job(plugin=SELDOM)
    baseline = run(job, tmp_path / "base")

    handled = run(
        replace(job, callbacks=lambda: [Handler(signum, False), Sends("on_before_backward", 4, signum)]),
        tmp_path / "work",
    )

    assert handled.of("handled") == [{"kind": "handled", "step": 5}]
    assert saved_steps(handled.folder) == [0, 5, 16]
    assert [r for r in handled.records if r["kind"] != "handled"] == baseline.records


class DefaultAction(Callback):
    """Gives SIGTERM its default action when training begins."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_the_default_action_is_taken_after_the_save(tmp_path: Path) -> None:
    """Where nobody handles SIGTERM, the process dies of it, as a scheduler expects, with its checkpoint on disk."""
    job = Job(plugin=SELDOM)
    baseline = run(job, tmp_path / "base")
    callbacks = lambda: [DefaultAction(), Sends("on_before_backward", 4)]  # noqa: E731

    with pytest.raises(AssertionError, match=f"ended with wait status {int(signal.SIGTERM)},"):
        run(replace(job, callbacks=callbacks), tmp_path / "work")

    assert saved_steps(tmp_path / "work" / "checkpoints") == [0, 5]
    assert_same(baseline, run(job, tmp_path / "work", resume=True), start=5)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the handlers of this process back."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_handlers_are_put_back(handlers: None, tmp_path: Path) -> None:
    """After training, and after training that failed, the handlers are those of before."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    during: list[Any] = []

    class Looks(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            during.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)))

        def on_train_epoch_end(self, *args: Any) -> None:
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        make_trainer(tmp_path, Looks(), plugin(tmp_path / "ck"), max_epochs=1).fit(Toy(), loader())
    after_failure = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    make_trainer(tmp_path, plugin(tmp_path / "other"), max_epochs=1).fit(Toy(), loader())

    assert after_failure == before
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert all("Signals._note" in repr(handler) for pair in during for handler in pair)


def test_a_handler_that_came_later_stays(handlers: None, tmp_path: Path) -> None:
    """What a user installs while training runs is not overwritten when training ends."""
    signals, mine, before = Signals(), lambda *_: None, signal.getsignal(signal.SIGINT)
    signals.install(make_trainer(tmp_path))
    signal.signal(signal.SIGTERM, mine)

    signals.remove()

    assert signal.getsignal(signal.SIGTERM) is mine
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_signal_stays_ignored(handlers: None, tmp_path: Path) -> None:
    """A job under nohup, or whose user ignores SIGINT, is not stopped by it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals = Signals()

    signals.install(make_trainer(tmp_path))

    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    signals.remove()


def test_nothing_is_installed_outside_the_main_thread(handlers: None, tmp_path: Path) -> None:
    """Training in another thread works, and leaves the handlers alone."""
    before, during = signal.getsignal(signal.SIGTERM), []

    class Looks(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            during.append(signal.getsignal(signal.SIGTERM))

    trainer = make_trainer(tmp_path, Looks(), plugin(tmp_path / "ck"), max_epochs=1)
    thread = threading.Thread(target=trainer.fit, args=(Toy(), loader()))
    thread.start()
    thread.join()

    assert during == [before] * 8
    assert saved_steps(tmp_path / "ck")[-1] == 8


class AsksWorker(ToyItems):
    """Reading item 3 in a worker sends that worker a signal."""

    def __init__(self, num_items: int, signum: int) -> None:
        super().__init__(num_items)
        self.signum = signum

    def __getitem__(self, index: int) -> Tensor:
        if index == 3 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), self.signum)
        return super().__getitem__(index)


def test_a_worker_dies_of_a_signal_of_its_own(tmp_path: Path) -> None:
    """SIGTERM to a worker alone ends that worker, and training with torch's own error.

    Where the worker dies before torch has noted its pid, torch finds out seconds later and names no signal.
    """
    job = Job(loader={"num_workers": 2}, dataset=lambda n: AsksWorker(n, signal.SIGTERM))

    failed = run(job, tmp_path / "work", fails=True)

    endings = "is killed by signal: Terminated", "exited unexpectedly"
    assert re.search(rf"DataLoader worker \(pid.*\) ({'|'.join(endings)})", failed.error)


def test_a_process_forked_by_the_user_dies_of_its_signal(tmp_path: Path) -> None:
    """A handler is inherited by fork; in the child it lets SIGTERM have its default action."""

    class Forks(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 2:
                is_up, up = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.write(up, b"!")
                    threading.Event().wait(30)  # for the signal
                    os._exit(1)
                os.read(is_up, 1)  # a signal that comes while Python sets a forked process up is lost
                os.kill(pid, signal.SIGTERM)
                emit("child", status=os.waitpid(pid, 0)[1])

    ended = run(Job(callbacks=lambda: [Forks()]), tmp_path / "work")

    assert ended.of("child") == [{"kind": "child", "status": signal.SIGTERM}]
    assert ended.end["step"] == 16
