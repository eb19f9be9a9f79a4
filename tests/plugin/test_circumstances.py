"""What a resume cannot put back is told: attributes without a state_dict, settings, versions, numbers in the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inprocess import NotedToy, Stop, StopAfter, loader, make_trainer, plugin
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from toy import Job, Toy, run, step_dir

from lightning_resume import read_checkpoint, verify_checkpoint, write_checkpoint


class Counts(Callback):
    """Keeps a counter of its own."""

    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_batches += 1


class CountsAndSays(Counts):
    """Has a state_dict."""

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]


class Layer(torch.nn.Linear):
    """A part of the module that counts."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.num_calls = 0

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(items)


class Keeper(Toy):
    """Keeps things in plain attributes, and one behind a property that must not be read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.num_steps, self.recent, self.best = 0, [], {"step": 0}
        self.mean, self.scale, self._private = torch.zeros(()), np.float64(1.0), 0
        self.fixed, self.large = "text", [0] * 2000

    @property
    def costly(self) -> int:
        raise AssertionError("a property was read")

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss = super().loss(batch) + self.layer(batch.reshape(-1, 1).float()).sum() * 0
        self.num_steps += 1
        self.recent.append(self.num_steps)
        self.best = {"step": self.num_steps}
        self.mean = self.mean + loss.detach()
        self.scale = self.scale * 2
        self._private += 1
        self.large[0] += 1
        return loss


def verdict_of(messages: list[str]) -> str:
    return next(text for text in messages if text.startswith("Resumed from"))


def test_attributes_that_start_anew_are_named(tmp_path: Path) -> None:
    """Counters, lists, dicts and tensors that had changed; what is fixed, private, large or the libraries' is not."""
    job = Job(module=Keeper, callbacks=lambda: [Counts(), CountsAndSays()], max_epochs=1)
    run(job, tmp_path, kill_after=5)

    resumed = run(job, tmp_path, resume=True)

    names = ["num_steps", "recent", "best", "mean", "scale"]
    expected = {*(f"Keeper.{name}" for name in names), "Keeper.layer.num_calls", "Counts.num_batches"}
    note = verdict_of(resumed.messages).partition(": exact; not restored, as no state_dict has them: ")[2]
    assert expected == set(note.split(", "))
    warned = [text for text in resumed.messages if "start anew" in text]
    assert len(warned) == 1
    assert "Counts.num_batches: 5 → 0" in warned[0]
    assert "Keeper.recent: [1, 2, 3, 4, 5] → []" in warned[0]
    assert "state_dict() or on_save_checkpoint() of its owner" in warned[0]


class HoldsWeights(Callback):
    """Keeps one of the module's own tensors, and a copy of it."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *rest: Any) -> None:
        weight = next(iter(pl_module.state_dict().values()))
        self.kept = {"live": [weight], "copy": weight.clone(), "empty": torch.empty(0)}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict


def test_what_was_the_models_own_tensor_in_a_callback_is_named(tmp_path: Path) -> None:
    """It has the right values, but no longer follows the model: a callback that relies on that has to take it anew."""
    job = Job(callbacks=lambda: [HoldsWeights()], max_epochs=1)
    run(job, tmp_path, kill_after=5)

    resumed = run(job, tmp_path, resume=True)

    note = "; copies now, which were the model's own tensors at the save: HoldsWeights.live.0"
    assert verdict_of(resumed.messages).endswith(note)


def test_nothing_is_said_where_every_attribute_comes_back(tmp_path: Path) -> None:
    """A module and a callback that restore what they keep; Lightning's own callbacks keep theirs."""
    trainer = {"logger": CSVLogger(tmp_path / "logs"), "log_every_n_steps": 1}
    job = Job(module=Quiet, callbacks=lambda: [CountsAndSays(), Rates()], max_epochs=1, trainer=trainer)
    run(job, tmp_path, kill_after=5)

    resumed = run(job, tmp_path, resume=True)

    assert verdict_of(resumed.messages).endswith(": exact")
    assert not [text for text in resumed.messages if "start anew" in text]


class Quiet(Toy):
    """Restores its counter in a load hook."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_steps += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_steps"] = self.num_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_steps = checkpoint["num_steps"]


class Rates(LearningRateMonitor):
    """A user's class, with Lightning's attributes."""


def _saved(folder: Path, **keywords: Any) -> Path:
    """A checkpoint of step 3."""
    trainer = make_trainer(folder, plugin(folder), StopAfter(4), max_epochs=1, **keywords)
    with pytest.raises(Stop):
        trainer.fit(NotedToy(), loader())
    return step_dir(folder, 3)


def _rewritten(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The checkpoint with a changed rank state."""
    state = read_checkpoint(checkpoint, rank=0)
    rank_state = state.pop("rank_state")
    change(rank_state)
    counters = verify_checkpoint(checkpoint).counters
    write_checkpoint(folder / "changed", state, rank_states=[rank_state], counters=counters)
    return folder / "changed"


def _resumed(path: Path, folder: Path, module: LightningModule | None = None, **keywords: Any) -> None:
    trainer = make_trainer(folder, plugin(folder / "new"), **{"max_epochs": 1, **keywords})
    trainer.fit(module or NotedToy(), loader(), ckpt_path=path)


class Slower(NotedToy):
    """Has another learning rate in its code."""

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        for group in optimizer.param_groups:
            group["lr"] /= 2
        return optimizer


DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "clipping": (
        {},
        {"gradient_clip_val": 0.5},
        "gradient_clip_val: None → 0.5; gradient_clip_algorithm: None → 'norm'",
    ),
    "kind of clipping": (
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
        "gradient_clip_algorithm: 'norm' → 'value'",
    ),
    "limit": ({}, {"limit_train_batches": 6}, "limit_train_batches: 1.0 → 6"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_another_setting_is_told(name: str, tmp_path: Path, told: Callable[[], str]) -> None:
    """The run goes on, and its first line says that it is another one."""
    before, now, text = DIFFERENCES[name]
    path = _saved(tmp_path, **before)

    _resumed(path, tmp_path, **now)

    assert f"global_step 3: NOT exact: {text}" in told()


@pytest.mark.parametrize(
    ("before", "now"),
    [({"gradient_clip_val": 0}, {}), ({}, {"limit_train_batches": 8}), ({"limit_train_batches": 9}, {})],
)
def test_a_setting_that_means_the_same_is_none(
    before: dict[str, Any], now: dict[str, Any], tmp_path: Path, told: Callable[[], str]
) -> None:
    """No clipping is no clipping, and a limit behind the end limits nothing."""
    path = _saved(tmp_path, **before)

    _resumed(path, tmp_path, **now)

    assert told().endswith("global_step 3: exact")


def test_other_versions_and_threads_are_told(tmp_path: Path, told: Callable[[], str]) -> None:
    """Kernels of another version, or cut up for other threads, may sum in another order."""
    other = {"torch": "2.5.0", "number of threads": 77}
    changed = _rewritten(_saved(tmp_path), tmp_path, lambda state: state["circumstances"]["settings"].update(other))

    _resumed(changed, tmp_path)

    threads, version = torch.get_num_threads(), str(torch.__version__)
    assert f"NOT exact: number of threads: 77 → {threads}; torch: '2.5.0' → {version!r}" in told()


def test_a_learning_rate_that_was_changed_in_the_code_is_told(tmp_path: Path, told: Callable[[], str]) -> None:
    """The saved one goes on; who edited the code learns it."""
    path = _saved(tmp_path)

    module = Slower()
    _resumed(path, tmp_path, module)

    assert "global_step 3: exact; lr of optimizer 0 in the code: 0.01 → 0.005; the saved one goes on" in told()
    assert {rate for row in module.rows for rate in row["lr"]} == {(0.01).hex()}


def test_a_checkpoint_without_circumstances_is_resumed(tmp_path: Path, told: Callable[[], str]) -> None:
    """What an earlier version did not save is not compared."""
    old = _rewritten(_saved(tmp_path), tmp_path, lambda state: state.pop("circumstances"))

    _resumed(old, tmp_path)

    assert told().endswith("global_step 3: exact")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """The line that reports the resume."""
    caplog.set_level("INFO")
    return lambda: verdict_of([record.getMessage() for record in caplog.records])
