"""Training the toy inside the test's own process, for stories in which nobody is killed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from toy import Toy, ToyItems

from lightning_resume import AtomicResumeCallback, RNGState


class Stop(Exception):
    """Ends training where a test wants it to end."""


class StopAfter(Callback):
    """Ends training at the end of a batch, counted from 1 in this process."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_batches -= 1
        if self.num_batches == 0:
            raise Stop


class NotedToy(Toy):
    """The toy, with a list of what it was trained on."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._rows: list[dict[str, Any]] = []

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One entry for each batch that this object was trained on."""
        return self._rows

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._rows.append(self.row)
        return loss


def make_trainer(folder: Path, *callbacks: Callback, **keywords: Any) -> Trainer:
    """A silent CPU trainer of two epochs."""
    settings = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "callbacks": list(callbacks),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return Trainer(**{**settings, **keywords})


def plugin(folder: Path, **keywords: Any) -> AtomicResumeCallback:
    """The plugin: saves after every optimizer step and keeps everything, unless told otherwise."""
    return AtomicResumeCallback(folder, **{"every_n_train_steps": 1, "keep_last_k": 1000, **keywords})


def loader(num_items: int = 32, **keywords: Any) -> DataLoader[Tensor]:
    """The toy's training loader."""
    return DataLoader(ToyItems(num_items), **{"batch_size": 4, "shuffle": True, **keywords})


def val_loader() -> DataLoader[Tensor]:
    """Eight items, in order."""
    return DataLoader(ToyItems(8), 4)


def save_some(folder: Path, module: LightningModule | None = None, **keywords: Any) -> LightningModule:
    """Trains the toy for one epoch and leaves the checkpoints of step 0 to 8 in `folder`."""
    module = module or NotedToy()
    make_trainer(folder, plugin(folder, **keywords), max_epochs=1).fit(module, loader())
    return module


def copies(module: LightningModule) -> dict[str, Tensor]:
    """The module's state as it is now."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same_state(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether names, dtypes and values are equal."""
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def refused(module: LightningModule, path: Path, folder: Path, error: type[Exception], **keywords: Any) -> Any:
    """Resumes from `path`, checks that nothing was trained or restored, and returns the error."""
    before, streams = copies(module), RNGState.capture().state_dict()
    trainer = make_trainer(folder, plugin(folder / "new"), **keywords)

    with pytest.raises(error) as caught:
        trainer.fit(module, loader(), ckpt_path=path)

    assert module.rows == []
    assert same_state(copies(module), before)
    assert str(RNGState.capture().state_dict()) == str(streams)
    assert not (folder / "new").exists() or not list((folder / "new").glob("step-*"))
    return caught.value
