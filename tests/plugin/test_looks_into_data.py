"""A callback of the user's begins passes of its own over the training loader, in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from inprocess import NotedToy, copies, loader, make_trainer, plugin, same_state
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from lightning_resume import ResumableLoader

LOADERS: dict[str, Callable[[], Any]] = {
    "in this process": loader,
    "wrapped by the user": lambda: ResumableLoader(loader()),
    "two persistent workers": lambda: loader(num_workers=2, persistent_workers=True),
}


class Looking(Callback):
    """Takes some batches at the end of a training batch, counted from 1 over all processes."""

    def __init__(self, looks: dict[int, int], count: int) -> None:
        self.looks, self.count = looks, count
        self.kept: list[Iterator[Any]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.count += 1
        if self.count in self.looks:
            self.kept.append(iter(trainer.train_dataloader))
            for _ in range(self.looks[self.count]):
                next(self.kept[-1])


def trained(
    folder: Path, make_loader: Callable[[], Any], looks: dict[int, int], *, begin: int = 0, end: int
) -> NotedToy:
    """The toy, trained from one step to another; only the end is saved."""
    seed_everything(1 + begin, verbose=False)
    module = NotedToy()
    callback = plugin(folder / "ck", every_n_train_steps=10**9, save_on_exception=False)
    trainer = make_trainer(folder, Looking(looks, begin), callback, max_epochs=9, max_steps=end)
    trainer.fit(module, make_loader(), ckpt_path="last" if begin else None)
    return module


@pytest.mark.parametrize(
    ("kind", "looks", "cut"),
    [
        ("in this process", {13: 2}, 13),
        ("wrapped by the user", {11: 1}, 13),
        ("two persistent workers", {11: 0, 12: 3, 15: 1}, 13),
        ("two persistent workers", {13: 2}, 13),
        ("two persistent workers", {16: 1}, 16),
    ],
)
def test_a_run_that_looks_into_its_data_resumes_exactly(
    kind: str, looks: dict[int, int], cut: int, tmp_path: Path
) -> None:
    """A look just before the end is one after the last cut; persistent workers go on from where it has left them."""
    whole = trained(tmp_path / "whole", LOADERS[kind], looks, end=20)

    before = trained(tmp_path / "parts", LOADERS[kind], looks, end=cut)
    after = trained(tmp_path / "parts", LOADERS[kind], looks, begin=cut, end=20)

    assert before.rows + after.rows == whole.rows
    assert same_state(copies(after), copies(whole))
