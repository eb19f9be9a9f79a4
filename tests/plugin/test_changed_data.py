"""Data that is not the data of the save is refused; data that is, is entered without reading what was trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import NotedToy, loader, make_trainer, plugin, save_some
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import Dataset
from toy import Job, ToyItems, emit, run, saved_steps, step_dir

from lightning_resume import DataChangedError, StateMismatchError


class CountingItems(ToyItems):
    """Records each item that is read."""

    def __getitem__(self, index: int) -> Tensor:
        emit("read", item=index)
        return super().__getitem__(index)


class OtherItems(ToyItems):
    """A data set of another class."""


class Case:
    """A changed loader: what differs, and the word that lets it pass.

    Args:
        field: of the error.
        saved: value at the save.
        current: value now.
        word: of `allow`.
        dataset: of the resumed run.
        keywords: of its loader.
    """

    def __init__(
        self,
        field: str,
        saved: Any,
        current: Any,
        word: str,
        dataset: Dataset[Tensor] | None = None,
        **keywords: Any,
    ) -> None:
        self.field, self.saved, self.current, self.word = field, saved, current, word
        self.dataset, self.keywords = dataset or ToyItems(), keywords

    def loader(self) -> Any:
        return torch.utils.data.DataLoader(self.dataset, **{"batch_size": 4, "shuffle": True, **self.keywords})


CASES = {
    "more items": Case("data set length", 32, 36, "data_changed", ToyItems(36)),
    "fewer items": Case("data set length", 32, 28, "data_changed", ToyItems(28)),
    "other items": Case("data set type", "ToyItems", "OtherItems", "data_changed", OtherItems()),
    "batch size": Case("batch_size", 4, 2, "batch_size_changed", batch_size=2),
    "no shuffling": Case("shuffle", "on", "off", "sampler_changed", shuffle=False),
    "dropping the last": Case("drop_last", False, True, "drop_last_changed", drop_last=True),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after 6 batches of 8."""
    folder = tmp_path_factory.mktemp("saved")
    save_some(folder)
    return step_dir(folder, 6)


def resume(checkpoint: Path, folder: Path, data: Any, **keywords: Any) -> NotedToy:
    """Goes on from a checkpoint, for the rest of the epoch."""
    module = NotedToy()
    make_trainer(folder, plugin(folder / "new", **keywords), max_epochs=1).fit(module, data, ckpt_path=checkpoint)
    return module


def test_entering_the_position_reads_only_what_is_left(tmp_path: Path) -> None:
    """DAT-14: killed after batch 6 of 8, the resumed run reads the 8 items of the last two batches."""
    job = Job(dataset=CountingItems, max_epochs=1)
    baseline = run(job, tmp_path / "base")
    run(job, tmp_path / "work", kill_after=6)

    resumed = run(job, tmp_path / "work", resume=True)

    assert len(resumed.of("read")) == 8
    assert resumed.of("read") == baseline.of("read")[24:]
    assert resumed.batches == baseline.batches[6:]


@pytest.mark.parametrize(("size", "told"), [(2, "12 items are trained again"), (5, "6 items are left out")])
def test_another_batch_size_says_what_becomes_of_the_items(
    size: int, told: str, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An epoch is entered by the number of its batches, of whatever size."""
    data = torch.utils.data.DataLoader(ToyItems(), batch_size=size, shuffle=True)

    resume(saved, tmp_path, data, allow=("batch_size_changed",))

    assert f"NOT exact: batch_size: 4 → {size}; 6 batches of the new size are taken for trained: {told}" in caplog.text


def test_a_batch_size_with_which_the_epoch_is_over_is_refused(saved: Path, tmp_path: Path) -> None:
    """It has fewer batches than were trained."""
    data = torch.utils.data.DataLoader(ToyItems(), batch_size=8, shuffle=True)

    with pytest.raises(StateMismatchError, match="Resume with the batch size and the data of the save, or from"):
        resume(saved, tmp_path, data, allow=("batch_size_changed",))


@pytest.mark.parametrize("name", CASES)
def test_changed_data_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    """DAT-21: the error has the field, both values and the word that would let it pass; nothing is trained or saved."""
    case = CASES[name]

    with pytest.raises(DataChangedError) as caught:
        resume(saved, tmp_path, case.loader())

    error = caught.value
    assert (error.field, error.saved, error.current) == (case.field, case.saved, case.current)
    assert f"allow=('{case.word}',)" in str(error)
    assert saved_steps(tmp_path / "new") == []


@pytest.mark.parametrize("name", CASES)
def test_an_accepted_change_lets_the_run_go_on(name: str, saved: Path, tmp_path: Path) -> None:
    """DAT-21: with its word in `allow`, and no other, training goes on at the same batch of the new data."""
    case = CASES[name]

    module = resume(saved, tmp_path, case.loader(), allow=(case.word,))

    first, num_batches = module.rows[0], len(case.loader())
    assert (first["epoch"], first["batch"], first["step"]) == (0, 6, 6)
    assert len(module.rows) == num_batches - 6


@pytest.mark.parametrize("name", CASES)
def test_another_word_does_not_let_it_pass(name: str, saved: Path, tmp_path: Path) -> None:
    """Each kind of refusal has its own word."""
    case = CASES[name]
    others = {c.word for c in CASES.values()} - {case.word}

    with pytest.raises(DataChangedError) as caught:
        resume(saved, tmp_path, case.loader(), allow=sorted(others))

    assert caught.value.field == case.field


def test_an_accepted_change_is_told(tmp_path: Path) -> None:
    """The line that reports a resume says NOT exact, and what differs."""
    job = Job(max_epochs=1)
    run(job, tmp_path / "work", kill_after=6)

    changed = replace(job, num_items=36, plugin={"allow": ["data_changed"]})
    resumed = run(changed, tmp_path / "work", resume=True)

    lines = [text for text in resumed.messages if text.startswith("Resumed from")]
    assert len(lines) == 1
    assert lines[0].endswith("epoch 0, batch 6, global_step 6: NOT exact: data set length: 32 → 36")


def test_an_exact_resume_is_told(tmp_path: Path) -> None:
    """The line that reports a resume says where it goes on, and exact."""
    run(Job(), tmp_path / "work", kill_after=11)

    resumed = run(Job(), tmp_path / "work", resume=True)

    path = step_dir(resumed.folder, 11)
    lines = [text for text in resumed.messages if text.startswith("Resumed from")]
    assert lines == [f"Resumed from '{path}': epoch 1, batch 3, global_step 11: exact"]


@pytest.mark.parametrize(("before", "now"), [("v1", "v2"), ("v1", None), (None, "v2")])
def test_another_data_version_is_refused(before: str | None, now: str | None, tmp_path: Path) -> None:
    """DAT-21: the user's own name for the data counts, given or left out."""
    save_some(tmp_path / "ck", data_version=before)
    checkpoint = step_dir(tmp_path / "ck", 6)

    with pytest.raises(DataChangedError) as caught:
        resume(checkpoint, tmp_path, loader(), data_version=now)
    accepted = resume(checkpoint, tmp_path, loader(), data_version=now, allow="data_changed")

    assert (caught.value.field, caught.value.saved, caught.value.current) == ("data_version", before, now)
    assert len(accepted.rows) == 2


OTHER_LOADERS: dict[str, tuple[Any, int]] = {
    "two loaders": ([loader(), loader()], 2),
    "two loaders of another mode": (CombinedLoader([loader(), loader()], "max_size"), 2),
    "a list": ([torch.rand(4, 1)] * 8, 8),
}


@pytest.mark.parametrize("name", OTHER_LOADERS)
def test_another_number_of_loaders_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    """Which position would be whose is unknown; Lightning takes each element of a list for a loader."""
    data, num_loaders = OTHER_LOADERS[name]

    with pytest.raises(DataChangedError) as caught:
        resume(saved, tmp_path, data)

    assert (caught.value.field, caught.value.saved, caught.value.current) == (
        "number of training loaders",
        1,
        num_loaders,
    )
    assert saved_steps(tmp_path / "new") == []


@pytest.mark.parametrize("kill_after", [3, 8])
def test_lightning_does_not_warn_of_its_own_resume(kill_after: int, tmp_path: Path) -> None:
    """DAT-22: in mid-epoch and at its end, no "ended before the epoch ended" warning: our position is exact."""
    run(Job(), tmp_path / "work", kill_after=kill_after)

    resumed = run(Job(), tmp_path / "work", resume=True)

    assert resumed.places[0] == (kill_after // 8, kill_after % 8, kill_after)
    assert [text for text in resumed.messages if "ended before" in text or "not resumable" in text] == []


class DrawingItems(ToyItems):
    """Items that draw."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(1)


class ManyValidated(NotedToy):
    """May be validated on several loaders."""

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(("num_loaders", "name"), [(1, "the validation loader"), (2, "validation loader 1")])
def test_other_workers_of_a_validation_loader_are_told_as_such(
    num_loaders: int, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error and the accepted difference say which loader it is: the training loader is as it was."""

    def loaders(num_workers: int) -> list[Any]:
        plain = torch.utils.data.DataLoader(ToyItems(8), 4)
        return [plain] * (num_loaders - 1) + [torch.utils.data.DataLoader(DrawingItems(8), 4, num_workers=num_workers)]

    def fit(num_workers: int, folder: str, **keywords: Any) -> None:
        trainer = make_trainer(tmp_path, plugin(tmp_path / folder, **keywords), max_epochs=2)
        path = step_dir(tmp_path / "ck", 12) if folder != "ck" else None
        trainer.fit(ManyValidated(), loader(), loaders(num_workers), ckpt_path=path)

    fit(1, "ck")

    with pytest.raises(StateMismatchError) as caught:
        fit(0, "new")
    fit(0, "other", allow=("num_workers_changed",))

    verdict = [text for text in caplog.messages if text.startswith("Resumed from")][-1]
    assert verdict.endswith(f"NOT exact: num_workers: 1 → 0, items draw other random numbers ({name})")
    assert (caught.value.field, caught.value.saved, caught.value.current) == (f"num_workers of {name}", 1, 0)
