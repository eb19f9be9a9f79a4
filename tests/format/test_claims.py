"""Frozen tensors that are compared when training goes on: one that changed is never taken for what it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hidden_changes import HIDDEN, HIDDEN_CHANGES
from test_images import FROZEN, adapted, inode, is_saved
from torch import nn

from lightning_resume.format import claims, gather
from lightning_resume.format.checkpoint import read_checkpoint
from lightning_resume.format.claims import StaleCopyError
from lightning_resume.format.image import Image
from lightning_resume.format.memory import compare_memory
from lightning_resume.format.prepared import PreparedCheckpoint, prepare_checkpoint


def cut(path: Path, model: nn.Module, place: Image) -> PreparedCheckpoint:
    """What training waits for."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    checkpoint = prepare_checkpoint(path, {"state_dict": model.state_dict()}, frozen=frozen)
    checkpoint.copy_into(place, compare_later=True)
    return checkpoint


def saved_twice(folder: Path) -> tuple[nn.ModuleDict, Image]:
    """A model whose frozen part was written once, and linked once."""
    model, place = adapted(), Image()
    for number in (1, 2):
        cut(folder / str(number), model, place).commit()
    return model, place


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("change", HIDDEN_CHANGES)
def test_a_change_that_nothing_shows_is_found_before_the_commit(
    change: Callable[[nn.Parameter], None], is_late: bool, tmp_path: Path
) -> None:
    """Before the cut or behind it: there is no checkpoint of it, nothing is left of it, and the next one is right."""
    model, place = saved_twice(tmp_path)

    if not is_late:
        change(model["backbone"].weight)
    checkpoint = cut(tmp_path / "3", model, place)
    if is_late:
        change(model["backbone"].weight)
    with pytest.raises(StaleCopyError, match=f"{FROZEN}' changed while 3 was saved"):
        checkpoint.commit()
    names = sorted(path.name for path in tmp_path.iterdir())
    cut(tmp_path / "4", model, place).commit()
    cut(tmp_path / "5", model, place).commit()

    assert names == ["1", "2"]
    assert is_saved(tmp_path / "4", model)
    assert is_saved(tmp_path / "5", model)
    inodes = [inode(tmp_path / number / FROZEN) for number in "1245"]
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]


def change_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.view(-1)[HIDDEN] += 1


def change_by_replacement(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()
    weight.data.view(-1)[HIDDEN] += 1


def change_all(weight: nn.Parameter) -> None:
    weight.data.add_(1)


@pytest.mark.parametrize("change", [change_in_place, change_by_replacement, change_all])
def test_a_change_that_shows_is_copied_at_once(change: Callable[[nn.Parameter], None], tmp_path: Path) -> None:
    """A version that moved, other memory, or other bytes where some are looked at."""
    model, place = saved_twice(tmp_path)

    change(model["backbone"].weight)
    cut(tmp_path / "3", model, place).commit()

    assert is_saved(tmp_path / "3", model)
    assert inode(tmp_path / "2" / FROZEN) != inode(tmp_path / "3" / FROZEN)


def test_training_does_not_wait_for_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the cut what is trained is compared, and some bytes of what is frozen; all of them before the commit."""
    model, place = saved_twice(tmp_path)
    compared: list[int] = []

    def counted(left: int, right: int, num_bytes: int) -> bool:
        compared.append(num_bytes)
        return compare_memory(left, right, num_bytes)

    monkeypatch.setattr(claims, "compare_memory", counted)
    monkeypatch.setattr(gather, "compare_memory", counted)
    checkpoint = cut(tmp_path / "3", model, place)
    at_the_cut = sum(compared) - sum(value.nbytes for value in model["adapter"].state_dict().values())
    checkpoint.commit()

    num_bytes = model["backbone"].weight.nbytes
    assert at_the_cut < num_bytes / 100
    assert sum(compared) > num_bytes
    assert inode(tmp_path / "2" / FROZEN) == inode(tmp_path / "3" / FROZEN)


def test_tensors_without_a_version_are_compared_at_once(tmp_path: Path) -> None:
    """What was made in inference mode has none."""
    with torch.inference_mode():
        weight = torch.zeros(3 * 2**20)
    place, paths = Image(), [tmp_path / str(number) for number in range(3)]

    def save(path: Path) -> None:
        state: dict[str, Any] = {"state_dict": {"frozen": weight, "trained": torch.ones(2**20)}}
        checkpoint = prepare_checkpoint(path, state, frozen=["frozen"])
        checkpoint.copy_into(place, compare_later=True)
        checkpoint.commit()

    save(paths[0])
    save(paths[1])
    weight.numpy()[HIDDEN] = 1
    save(paths[2])

    assert inode(paths[0] / FROZEN) == inode(paths[1] / FROZEN) != inode(paths[2] / FROZEN)


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, torch.Tensor.tolist], ids=["array", "list"])
def test_frozen_weights_that_are_no_tensors_are_compared_at_once(
    convert: Callable[[torch.Tensor], Any], tmp_path: Path
) -> None:
    """A hook of a state dict may hand out something else."""
    weights, place = {"base": convert(torch.ones(3 * 2**20)), "trained": torch.zeros(2)}, Image()

    for number in "123":
        checkpoint = prepare_checkpoint(tmp_path / number, {"state_dict": weights}, frozen=["base"])
        checkpoint.copy_into(place, compare_later=True)
        checkpoint.commit()

    assert inode(tmp_path / "1" / FROZEN) == inode(tmp_path / "3" / FROZEN)
    assert (tmp_path / "3" / FROZEN).stat().st_size > 12 * 2**20


def test_strided_weights_are_copied_at_once(tmp_path: Path) -> None:
    """What does not lie in memory as in the file is in nothing that could be compared later."""
    weight = torch.zeros(3 * 2**10, 2**10).t()
    state: dict[str, Any] = {
        "state_dict": {"frozen": weight, "plain": torch.zeros(2**20), "trained": torch.ones(2**20)}
    }
    place, paths = Image(), [tmp_path / str(number) for number in range(2)]

    for path in paths:
        checkpoint = prepare_checkpoint(path, state, frozen=["frozen", "plain"])
        checkpoint.copy_into(place, compare_later=True)
        checkpoint.commit()
        weight.data[511, 1003] += 1  # in none of the samples

    saved = [read_checkpoint(path)["state_dict"]["frozen"][511, 1003].item() for path in paths]
    assert saved == [0.0, 1.0]
