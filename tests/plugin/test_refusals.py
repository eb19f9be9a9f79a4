"""A run that is not the run of the save: refused before the first batch, by name; or accepted, by word, and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import NotedToy, make_trainer, plugin
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler
from toy import Job, ToyItems, run, saved_steps, step_dir

from lightning_resume import DataChangedError, read_checkpoint, verify_checkpoint, write_checkpoint
from lightning_resume.errors import MissingStateError, StateMismatchError, WorldSizeError

WORDS = (
    "accumulation_changed",
    "batch_size_changed",
    "cuda_devices_changed",
    "data_changed",
    "drop_last_changed",
    "precision_changed",
    "rng_missing",
    "sampler_changed",
)


class Rows(ToyItems):
    """The toy's items, held in a tensor, a file list and settings."""

    def __init__(self, num_items: int = 32, first: float = 0.0, scale: float = 1.0, name: str = "a") -> None:
        super().__init__(num_items)
        self.rows = torch.arange(float(num_items))
        self.rows[0] = first
        self.scale, self.names = scale, [f"{name}{index}" for index in range(num_items)]
        self.num_reads, self.cache = 0, {}

    def __getitem__(self, index: int) -> Tensor:
        self.num_reads += 1
        self.cache[index] = self.rows[index] * self.scale
        return self.cache[index].reshape(1)


def rows_loader(rows: Rows | None = None, **keywords: Any) -> DataLoader[Tensor]:
    return DataLoader(rows or Rows(), **{"batch_size": 4, "shuffle": True, **keywords})


class FirstOf(LightningDataModule):
    """Hands the toy the first loader's part of each batch."""

    def __init__(self, loaders: Any) -> None:
        super().__init__()
        self.loaders = loaders

    def train_dataloader(self) -> Any:
        return self.loaders

    def on_before_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> Tensor:
        return batch[0]


@dataclass(frozen=True)
class Case:
    """One difference between the saved run and the resumed one.

    Attributes:
        field, saved, current: of the error; the sides of a fingerprint are the beginnings of its texts.
        word: of `allow`.
        data: makes the data of the resumed run.
        before, now: Trainer keywords of the saved and of the resumed run.
        num_batches: that are trained in the rest of the epoch, where the difference is accepted.
        error: what it is refused with.
    """

    field: str
    saved: Any
    current: Any
    word: str
    data: Callable[[], Any] = rows_loader
    before: tuple[tuple[str, Any], ...] = ()
    now: tuple[tuple[str, Any], ...] = ()
    num_batches: int = 4
    error: type[StateMismatchError] = DataChangedError


def trainer_case(field: str, saved: Any, current: Any, word: str) -> Case:
    """A Trainer argument that differs."""
    return Case(
        field, saved, current, word, before=((field, saved),), now=((field, current),), error=StateMismatchError
    )


FINGERPRINT = "data set fingerprint"
CASES = {
    "length": Case("data set length", 32, 36, "data_changed", lambda: rows_loader(Rows(36)), num_batches=5),
    "content": Case(
        FINGERPRINT, "rows float32 (32,) ", "rows float32 (32,) ", "data_changed", lambda: rows_loader(Rows(first=9.0))
    ),
    "names": Case(
        FINGERPRINT, "names list of 32 ", "names list of 32 ", "data_changed", lambda: rows_loader(Rows(name="b"))
    ),
    "settings": Case(FINGERPRINT, "scale = 1.0", "scale = 2.0", "data_changed", lambda: rows_loader(Rows(scale=2.0))),
    "batch size": Case("batch_size", 4, 2, "batch_size_changed", lambda: rows_loader(batch_size=2), num_batches=12),
    "shuffle off": Case("shuffle", "on", "off", "sampler_changed", lambda: rows_loader(shuffle=False)),
    "drop_last": Case("drop_last", False, True, "drop_last_changed", lambda: rows_loader(drop_last=True)),
    "sampler": Case(
        "sampler",
        "RandomSampler",
        "WeightedRandomSampler",
        "sampler_changed",
        lambda: rows_loader(shuffle=False, sampler=WeightedRandomSampler(torch.ones(32), 32)),
    ),
    "sampler settings": Case(
        "sampler settings",
        "replacement = False",
        "replacement = True",
        "sampler_changed",
        lambda: rows_loader(shuffle=False, sampler=RandomSampler(Rows(), replacement=True)),
    ),
    "one more loader": Case(
        "number of training loaders", 1, 2, "data_changed", lambda: FirstOf([rows_loader(), rows_loader()])
    ),
    "accumulation": trainer_case("accumulate_grad_batches", 1, 2, "accumulation_changed"),
    "less accumulation": trainer_case("accumulate_grad_batches", 2, 1, "accumulation_changed"),
    "precision": trainer_case("precision", "32-true", "bf16-mixed", "precision_changed"),
    "double precision": trainer_case("precision", "32-true", "64-true", "precision_changed"),
    "single precision": trainer_case("precision", "64-true", "32-true", "precision_changed"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """Finds the checkpoint that a case resumes from: after 4 batches of 8."""
    checkpoints: dict[Any, Path] = {}

    def find(case: Case) -> Path:
        if case.before not in checkpoints:
            folder = tmp_path_factory.mktemp("saved")
            settings = dict(case.before)
            trainer = make_trainer(folder, plugin(folder / "ck"), max_epochs=1, **settings)
            trainer.fit(NotedToy(), rows_loader())
            checkpoints[case.before] = step_dir(folder / "ck", 4 // settings.get("accumulate_grad_batches", 1))
        return checkpoints[case.before]

    return find


def resume(checkpoint: Path, folder: Path, data: Any, allow: Any = (), *callbacks: Callback, **keywords: Any) -> Any:
    """Goes on from a checkpoint, for the rest of the epoch; returns the module and its Trainer's last step."""
    module = NotedToy()
    trainer = make_trainer(folder, plugin(folder / "new", allow=allow), *callbacks, **{"max_epochs": 1, **keywords})
    trainer.fit(module, data, ckpt_path=checkpoint)
    return module, trainer.global_step


def matches(found: Any, expected: Any) -> bool:
    return found.startswith(expected) if isinstance(expected, str) else bool(found == expected)


@pytest.mark.parametrize("name", CASES)
def test_a_difference_is_refused_by_name(
    name: str, saved: Callable[[Case], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field, both values and the one word that is missing; nothing is trained, no position entered, nothing saved."""
    case, read = CASES[name], []
    checkpoint = saved(case)
    monkeypatch.setattr(Rows, "__getitem__", lambda self, index: read.append(index))
    allow = [word for word in WORDS if word != case.word]

    with pytest.raises(StateMismatchError) as caught:
        resume(checkpoint, tmp_path, case.data(), allow, **dict(case.now))

    error = caught.value
    assert type(error) is case.error
    assert error.field == case.field
    assert matches(error.saved, case.saved) and matches(error.current, case.current)
    assert error.saved != error.current
    assert f"accept the difference with allow=({case.word!r},)." in str(error)
    assert (read, saved_steps(tmp_path / "new")) == ([], [])


@pytest.mark.parametrize("name", CASES)
def test_an_accepted_difference_is_told_and_training_goes_on(
    name: str, saved: Callable[[Case], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With its word in `allow` the run goes on at its batch, with what it was given; the verdict is NOT exact."""
    case = CASES[name]

    module, _ = resume(saved(case), tmp_path, case.data(), [case.word], **dict(case.now))

    assert [row["batch"] for row in module.rows] == list(range(4, 4 + case.num_batches))
    verdict = next(text for text in caplog.messages if text.startswith("Resumed from"))
    assert f"epoch 0, batch 4, global_step {module.rows[0]['step']}: NOT exact: {case.field}: " in verdict


def test_the_new_accumulation_factor_is_the_one_that_counts(saved: Callable[[Case], Path], tmp_path: Path) -> None:
    """What the user allowed is what is done: four batches more make two steps, or four, as configured now."""
    more, less = CASES["accumulation"], CASES["less accumulation"]

    _, last_of_more = resume(saved(more), tmp_path / "more", rows_loader(), [more.word], accumulate_grad_batches=2)
    _, last_of_less = resume(saved(less), tmp_path / "less", rows_loader(), [less.word])

    assert (last_of_more, last_of_less) == (4 + 2, 2 + 4)


def test_several_differences_are_refused_at_once(saved: Callable[[Case], Path], tmp_path: Path) -> None:
    """One error names all of them, and all the words."""
    data = rows_loader(Rows(first=9.0), batch_size=2, shuffle=False)

    with pytest.raises(DataChangedError) as caught:
        resume(saved(CASES["content"]), tmp_path, data, ["sampler_changed"], accumulate_grad_batches=2)

    assert caught.value.field == FINGERPRINT
    assert str(caught.value).splitlines()[-2:] == [
        "Also different: batch_size: 4 → 2; accumulate_grad_batches: 1 → 2.",
        "Resume with what was there at the save, or accept the differences with "
        "allow=('data_changed', 'batch_size_changed', 'accumulation_changed').",
    ]


def test_fewer_loaders_can_be_accepted(tmp_path: Path) -> None:
    """Those that are left go on where they stood."""
    first = NotedToy()
    trainer = make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1)
    trainer.fit(first, FirstOf([rows_loader(), rows_loader()]))

    module, _ = resume(step_dir(tmp_path / "ck", 4), tmp_path, rows_loader(), "data_changed")

    assert [row["items"] for row in module.rows] == [row["items"] for row in first.rows[4:]]


def pair(mode: str) -> FirstOf:
    return FirstOf(CombinedLoader([rows_loader(), rows_loader()], mode))


def test_another_mode_of_several_loaders_is_refused(tmp_path: Path) -> None:
    """How loaders take turns is part of the order; accepted, they go on in the new way."""
    make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1).fit(NotedToy(), pair("max_size_cycle"))
    checkpoint = step_dir(tmp_path / "ck", 4)

    with pytest.raises(DataChangedError) as caught:
        resume(checkpoint, tmp_path, pair("min_size"))
    module, _ = resume(checkpoint, tmp_path, pair("min_size"), "data_changed")

    error = caught.value
    assert (error.field, error.saved, error.current) == ("mode of the training loaders", "max_size_cycle", "min_size")
    assert len(module.rows) == 4


class Batches:
    """A loader that is no DataLoader."""

    def __init__(self) -> None:
        self.batches = [torch.full((4, 1), float(number)) for number in range(8)]

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


def test_another_kind_of_loader_can_be_accepted(saved: Callable[[Case], Path], tmp_path: Path) -> None:
    """An iterable of batches in a DataLoader's place begins at its start, since it has no place to go on from."""
    words = ["data_changed", "batch_size_changed", "sampler_changed"]

    module, _ = resume(saved(CASES["content"]), tmp_path, Batches(), words)

    assert [row["items"][0] for row in module.rows] == [0, 1, 2, 3]


# -- what is no difference ------------------------------------------------------------------------------------------


def test_what_a_data_set_changes_in_itself_is_no_difference(tmp_path: Path) -> None:
    """Counters and caches, in a new process or in this one with the same object, leave the resume exact."""
    rows = Rows()
    first = make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1)
    first.fit(NotedToy(), rows_loader(rows))

    again, _ = resume(step_dir(tmp_path / "ck", 0), tmp_path / "again", rows_loader(rows))
    fresh, _ = resume(step_dir(tmp_path / "ck", 4), tmp_path / "fresh", rows_loader())

    assert (len(again.rows), len(fresh.rows)) == (8, 4)
    identity = verify_checkpoint(step_dir(tmp_path / "ck", 4)).identity["loaders"][0]
    assert set(identity[FINGERPRINT]) == {"num_items", "rows", "scale", "names"}


def test_a_killed_run_on_held_data_is_resumed_exactly(tmp_path: Path) -> None:
    """Another process finds the same fingerprint."""
    job = Job(dataset=Rows, max_epochs=1)
    run(job, tmp_path, kill_after=5)

    resumed = run(job, tmp_path, resume=True)

    assert next(text for text in resumed.messages if text.startswith("Resumed from")).endswith(": exact")


SCHEDULE = {0: 1, 1: 2}


def test_a_schedule_of_factors_is_compared_as_configured(tmp_path: Path) -> None:
    """In an epoch in which a GradientAccumulationScheduler has changed the Trainer's factor, the resume is exact."""
    job = Job(callbacks=lambda: [GradientAccumulationScheduler(SCHEDULE)])
    run(job, tmp_path, kill_after=12)

    resumed = run(job, tmp_path, resume=True)

    assert next(text for text in resumed.messages if text.startswith("Resumed from")).endswith(": exact")
    assert resumed.places[0] == (1, 4, 10)


def test_another_schedule_of_factors_is_refused(tmp_path: Path) -> None:
    """The whole schedule counts, not the factor of the epoch in progress."""
    first = make_trainer(tmp_path, plugin(tmp_path / "ck"), GradientAccumulationScheduler(SCHEDULE), max_epochs=1)
    first.fit(NotedToy(), rows_loader())
    other = GradientAccumulationScheduler({0: 1, 1: 4})

    with pytest.raises(StateMismatchError) as caught:
        resume(step_dir(tmp_path / "ck", 4), tmp_path, rows_loader(), (), other)
    module, _ = resume(step_dir(tmp_path / "ck", 4), tmp_path, rows_loader(), "accumulation_changed", other)

    error = caught.value
    assert (error.saved, error.current) == ("1 from epoch 0, 2 from epoch 1", "1 from epoch 0, 4 from epoch 1")
    assert len(module.rows) == 4


class FreshEachEpoch(LightningDataModule):
    """Other rows in each epoch."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return rows_loader(Rows(first=float(self.trainer.current_epoch)))


def test_loaders_that_are_made_anew_for_the_next_epoch_are_not_compared_with_the_last_ones(tmp_path: Path) -> None:
    """A run that ended after an epoch goes on with the next epoch's data; in mid-epoch the data is compared."""
    keywords = {"reload_dataloaders_every_n_epochs": 1}
    make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1, **keywords).fit(NotedToy(), FreshEachEpoch())

    after, _ = resume(step_dir(tmp_path / "ck", 8), tmp_path, FreshEachEpoch(), max_epochs=2, **keywords)

    assert [(row["epoch"], row["batch"]) for row in after.rows] == [(1, batch) for batch in range(8)]
    with pytest.raises(DataChangedError, match=FINGERPRINT):
        resume(step_dir(tmp_path / "ck", 4), tmp_path, rows_loader(Rows(first=1.0)), **keywords)


# -- devices and streams --------------------------------------------------------------------------------------------


def rewritten(checkpoint: Path, path: Path, change: Callable[[dict[str, Any]], object], num_ranks: int = 1) -> Path:
    """Writes a checkpoint again, digests and all, with a changed rank state."""
    state = read_checkpoint(checkpoint, rank=0)
    rank_state = state.pop("rank_state")
    change(rank_state)
    counters = {**verify_checkpoint(checkpoint).counters, "world_size": num_ranks}
    write_checkpoint(path, state, rank_states=[rank_state] * num_ranks, counters=counters)
    return path


def on_two_devices(rank_state: dict[str, Any]) -> None:
    rank_state["rng"]["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 2
    rank_state["identity"]["number of CUDA devices"] = 2


def test_another_number_of_cuda_devices_is_refused(saved: Callable[[Case], Path], tmp_path: Path) -> None:
    """A save with two devices' streams is not resumed where there are none, unless that is allowed (faked)."""
    checkpoint = rewritten(saved(CASES["content"]), tmp_path / "two", on_two_devices)

    with pytest.raises(StateMismatchError) as caught:
        resume(checkpoint, tmp_path, rows_loader())
    module, _ = resume(checkpoint, tmp_path, rows_loader(), "cuda_devices_changed")

    error = caught.value
    assert (error.field, error.saved, error.current) == ("number of CUDA devices", 2, torch.cuda.device_count())
    assert "allow=('cuda_devices_changed',)" in str(error)
    assert len(module.rows) == 4


def test_devices_that_nobody_uses_do_not_matter(
    saved: Callable[[Case], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on the CPU goes on on a machine that has CUDA devices (faked)."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    module, _ = resume(saved(CASES["content"]), tmp_path, rows_loader(), accelerator="cpu")

    assert len(module.rows) == 4


@pytest.mark.parametrize("name", ["python", "numpy", "torch", "cuda"])
def test_a_missing_stream_can_be_accepted(
    name: str, saved: Callable[[Case], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RNG-11: refused with the word that lets it pass; with it, the stream goes on as it stands, and that is told."""
    checkpoint = rewritten(saved(CASES["content"]), tmp_path / "less", lambda state: state["rng"].pop(name))

    with pytest.raises(MissingStateError) as caught:
        resume(checkpoint, tmp_path, rows_loader(), [word for word in WORDS if word != "rng_missing"])
    module, _ = resume(checkpoint, tmp_path, rows_loader(), "rng_missing")

    assert caught.value.field == f"random stream {name!r}"
    assert "allow=('rng_missing',)" in str(caught.value)
    assert len(module.rows) == 4
    verdict = next(text for text in caplog.messages if text.startswith("Resumed from"))
    assert verdict.endswith(f"NOT exact: random stream {name!r}: absent")


def test_another_number_of_processes_is_refused(saved: Callable[[Case], Path], tmp_path: Path) -> None:
    """DDP-04: a checkpoint of two ranks is refused at the start of a run with one, whatever is allowed."""
    checkpoint = rewritten(saved(CASES["content"]), tmp_path / "two", lambda state: None, num_ranks=2)

    with pytest.raises(WorldSizeError) as caught:
        resume(checkpoint, tmp_path, rows_loader(), WORDS)

    assert (caught.value.saved, caught.value.current) == (2, 1)
    assert saved_steps(tmp_path / "new") == []


# -- what cannot be compared ----------------------------------------------------------------------------------------


class Unnamed(ToyItems):
    """Fails to say what it is."""

    def __fingerprint__(self) -> str:
        raise OSError("the manifest is gone")


class Renamed(ToyItems):
    """Says what it is."""

    name = "v1"

    def __fingerprint__(self) -> str:
        return self.name


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (ToyItems, "it holds no data that can be looked at without reading items"),
        (Unnamed, "its __fingerprint__() raised OSError('the manifest is gone')"),
    ],
)
def test_data_without_a_fingerprint_is_told_once(dataset: Callable[[int], Any], reason: str, tmp_path: Path) -> None:
    """At the start of training, with the data set's class, the reason and the remedy; and training goes on."""
    job = Job(dataset=dataset, trainer={"reload_dataloaders_every_n_epochs": 1}, num_val_items=8)

    trained = run(job, tmp_path)

    name = dataset.__name__
    told = [text for text in trained.messages if "__fingerprint__() that returns a str" in text]
    assert told == [
        f"A resume compares the type and length of the data set {name}, not its content: {reason}. "
        "Give it a method __fingerprint__() that returns a str, or pass data_version=..."
    ]
    assert len(trained.batches) == 16


def test_nothing_is_told_of_data_that_has_a_fingerprint(tmp_path: Path) -> None:
    """Held data, and data that says itself what it is."""
    runs = [run(Job(dataset=dataset, max_epochs=1), tmp_path / dataset.__name__) for dataset in (Rows, Renamed)]

    assert [text for trained in runs for text in trained.messages if "__fingerprint__" in text] == []


def test_a_data_sets_own_fingerprint_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own `__fingerprint__` refuses what only the user can tell apart."""
    make_trainer(tmp_path, plugin(tmp_path / "ck"), max_epochs=1).fit(NotedToy(), DataLoader(Renamed(), 4))
    monkeypatch.setattr(Renamed, "name", "v2")

    with pytest.raises(DataChangedError) as caught:
        resume(step_dir(tmp_path / "ck", 4), tmp_path, DataLoader(Renamed(), 4))

    assert (caught.value.saved, caught.value.current) == ("fingerprint 'v1'", "fingerprint 'v2'")
