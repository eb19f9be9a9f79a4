"""Wrong arguments, folders and setups: refused by name when the callback is made, or before the first batch."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import NotedToy, loader, make_trainer, plugin
from lightning.fabric.plugins import XLACheckpointIO
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_resume import AtomicResumeCallback, UnsupportedSetupError


class SlowIO(XLACheckpointIO):
    """A CheckpointIO of the user's."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"every_n_train_steps": 0}, ValueError, "every_n_train_steps must be at least 1, got 0"),
        ({"every_n_train_steps": -1}, ValueError, "every_n_train_steps must be at least 1, got -1"),
        ({"every_n_train_steps": 1.5}, TypeError, "every_n_train_steps must be an int, got 1.5"),
        ({"every_n_train_steps": True}, TypeError, "every_n_train_steps must be an int, got True"),
        ({"every_n_train_steps": "5"}, TypeError, "every_n_train_steps must be an int, got '5'"),
        ({"train_time_interval": 60}, TypeError, "train_time_interval must be a datetime.timedelta, got 60"),
        ({"train_time_interval": timedelta(0)}, ValueError, "train_time_interval must be positive, got 0:00:00"),
        ({"train_time_interval": timedelta(seconds=-1)}, ValueError, "train_time_interval must be positive"),
        ({"keep_last_k": 0}, ValueError, "keep_last_k must be at least 1, got 0"),
        ({"keep_last_k": -1}, ValueError, "keep_last_k must be at least 1, got -1"),
        ({"keep_last_k": None}, TypeError, "keep_last_k must be an int, got None"),
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes must be at least 1, got 0"),
        ({"max_shard_bytes": "1GB"}, TypeError, "max_shard_bytes must be an int, got '1GB'"),
        ({"max_shard_bytes": None}, TypeError, "max_shard_bytes must be an int, got None"),
        ({"async_save": "no"}, TypeError, "async_save must be a bool, got 'no'"),
        ({"save_on_train_start": None}, TypeError, "save_on_train_start must be a bool, got None"),
        ({"save_on_train_end": 1}, TypeError, "save_on_train_end must be a bool, got 1"),
        ({"save_on_exception": 0}, TypeError, "save_on_exception must be a bool, got 0"),
        ({"trainable_only": "yes"}, TypeError, "trainable_only must be a bool, got 'yes'"),
        ({"archive_every_n_train_steps": 0}, ValueError, "archive_every_n_train_steps must be at least 1, got 0"),
        ({"archive_every_n_train_steps": 2.0}, TypeError, "archive_every_n_train_steps must be an int, got 2.0"),
        (
            {"save_weights_only_every_n_train_steps": -5},
            ValueError,
            "save_weights_only_every_n_train_steps must be at least 1, got -5",
        ),
        ({"back_pressure": "drop"}, ValueError, "back_pressure must be 'wait' or 'skip', got 'drop'"),
        ({"preemption_notice_seconds": 0}, ValueError, "preemption_notice_seconds must be positive and finite, got 0"),
        ({"preemption_notice_seconds": "60"}, TypeError, "preemption_notice_seconds must be a number of seconds"),
        (
            {"preemption_notice_seconds": 60, "save_on_signal": False},
            ValueError,
            "preemption_notice_seconds says how long a signal leaves, but save_on_signal=False",
        ),
        (
            {"back_pressure": "skip", "async_save": False},
            ValueError,
            "back_pressure='skip' is about saves in the background, but async_save=False",
        ),
        ({"save_on_signal": "SIGTERM"}, TypeError, "save_on_signal must be a bool, got 'SIGTERM'"),
        ({"data_version": 5}, TypeError, "data_version must be a str, got 5"),
        ({"allow": 5}, TypeError, "allow must be a sequence of str, got 5"),
        ({"allow": None}, TypeError, "allow must be a sequence of str, got None"),
        ({"allow": ("anything",)}, ValueError, "allow knows no 'anything'; there are: "),
        ({"allow": ("data_changed", 5)}, ValueError, "allow knows no 5; there are: "),
        ({"dirpath": 5}, TypeError, "dirpath must be a str or os.PathLike, got 5"),
        ({"dirpath": b"x"}, TypeError, "dirpath must be a str or os.PathLike, got b'x'"),
        ({"dirpath": ""}, ValueError, "dirpath must name a folder, got ''"),
        ({"dirpath": "a\0b"}, ValueError, "dirpath must name a folder, got 'a\\x00b'"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_by_name(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    """The constructor refuses it; the message has the argument's name and its value."""
    with pytest.raises(error) as caught:
        AtomicResumeCallback(**arguments)

    assert words in str(caught.value)


@pytest.mark.parametrize("dirpath", ["s3://bucket/x", "memory://x", "gs://x", "file:///tmp/x"])
def test_a_remote_folder_is_refused(dirpath: str) -> None:
    """ENV-05: rename and fsync mean nothing there; refused when the callback is made."""
    with pytest.raises(UnsupportedSetupError, match="local") as caught:
        AtomicResumeCallback(dirpath)

    assert dirpath in caught.value.setup


def test_a_remote_root_folder_is_refused(tmp_path: Path) -> None:
    """ENV-05: without a dirpath the Trainer's root folder counts; refused when training starts."""
    module = NotedToy()
    trainer = make_trainer(tmp_path, AtomicResumeCallback(), default_root_dir="memory://runs")

    with pytest.raises(UnsupportedSetupError, match="local") as caught:
        trainer.fit(module, loader())

    assert "memory:" in caught.value.setup
    assert module.rows == []


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A file stands where the folder should be: an error before the first batch, and the file is left alone."""
    (tmp_path / "ck").write_text("mine")
    module = NotedToy()

    with pytest.raises(UnsupportedSetupError, match="File exists") as caught:
        make_trainer(tmp_path, plugin(tmp_path / "ck")).fit(module, loader())

    assert str(tmp_path / "ck") in caught.value.setup
    assert module.rows == []
    assert (tmp_path / "ck").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """A parent of the folder is a file: an error before the first batch."""
    (tmp_path / "file").touch()
    module = NotedToy()

    with pytest.raises(UnsupportedSetupError, match="Not a directory") as caught:
        make_trainer(tmp_path, plugin(tmp_path / "file" / "ck")).fit(module, loader())

    assert str(tmp_path / "file" / "ck") in caught.value.setup
    assert module.rows == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is there but read-only: an error before the first batch."""
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **kw: mode & os.W_OK == 0 and allowed(path, mode, **kw))
    module = NotedToy()

    with pytest.raises(UnsupportedSetupError, match="cannot be written") as caught:
        make_trainer(tmp_path, plugin(tmp_path / "ck")).fit(module, loader())

    assert str(tmp_path / "ck") in caught.value.setup
    assert module.rows == []


def test_a_sharded_strategy_is_refused(tmp_path: Path) -> None:
    """DDP-07: FSDP2's strategy runs on the CPU too, but is not supported: an error at the start (FSDP needs a GPU)."""
    module = NotedToy()
    module.configure_model = lambda: None
    trainer = make_trainer(tmp_path, plugin(tmp_path / "ck"), strategy=ModelParallelStrategy(), devices=1)

    try:
        with pytest.raises(UnsupportedSetupError, match="ModelParallelStrategy"):
            trainer.fit(module, loader())
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    assert module.rows == []
    assert not (tmp_path / "ck").exists()


def test_another_checkpoint_io_is_refused(tmp_path: Path) -> None:
    """A CheckpointIO of somebody else's is not replaced silently."""
    trainer = make_trainer(tmp_path, plugin(tmp_path / "ck"), plugins=[SlowIO()])

    with pytest.raises(UnsupportedSetupError, match="SlowIO"):
        trainer.fit(NotedToy(), loader())


@pytest.mark.parametrize("permanent", [True, False])
def test_pruning_is_refused(permanent: bool, tmp_path: Path) -> None:
    """ModelPruning leaves its masks out of the checkpoint: pruned weights would grow again, without a word."""
    module = NotedToy()
    pruning = ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=permanent)

    with pytest.raises(UnsupportedSetupError, match="ModelPruning"):
        make_trainer(tmp_path, pruning, plugin(tmp_path / "ck")).fit(module, loader())

    assert module.rows == []


def test_a_save_hook_that_replaces_weights_is_refused(tmp_path: Path) -> None:
    """`on_save_checkpoint` writes other weights than those that are trained: the first save names one of them."""
    module = NotedToy()

    def halve(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value / 2 for name, value in checkpoint["state_dict"].items()}

    module.on_save_checkpoint = halve

    with pytest.raises(UnsupportedSetupError, match=r"net\.0\.weight"):
        make_trainer(tmp_path, plugin(tmp_path / "ck")).fit(module, loader())

    assert module.rows == []
    assert not list((tmp_path / "ck").glob("step-*"))


def test_an_iterator_as_a_loader_is_refused(tmp_path: Path) -> None:
    """A generator can be read once: it is refused when fit starts, with what to pass instead, not after a crash."""
    module = NotedToy()
    batches = (batch for batch in loader())

    with pytest.raises(UnsupportedSetupError, match="an iterator can be read once") as caught:
        make_trainer(tmp_path, plugin(tmp_path / "ck")).fit(module, batches)

    assert "generator" in caught.value.setup
    assert "__iter__ begins anew" in str(caught.value)
    assert module.rows == []


def test_workers_that_race_are_refused(tmp_path: Path) -> None:
    """With `in_order=False` the next batch is that of the fastest worker: no position can be gone back to."""
    module = NotedToy()

    with pytest.raises(UnsupportedSetupError, match="in_order=False"):
        make_trainer(tmp_path, plugin(tmp_path / "ck")).fit(module, loader(num_workers=2, in_order=False))

    assert module.rows == []
