"""The model's files: any safetensors reader loads them, and a resume puts every kind of tensor back where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chain import kill_in_turn
from inprocess import copies, loader, make_trainer, plugin, same_state
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file
from torch import Tensor, nn
from toy import Job, Toy, emit, step_dir

from lightning_resume import read_checkpoint


class Layers(Toy):
    """A net of several layers, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 1))
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("table", torch.arange(6, dtype=torch.int16).reshape(2, 3))


class Tied(Toy):
    """TEN-01's module: an embedding whose weight is a linear layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(5, 3)
        self.h = nn.Linear(3, 5, bias=False)
        self.h.weight = self.e.weight

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.e(batch.long().reshape(-1) % 5)
        return super().loss(self.h(hidden).mean(dim=1, keepdim=True))


class Strided(Toy):
    """TEN-04's module: parameters in channels_last and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())

    def loss(self, batch: Tensor) -> Tensor:
        image = batch.reshape(-1, 1, 1, 1).expand(-1, 2, 2, 2) / 32
        features = self.conv(image).reshape(-1, 3) @ self.turned
        return super().loss(features.mean(dim=1, keepdim=True))


class Expanded(Toy):
    """A buffer that is one row, seen four times; torch itself cannot load into one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(3.0).expand(4, 3))


class EmitsTensors(Callback):
    """Records identity and strides of the live parameters before each batch."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        named = dict(pl_module.named_parameters(remove_duplicate=False))
        emit(
            "tensors",
            strides={name: list(value.stride()) for name, value in named.items()},
            moments=[list(s["exp_avg"].stride()) for s in trainer.optimizers[0].state.values()],
            groups=[[other for other in named if named[other] is value] for value in named.values()],
        )


class Counting(nn.Module):
    """A module whose state is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"num_calls": self.num_calls, "sizes": (1, 2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.num_calls = state["num_calls"] if state["sizes"] == (1, 2) else -1

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x * (1 + self.num_calls / 8)


class ExtraState(Toy):
    """A net with such a module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), Counting(), nn.Dropout(0.5))


class Lazy(Toy):
    """Layers that get their shapes in `setup`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(4), nn.Dropout(0.5), nn.LazyLinear(1))

    def setup(self, stage: str) -> None:
        self.net(torch.ones(1, 1))


class Configured(Toy):
    """Layers that are made in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))


class Parametrized(Toy):
    """Layers whose weights are computed from other tensors, and a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        wrap = nn.utils.parametrizations
        self.recurrent = nn.LSTM(1, 3, num_layers=2, dropout=0.3, batch_first=True)
        self.net = nn.Sequential(
            wrap.spectral_norm(nn.Linear(3, 4)), nn.Dropout(0.5), wrap.weight_norm(nn.Linear(4, 1))
        )

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(self.recurrent(batch.reshape(1, -1, 1) / 32)[0].reshape(-1, 3))


@pytest.mark.parametrize("make", [ExtraState, Lazy, Configured, Parametrized])
def test_unusual_modules_go_on(make: type[Toy], tmp_path: Path) -> None:
    """Extra state, late shapes, late layers and parametrizations: the resumed run is the same run."""
    kill_in_turn(Job(module=make, plugin={"every_n_train_steps": 5}), tmp_path, {5: 5})


@pytest.mark.parametrize("make", [Layers, Toy])
def test_the_model_file_is_the_state_dict(make: type[Toy], tmp_path: Path) -> None:
    """A plain safetensors reader gets the very names, dtypes, shapes and values of `state_dict()`."""
    module = make()
    make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1).fit(module, loader())

    loaded = load_file(step_dir(tmp_path / "ck", 8) / "model.safetensors")

    expected = copies(module)
    assert same_state({name: loaded[name] for name in expected}, expected)
    assert set(loaded) == set(expected)


def test_a_sharded_model_follows_its_index(tmp_path: Path) -> None:
    """`model.safetensors.index.json` is Hugging Face's: each name's file, and the size of all data."""
    module = Layers()
    make_trainer(tmp_path, plugin(tmp_path / "ck", max_shard_bytes=100), max_epochs=1).fit(module, loader())
    folder = step_dir(tmp_path / "ck", 8)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    loaded = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}

    expected = copies(module)
    assert len(files) > 2
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert sorted(path.name for path in folder.glob("model*.safetensors")) == files
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    assert set(loaded) == set(expected)
    assert same_state({name: loaded[name] for name in expected}, expected)


@pytest.mark.parametrize("max_shard_bytes", [1, 100])
def test_a_run_with_sharded_files_resumes_exactly(max_shard_bytes: int, tmp_path: Path) -> None:
    """Model, optimizer and state in many files each are the same checkpoint."""
    job = Job(module=Layers, plugin={"max_shard_bytes": max_shard_bytes, "every_n_train_steps": 5})

    _, resumed = kill_in_turn(job, tmp_path, {5: 5})

    assert len(list(step_dir(resumed.folder, 5).glob("optimizer-*.safetensors"))) > 2


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """TEN-01: they are saved, both names are in the checkpoint's state dict, and the live ones are one after R."""
    job = Job(module=Tied, callbacks=lambda: [EmitsTensors()])

    baseline, resumed = kill_in_turn(job, tmp_path, {3: 3, 9: 9}, aside={"tensors"})

    saved = read_checkpoint(step_dir(resumed.folder, 9))["state_dict"]
    assert list(saved) == ["net.0.weight", "net.0.bias", "e.weight", "h.weight"]
    assert torch.equal(saved["e.weight"], saved["h.weight"])
    assert ["e.weight", "h.weight"] in resumed.of("tensors")[0]["groups"]
    assert resumed.of("tensors") == baseline.of("tensors")[9:]


def test_tied_weights_stand_once_in_the_model_file(tmp_path: Path) -> None:
    """As Hugging Face has it: data that two names share is written under one of them."""
    module = Tied()
    make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1).fit(module, loader())

    loaded = load_file(step_dir(tmp_path / "ck", 8) / "model.safetensors")

    shared = [name for name in ("e.weight", "h.weight") if name in loaded]
    assert len(shared) == 1
    assert torch.equal(loaded[shared[0]], module.e.weight)


def test_strides_of_live_tensors_stay(tmp_path: Path) -> None:
    """TEN-04: channels_last and transposed parameters, and their optimizer moments, keep values and strides."""
    job = Job(module=Strided, callbacks=lambda: [EmitsTensors()])

    baseline, resumed = kill_in_turn(job, tmp_path, {3: 3, 9: 9}, aside={"tensors"})

    first = resumed.of("tensors")[0]
    assert first["strides"]["conv.weight"] == [8, 1, 4, 2]
    assert first["strides"]["turned"] == [1, 3]
    assert resumed.of("tensors") == baseline.of("tensors")[9:]


@pytest.mark.parametrize("make", [Strided, Expanded])
def test_any_strides_can_be_saved(make: type[Toy], tmp_path: Path) -> None:
    """TEN-04: channels_last, transposed and expanded tensors stand in the model file with the values they show."""
    module = make()
    make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1).fit(module, loader())

    loaded = load_file(step_dir(tmp_path / "ck", 8) / "model.safetensors")

    expected = copies(module)
    assert set(loaded) == set(expected)
    assert same_state({name: loaded[name] for name in expected}, expected)
