"""Beside Lightning's own features: ModelCheckpoint, ckpt_path, save_checkpoint, the Tuner, the CLI, a used Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import (
    NotedToy,
    Stop,
    StopAfter,
    copies,
    loader,
    make_trainer,
    plugin,
    same_state,
    save_some,
    val_loader,
)
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from toy import Job, run, saved_steps, step_dir

from lightning_resume import AtomicCheckpointIO, load_module, read_checkpoint, verify_checkpoint


class Tested(NotedToy):
    """The toy with a test and a predict step, a learning rate and a batch size that can be tuned."""

    def __init__(self, lr: float = 1e-2, batch_size: int = 4) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=self.lr))
        self.save_hyperparameters()
        self.lr, self.batch_size = lr, batch_size

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return loader(64, batch_size=self.batch_size)


class ToyData(LightningDataModule):
    """The toy's training data, with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict

    def train_dataloader(self) -> DataLoader[Tensor]:
        return loader()


def user_checkpoint(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{step}")


Trained = tuple[Trainer, Tested, ModelCheckpoint, Path]


@pytest.fixture(scope="module", params=["before", "after"])
def trained_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, str]:
    """A trainer after two epochs, with a ModelCheckpoint of the user's before or after ours in the list."""
    folder = tmp_path_factory.mktemp("trained")
    module, own, ours = Tested(), user_checkpoint(folder), plugin(folder / "ck", every_n_train_steps=4)
    trainer = make_trainer(folder, *([own, ours] if request.param == "before" else [ours, own]))
    trainer.fit(module, loader(), val_loader())
    return (trainer, module, own, folder), own.best_model_path


@pytest.fixture
def trained(trained_once: tuple[Trained, str]) -> Trained:
    """The trainer, as if no test had evaluated with it: Lightning loads the callbacks' state too."""
    trained_once[0][2].best_model_path = trained_once[1]
    return trained_once[0]


def test_a_model_checkpoint_saves_whole_directories(trained: Trained) -> None:
    """The user's ModelCheckpoint keeps its own names and rules; what it saves is a sound checkpoint directory."""
    _, _, own, folder = trained

    names = sorted(path.name for path in (folder / "best").iterdir())

    assert names == ["epoch=0-step=8.ckpt", "epoch=1-step=16.ckpt", "last.ckpt"]
    assert {name: verify_checkpoint(folder / "best" / name).global_step for name in names} == {
        "epoch=0-step=8.ckpt": 8,
        "epoch=1-step=16.ckpt": 16,
        "last.ckpt": 16,
    }
    assert own.best_model_path in {str(folder / "best" / name) for name in names}
    assert saved_steps(folder / "ck") == [0, 4, 8, 12, 16]


@pytest.mark.parametrize("ckpt_path", ["best", "last", "directory"])
@pytest.mark.parametrize("task", ["validate", "test", "predict"])
def test_evaluation_loads_the_weights(trained: Trained, task: str, ckpt_path: str) -> None:
    """ENV-07: `validate`, `test` and `predict` take "best", "last" and a directory."""
    trainer, module, own, folder = trained
    sources = {"best": Path(own.best_model_path), "last": step_dir(folder / "ck", 16)}
    source = sources.get(ckpt_path, step_dir(folder / "ck", 4))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()

    getattr(trainer, task)(module, val_loader(), ckpt_path=str(source) if ckpt_path == "directory" else ckpt_path)

    assert same_state(copies(module), read_checkpoint(source)["state_dict"])
    assert any(parameter.item() != 0 for parameter in module.parameters())


@pytest.mark.parametrize("how", ["callback", "plugin"])
def test_a_new_trainer_evaluates_a_directory(how: str, tmp_path: Path) -> None:
    """ENV-07: another process needs the callback, or AtomicCheckpointIO alone, to read the directory."""
    saved = save_some(tmp_path / "ck", Tested())
    module = Tested()
    trainer = (
        make_trainer(tmp_path, plugin(tmp_path / "ck"))
        if how == "callback"
        else make_trainer(tmp_path, plugins=[AtomicCheckpointIO()], enable_checkpointing=False)
    )

    trainer.test(module, val_loader(), ckpt_path=step_dir(tmp_path / "ck", 8), verbose=False)

    assert same_state(copies(module), copies(saved))


def test_fit_goes_on_from_a_model_checkpoints_directory(tmp_path: Path) -> None:
    """`fit(ckpt_path=<what ModelCheckpoint saved>)` trains the next epoch from its weights."""
    first = make_trainer(tmp_path, plugin(tmp_path / "a"), user_checkpoint(tmp_path), max_epochs=1)
    first.fit(Tested(), loader(), val_loader())
    module = Tested()

    second = make_trainer(tmp_path, plugin(tmp_path / "b"), max_epochs=2)
    second.fit(module, loader(), val_loader(), ckpt_path=tmp_path / "best" / "epoch=0-step=8.ckpt")

    assert [(row["epoch"], row["step"]) for row in module.rows] == [(1, step) for step in range(8, 16)]
    assert saved_steps(tmp_path / "b") == list(range(8, 17))


def test_a_module_is_built_from_a_directory(tmp_path: Path) -> None:
    """ENV-07: `load_module` does what `load_from_checkpoint` does: hyper-parameters, then weights; arguments win."""
    saved = save_some(tmp_path / "ck", Tested(lr=0.5, batch_size=2))

    module = load_module(Tested, step_dir(tmp_path / "ck", 8), batch_size=8)

    assert (module.lr, module.batch_size) == (0.5, 8)
    assert same_state(copies(module), copies(saved))


@pytest.mark.parametrize("weights_only", [False, True])
def test_save_checkpoint_writes_what_a_trainer_can_test(weights_only: bool, tmp_path: Path) -> None:
    """`trainer.save_checkpoint(path)` after training, whole or weights only, is a directory that `test` loads."""
    module = Tested()
    trainer = make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1)
    trainer.fit(module, loader())
    expected = copies(module)

    trainer.save_checkpoint(tmp_path / "mine.ckpt", weights_only=weights_only)
    other = Tested()
    trainer.test(other, val_loader(), ckpt_path=tmp_path / "mine.ckpt", verbose=False)

    assert verify_checkpoint(tmp_path / "mine.ckpt").kind == ("weights" if weights_only else "full")
    assert ("optimizer_states" in read_checkpoint(tmp_path / "mine.ckpt")) is not weights_only
    assert same_state(copies(other), expected)


class SavesByHand(Callback):
    """Calls `trainer.save_checkpoint` in the middle of training."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "mine.ckpt")


def test_a_save_by_hand_in_mid_training_can_be_resumed(tmp_path: Path) -> None:
    """It is taken inside a step, so the resume says NOT exact; still it goes on at the right batch."""
    first = make_trainer(tmp_path, plugin(tmp_path / "a"), SavesByHand(), max_epochs=1)
    first.fit(NotedToy(), loader())

    resumed = run(Job(max_epochs=1), tmp_path / "work", resume=tmp_path / "mine.ckpt")

    assert any("NOT exact" in message for message in resumed.messages)
    assert resumed.places == [(0, 5, 5), (0, 6, 6), (0, 7, 7)]


def test_a_trainer_can_fit_twice(tmp_path: Path) -> None:
    """The second `fit` of a Trainer goes on, with or without "last", and saves under the steps that follow."""
    module = NotedToy()
    trainer = make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1)
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 3

    trainer.fit(module, loader(), ckpt_path="last")

    assert [row["step"] for row in module.rows] == list(range(24))
    assert saved_steps(tmp_path / "ck") == list(range(25))


def test_fast_dev_run_saves_nothing_and_resumes_nothing(tmp_path: Path) -> None:
    """A dry run of a script with `ckpt_path="last"` trains one batch from scratch and leaves the folder alone."""
    save_some(tmp_path / "ck")
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "ck").rglob("*"))}
    module = NotedToy()

    make_trainer(tmp_path, plugin(tmp_path / "ck"), fast_dev_run=True).fit(module, loader(), ckpt_path="last")

    assert [(row["epoch"], row["batch"], row["step"]) for row in module.rows] == [(0, 0, 0)]
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "ck").rglob("*"))} == before


def test_fast_dev_run_makes_no_folder(tmp_path: Path) -> None:
    """A dry run leaves no trace on the disk."""
    make_trainer(tmp_path, plugin(tmp_path / "ck"), fast_dev_run=True).fit(NotedToy(), loader())

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ckpt_path", ["last", None])
def test_an_exception_checkpoint_does_not_win_over_the_exact_one(ckpt_path: str | None, tmp_path: Path) -> None:
    """Lightning's OnExceptionCheckpoint saves later, but inside a step: "last" still means the exact checkpoint."""
    with pytest.raises(Stop):
        make_trainer(
            tmp_path, OnExceptionCheckpoint(tmp_path / "oops"), StopAfter(5), plugin(tmp_path / "ck"), max_epochs=1
        ).fit(NotedToy(), loader())
    assert verify_checkpoint(tmp_path / "oops" / "on_exception.ckpt").global_step == 5
    module = NotedToy()

    trainer = make_trainer(tmp_path, OnExceptionCheckpoint(tmp_path / "oops"), plugin(tmp_path / "ck"), max_epochs=1)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)

    assert trainer.ckpt_path == str(step_dir(tmp_path / "ck", 4))
    assert [row["step"] for row in module.rows] == [4, 5, 6, 7]


def test_a_trainer_goes_on_after_an_error(tmp_path: Path) -> None:
    """In a notebook: training ends with an error, then the same Trainer validates, and fits on from "last"."""
    torch.manual_seed(3)
    baseline = NotedToy()
    make_trainer(tmp_path, plugin(tmp_path / "base")).fit(baseline, loader())
    torch.manual_seed(3)
    module = NotedToy()
    trainer = make_trainer(tmp_path, StopAfter(5), plugin(tmp_path / "ck"))
    with pytest.raises(Stop):
        trainer.fit(module, loader())

    trainer.validate(module, val_loader(), verbose=False)
    trainer.fit(module, loader(), ckpt_path="last")

    assert module.rows[5:] == baseline.rows[4:]
    assert same_state(copies(module), copies(baseline))


def test_a_data_modules_state_comes_back(tmp_path: Path) -> None:
    """What a LightningDataModule says in `state_dict` is loaded before the first batch, equal in value and type."""
    data, resumed = ToyData(), ToyData()
    data.state = {"shard": (1, 2), "seen": 7}
    with pytest.raises(Stop):
        make_trainer(tmp_path, StopAfter(5), plugin(tmp_path / "ck")).fit(NotedToy(), datamodule=data)
    module = NotedToy()

    make_trainer(tmp_path, plugin(tmp_path / "ck")).fit(module, datamodule=resumed, ckpt_path="last")

    assert resumed.state == {"shard": (1, 2), "seen": 7}
    assert module.rows[0]["step"] == 4


def test_a_model_checkpoint_may_share_folder_and_names(tmp_path: Path) -> None:
    """Its checkpoints, though named after steps too, are neither pruned nor taken for "last"."""
    own = ModelCheckpoint(
        tmp_path, "step-{step:08d}", auto_insert_metric_name=False, every_n_train_steps=2, save_top_k=-1
    )
    make_trainer(tmp_path, own, plugin(tmp_path, every_n_train_steps=3, keep_last_k=1), max_epochs=1).fit(
        NotedToy(), loader()
    )
    trainer = make_trainer(tmp_path, plugin(tmp_path), max_epochs=2)

    trainer.fit(NotedToy(), loader(), ckpt_path="last")

    assert trainer.ckpt_path == str(step_dir(tmp_path, 8))
    theirs = [f"step-{step:08d}.ckpt" for step in (2, 4, 6, 8)]
    assert [name for name in theirs if not (tmp_path / name / "index.json").exists()] == []
