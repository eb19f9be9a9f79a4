"""`item_rng="positional"`: order and items follow from (seed, epoch, position), whoever reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from inprocess import NotedToy, Stop, StopAfter, make_trainer, plugin
from lightning.pytorch import LightningDataModule
from scenarios.parts import WORKERS, Buckets, Items, Module, Scenario, ValidatedModule, digest, join, loader, scenario
from scenarios.running import Record, run
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler
from toy import Toy, ToyItems

from lightning_resume.errors import StateMismatchError, UnsupportedSetupError
from lightning_resume.plugin.positional import verdict

POSITIONAL = {"item_rng": "positional", "keep_last_k": 100}
TOLERANCE = 1e-6  # of a loss whose terms are summed by another number of processes, and so in another order


class Drawing(Module):
    """Draws from all streams in each step, for a batch of any size."""

    def __init__(self) -> None:
        super().__init__(net=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1)))


class Listed(Module):
    """Tells the items of each batch one by one; without dropout, batch norm or noise of its own."""

    def __init__(self) -> None:
        super().__init__(net=lambda: nn.Linear(6, 1))

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        numbers, features = join(batch)
        self.data_digest = [[int(n), digest(row)] for n, row in zip(numbers, features, strict=True)]
        return numbers, features


def job(data: Any = None, *, num_workers: int = 0, batch_size: int = 4, ddp: int = 1, **rest: Any) -> Scenario:
    """24 items, three epochs, by position; the module draws from all streams unless `rest` brings another."""
    workers = {"num_workers": num_workers, **({"prefetch_factor": 3} if num_workers else {})}
    data = data or (lambda **k: loader(Items(), shuffle=True, batch_size=batch_size, **k))
    return scenario(lambda _: data(**workers), ddp=ddp, plugin=POSITIONAL, **rest)


ORDERS = {
    "shuffled": lambda **k: loader(Items(), shuffle=True, **k),
    "draws_batch_by_batch": lambda **k: loader(Items(), batch_sampler=Buckets(), **k),
    "own_generator": lambda **k: loader(
        Items(), sampler=RandomSampler(Items(), replacement=True, generator=torch.Generator().manual_seed(3)), **k
    ),
    "weighted": lambda **k: loader(Items(), sampler=WeightedRandomSampler(range(1, 25), 24), **k),
    "not_batched": lambda **k: loader(Items(8), shuffle=True, batch_size=None, **k),
}


@pytest.mark.parametrize("order", ["shuffled", "weighted", "not_batched"])
def test_workers_change_nothing(order: str, tmp_path: Path) -> None:
    """Without workers, with two, and with two that outlive the epoch, a run is the same to the last bit."""
    runs = [
        run(scenario(lambda _, k=k: ORDERS[order](**k), plugin=POSITIONAL, module_class=Drawing), tmp_path / name)
        for name, k in WORKERS.items()
    ]

    assert len(runs[0]) > 30
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("order", "before", "after"),
    [("shuffled", 0, 3), ("shuffled", 2, 0), ("draws_batch_by_batch", 2, 1), ("own_generator", 0, 2)],
)
def test_a_resume_may_have_other_workers(order: str, before: int, after: int, tmp_path: Path) -> None:
    """Killed with some workers and resumed with another number, all is equal: items, losses, weights, streams."""
    baseline = run(job(ORDERS[order]), tmp_path / "base")

    run(job(ORDERS[order], num_workers=before), tmp_path / "work", kill_at=(0, 3))
    middle = run(job(ORDERS[order], num_workers=after), tmp_path / "work", resume=True, kill_at=(1, 4))
    last = run(job(ORDERS[order], num_workers=before), tmp_path / "work", resume=True)

    assert continues(baseline, middle, first=(0, 3), last=(1, 4))
    assert continues(baseline, last, first=(1, 4))


def test_other_workers_resume_at_an_epoch_end_and_in_a_cycle(tmp_path: Path) -> None:
    """The shorter loader of a cycle is at its second turn; it comes back at that turn, with other items than before."""

    def cycle(**k: Any) -> Any:
        return [loader(Items(), shuffle=True, **k), loader(Items(10), shuffle=True, batch_size=4, **k)]

    baseline = run(job(cycle, num_workers=2), tmp_path / "base")
    run(job(cycle), tmp_path / "work", kill_at=(0, 4))
    middle = run(job(cycle, num_workers=2), tmp_path / "work", resume=True, kill_at=(1, 0))
    last = run(job(cycle, num_workers=1), tmp_path / "work", resume=True)

    assert continues(baseline, middle, first=(0, 4), last=(1, 0))
    assert continues(baseline, last, first=(1, 0))


def test_validation_items_are_positional_too(tmp_path: Path) -> None:
    """Validation in mid-epoch draws the same items at each resume, with any workers, and other ones each time."""

    def validated(num_workers: int) -> Scenario:
        val_loaders = {"val_loaders": lambda: loader(Items(8), num_workers=num_workers)}
        return job(
            num_workers=num_workers,
            module_class=ValidatedModule,
            module=val_loaders,
            trainer={"val_check_interval": 2},
        )

    baseline = run(validated(0), tmp_path / "base")
    run(validated(2), tmp_path / "work", kill_at=(1, 3))
    last = run(validated(1), tmp_path / "work", resume=True)

    assert continues(baseline, last, first=(1, 3))


def test_loaders_that_are_reloaded_keep_the_runs_seed(tmp_path: Path) -> None:
    """A loader made in a later epoch has that epoch's order, in a resumed run too; the epochs differ."""

    def reloaded(**rest: Any) -> Scenario:
        return job(module_class=Listed, trainer={"reload_dataloaders_every_n_epochs": 1}, **rest)

    baseline = run(reloaded(), tmp_path / "base")
    run(reloaded(), tmp_path / "work", kill_at=(1, 3))
    last = run(reloaded(num_workers=2), tmp_path / "work", resume=True)

    assert continues(baseline, last, first=(1, 3))
    assert len({str(record["data"]) for record in batches(baseline)}) == 18


class Dealt(LightningDataModule):
    """Global batches of 8, dealt out to the ranks by samplers of the user's own; in order, or shuffled by its seed."""

    def __init__(self, *, shuffle: bool, **workers: Any) -> None:
        super().__init__()
        self.shuffle, self.workers = shuffle, workers

    def train_dataloader(self) -> Any:
        ranks = self.trainer.world_size
        sampler = DistributedSampler(Items(48), ranks, self.trainer.global_rank, shuffle=self.shuffle, seed=5)
        return loader(Items(48), sampler=sampler, batch_size=8 // ranks, **self.workers)


def ranked(kind: str, num_ranks: int, **workers: Any) -> Scenario:
    """48 items in global batches of 8, dealt out by Lightning or by the user."""
    return scenario(
        lambda _: (
            loader(Items(48), shuffle=True, batch_size=8 // num_ranks, **workers)
            if kind == "lightning"
            else Dealt(shuffle=kind == "own_shuffled", **workers)
        ),
        ddp=num_ranks,
        plugin=POSITIONAL,
        module_class=Listed,
        trainer={"use_distributed_sampler": kind == "lightning"},
    )


@pytest.mark.parametrize(
    ("kind", "ranks", "others"),
    [("lightning", 2, 1), ("lightning", 1, 2), ("own_shuffled", 2, 1), ("own_in_order", 1, 2)],
)
def test_a_resume_may_have_other_ranks(kind: str, ranks: int, others: int, tmp_path: Path) -> None:
    """Killed on 2 processes and resumed on 1 with twice the batch size, and the reverse: the same global batches.

    Each has the same members, with the same values. The losses are those of the uninterrupted run within 1e-6: the
    mean over a global batch is summed in another order.
    """
    baseline = run(ranked(kind, ranks), tmp_path / "base")
    run(ranked(kind, ranks), tmp_path / "work", kill_at=(0, 3))
    middle = run(ranked(kind, others, num_workers=2), tmp_path / "work", resume=True, kill_at=(1, 4))
    last = run(ranked(kind, ranks), tmp_path / "work", resume=True)

    expected = global_batches(baseline)
    assert len(expected) == 18
    assert all(len({number for number, _ in members}) == 8 for members, _ in expected.values())
    for resumed, first, end in ((middle, (0, 3), (1, 3)), (last, (1, 4), (2, 5))):
        found = global_batches(resumed)
        assert {place for place in expected if first <= place <= end} <= set(found)
        assert all(found[place][0] == expected[place][0] for place in found if place <= end)
        assert max(abs(found[place][1] - expected[place][1]) for place in found if place <= end) <= TOLERANCE


def test_ranks_with_other_workers_are_equal_to_the_last_bit(tmp_path: Path) -> None:
    """As many processes as before, each with other workers: every rank's items, losses and streams are the same."""
    baseline = run(job(ddp=2, module_class=Drawing), tmp_path / "base")
    run(job(ddp=2, module_class=Drawing), tmp_path / "work", kill_at=(1, 1))

    resumed = run(job(ddp=2, module_class=Drawing, num_workers=1), tmp_path / "work", resume=True)

    for rank in range(2):
        expected, found = ([record for record in records if record["rank"] == rank] for records in (baseline, resumed))
        assert continues(expected, found, first=(1, 1))


def test_a_loader_in_order_that_lightning_shuffles_on_two_ranks_is_refused(tmp_path: Path) -> None:
    """Lightning shuffles the training data of several processes whatever the loader says; that is another order."""

    def in_order(**rest: Any) -> Scenario:
        return job(lambda **k: loader(Items(48), batch_size=8 // rest.get("ddp", 1), **k), **rest)

    run(in_order(), tmp_path, kill_at=(0, 1))

    with pytest.raises(AssertionError, match=r"(?s)shuffle.*saved: +off.*current: +on"):
        run(in_order(ddp=2), tmp_path, resume=True)


def test_another_global_batch_is_refused(tmp_path: Path) -> None:
    """Another number of ranks has to share the same global batches."""
    run(job(ddp=2), tmp_path, kill_at=(0, 1))

    with pytest.raises(AssertionError, match=r"(?s)batch.*saved: +8.*current: +4"):
        run(job(), tmp_path, resume=True)


def test_a_batch_sampler_of_ones_own_cannot_change_ranks(tmp_path: Path) -> None:
    """What one process's own batch sampler does says nothing about two."""
    data = ORDERS["draws_batch_by_batch"]
    run(job(data), tmp_path, kill_at=(0, 3))

    with pytest.raises(AssertionError, match="number of processes differs"):
        run(job(data, ddp=2, trainer={"use_distributed_sampler": False}), tmp_path, resume=True)


def test_without_positions_another_world_size_is_refused(tmp_path: Path) -> None:
    """A checkpoint whose items were drawn by PyTorch's rules stays with its number of processes."""
    stock = scenario(plugin={})
    run(stock, tmp_path, kill_at=(0, 3))

    with pytest.raises(AssertionError, match=r"(?s)WorldSizeError.*saved: +1.*current: +2"):
        run(job(ddp=2), tmp_path, resume=True)


def test_the_other_item_rng_is_refused(tmp_path: Path) -> None:
    """A run cannot change how its items are drawn; nothing is restored."""
    items = DataLoader(ToyItems(32), 4, shuffle=True)
    make_trainer(tmp_path, plugin(tmp_path), max_epochs=1).fit(Toy(), items)

    with pytest.raises(StateMismatchError) as refusal:
        make_trainer(tmp_path, plugin(tmp_path, item_rng="positional")).fit(Toy(), items, ckpt_path="last")

    assert (refusal.value.field, refusal.value.saved, refusal.value.current) == ("item_rng", "stock", "positional")
    assert refusal.value.remedy == "Pass item_rng='stock'."


class Endless(IterableDataset[Tensor]):
    """Without positions."""

    def __iter__(self) -> Any:
        return iter([torch.zeros(1)] * 8)


class Batches:
    """A loader that is none of torch's."""

    def __iter__(self) -> Any:
        return iter([torch.zeros(4, 1)] * 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (DataLoader(Endless(), 4), "Endless is an iterable data set"),
        (Batches(), "Batches is no DataLoader"),
    ],
)
def test_data_without_positions_is_refused_at_fit_start(data: Any, reason: str, tmp_path: Path) -> None:
    """The refusal names the loader and the reason, before the first batch."""
    with pytest.raises(UnsupportedSetupError) as refusal:
        make_trainer(tmp_path, plugin(tmp_path, item_rng="positional")).fit(Toy(), data)

    assert reason in (refusal.value.reason or "")
    assert 'item_rng="positional"' in refusal.value.setup and type(data).__name__.lower() in str(refusal.value).lower()
    assert not list(tmp_path.glob("step-*"))


def test_an_unknown_item_rng_is_refused(tmp_path: Path) -> None:
    """There are two."""
    with pytest.raises(ValueError, match="item_rng must be 'stock' or 'positional', got 'random'"):
        plugin(tmp_path, item_rng="random")


def test_the_verdict_says_what_another_world_size_changes() -> None:
    """The line that tells of the resume says that order and items are exact, and what is not."""
    assert verdict([], 2, 2) == "exact"
    assert verdict([], 2, 1) == (
        "exact order and items; other world size (2 → 1): per-rank streams (dropout) and running means differ"
    )
    assert verdict(["x"], 1, 1) == "NOT exact: x"
    assert verdict(["x"], 1, 2).startswith("NOT exact: x; other world size (1 → 2)")


def test_the_verdict_of_a_resume_names_another_world_size(tmp_path: Path) -> None:
    """Before the first batch one line says what is exact and what is not."""
    two = {"devices": 2, "strategy": "ddp_fork"}
    toy.run(toy.Job(plugin=POSITIONAL, batch_size=8), tmp_path, kill_after=2)

    resumed = toy.run(toy.Job(plugin=POSITIONAL, batch_size=4, trainer=two), tmp_path, resume=True)

    told = [message for message in resumed.messages if message.startswith("Resumed from")]
    assert len(told) == 1 and told[0].endswith(
        "epoch 0, batch 2, global_step 2: exact order and items; other world size (1 → 2): per-rank streams (dropout) "
        "and running means differ"
    )


# -- comparing ---------------------------------------------------------------------------------------------------------


def batches(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "batch"]


def continues(
    baseline: Sequence[Record], resumed: Sequence[Record], first: tuple[int, int], last: tuple[int, int] | None = None
) -> bool:
    """Whether all that `resumed` recorded is what `baseline` recorded from its batch `first` on, up to `last`."""
    places = {(r["epoch"], r["batch"]): index for index, r in enumerate(baseline) if r["kind"] == "batch"}
    end = len(baseline) if last is None else places[last] + 1
    begin = end - len(resumed)
    return begin <= places[first] and list(resumed) == list(baseline[begin:end])


def global_batches(records: Sequence[Record]) -> dict[tuple[int, int], tuple[list[Any], float]]:
    """(epoch, batch) → the members of all ranks' batches, sorted, and the mean loss."""
    shares: dict[tuple[int, int], list[Record]] = {}
    for record in batches(records):
        shares.setdefault((record["epoch"], record["batch"]), []).append(record)
    return {
        place: (
            sorted(tuple(item) for record in share for item in record["data"]),
            sum(float.fromhex(record["loss"]) for record in share) / len(share),
        )
        for place, share in shares.items()
    }


class Lazy(DataLoader[Any]):
    """A loader that makes its iterator with its first batch."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


@pytest.mark.parametrize(("loader_class", "item_rng"), [(DataLoader, "positional"), (Lazy, "stock")])
def test_a_run_that_goes_on_elsewhere_may_be_killed_at_once(loader_class: Any, item_rng: str, tmp_path: Path) -> None:
    """What it saves before its first batch has the place in the epoch."""

    def fit(folder: str, ckpt_path: Any, *callbacks: Any, every: int) -> NotedToy:
        torch.manual_seed(1)
        module = NotedToy()
        own = plugin(tmp_path / folder, every_n_train_steps=every, item_rng=item_rng, save_on_exception=False)
        trainer = make_trainer(tmp_path, own, *callbacks, max_epochs=1)
        data = loader_class(ToyItems(32), 4, shuffle=True)
        try:
            trainer.fit(module, data, ckpt_path=ckpt_path)
        except Stop:
            assert callbacks
        return module

    whole = fit("first", None, every=1)

    fit("second", tmp_path / "first" / "step-00000003", StopAfter(1), every=100)
    resumed = fit("second", "last", every=100)

    assert len(whole._rows) == 8
    assert resumed._rows == whole._rows[3:]
