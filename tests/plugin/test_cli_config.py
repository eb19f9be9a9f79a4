"""LightningCLI: a config file names the callback by its path, and its arguments are typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from inprocess import NotedToy, loader
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from toy import saved_steps

from lightning_resume import AtomicResumeCallback

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
from lightning.pytorch.cli import LightningCLI


class CliToy(NotedToy):
    """The toy, made without arguments."""

    def __init__(self) -> None:
        super().__init__()


class ToyData(LightningDataModule):
    """The toy's training data."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return loader()


def cli_config(folder: Path, **init_args: Any) -> Path:
    """A LightningCLI config that names the callback by its path."""
    callback = {"class_path": "lightning_resume.AtomicResumeCallback", "init_args": init_args}
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {**settings, "max_epochs": 1, "callbacks": [callback]}}))
    return path


def test_the_cli_makes_the_callback_by_its_path(tmp_path: Path) -> None:
    """A LightningCLI config names class and arguments, all typed; `--ckpt_path last` starts, then goes on."""
    config = cli_config(
        tmp_path,
        dirpath=str(tmp_path / "ck"),
        every_n_train_steps=3,
        train_time_interval="0:10:00",
        keep_last_k=10,
        allow=["data_changed"],
        data_version="v1",
    )
    arguments = ["fit", "--config", str(config), "--ckpt_path", "last", "--trainer.max_epochs"]

    first = LightningCLI(CliToy, ToyData, args=[*arguments, "1"], save_config_callback=None)
    second = LightningCLI(CliToy, ToyData, args=[*arguments, "2"], save_config_callback=None)

    assert [len(cli.model.rows) for cli in (first, second)] == [8, 8]
    assert second.model.rows[0]["step"] == 8
    assert saved_steps(tmp_path / "ck") == [0, 3, 6, 8, 11, 14, 16]
    callback = next(c for c in second.trainer.callbacks if isinstance(c, AtomicResumeCallback))
    assert (callback.allow, callback.settings.data_version) == (("data_changed",), "v1")


@pytest.mark.parametrize("argument", ["every_n_train_steps=many", "keep_last=3", "train_time_interval=60"])
def test_the_cli_refuses_a_wrong_argument(argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments are typed: a wrong name or type is told with its name before anything is made."""
    name, _, value = argument.partition("=")
    config = cli_config(tmp_path, dirpath=str(tmp_path / "ck"), **{name: int(value) if value.isdigit() else value})

    with pytest.raises(SystemExit):
        LightningCLI(CliToy, ToyData, args=["fit", "--config", str(config)], save_config_callback=None)

    assert name in capsys.readouterr().err
    assert not (tmp_path / "ck").exists()
