"""A data set's fingerprint: other content is found, the same content never refused, and nothing is read or moved."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from lightning_resume import RNGState
from lightning_resume.data import fingerprint as module
from lightning_resume.data.fingerprint import fingerprint, first_look, lasting_fingerprint


class Held(Dataset[Any]):
    """Holds what it is given; reading an item or asking for anything is an error."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("an item was read")

    def __len__(self) -> int:
        raise AssertionError("the length was asked for")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    @property
    def lazy(self) -> Any:
        raise AssertionError("a property was read")


class Sized(Held):
    """One that goes into a ConcatDataset."""

    def __len__(self) -> int:
        return 20


class Slotted(Dataset[Any]):
    """Has no `__dict__` for what it holds."""

    __slots__ = ("rows", "unset")

    def __init__(self, rows: Any) -> None:
        self.rows = rows


class Streamed(IterableDataset[Any]):
    """Cannot be iterated."""

    def __init__(self, shards: list[str]) -> None:
        self.shards = shards

    def __iter__(self) -> Any:
        raise AssertionError("it was iterated")


class Example:
    """An item of a user's class."""

    def __init__(self, text: str) -> None:
        self.text = text


@dataclass
class Settings:
    """What a data set may be configured by."""

    scale: float = 1.0
    classes: list[str] = field(default_factory=lambda: ["cat", "dog"])


def changed(values: Any, place: Any, value: Any) -> Any:
    """A copy with one element changed."""
    values = values.clone() if isinstance(values, torch.Tensor) else values.copy()
    values[place] = value
    return values


ROWS = torch.arange(60.0).reshape(20, 3)
BIG = np.zeros((400, 1000))
FILES = [(f"/data/cats/{number}.jpg", number % 2) for number in range(100)]
CHANGES: dict[str, tuple[Any, Any]] = {
    "a value in a tensor": (TensorDataset(ROWS), TensorDataset(changed(ROWS, (7, 1), -1.0))),
    "a label": (TensorDataset(ROWS, ROWS[:, 0]), TensorDataset(ROWS, changed(ROWS[:, 0], 19, 0.0))),
    "the order of rows": (TensorDataset(ROWS), TensorDataset(ROWS.flip(0))),
    "a dtype": (TensorDataset(ROWS), TensorDataset(ROWS.double())),
    "a shape": (TensorDataset(ROWS), TensorDataset(ROWS.reshape(20, 1, 3))),
    "bfloat16": (Held(rows=ROWS.bfloat16()), Held(rows=changed(ROWS, 0, 9.0).bfloat16())),
    "a transposed tensor": (Held(rows=ROWS.T), Held(rows=changed(ROWS, 3, 9.0).T)),
    "a large array": (Held(rows=BIG), Held(rows=changed(BIG, slice(100, 110), 1.0))),
    "the end of a large array": (Held(rows=BIG), Held(rows=changed(BIG, (-1, -1), 1.0))),
    "an array of objects": (Held(rows=np.array(["a", None], object)), Held(rows=np.array(["a", "b"], object))),
    "a dictionary of arrays": (Held(rows={"x": BIG[0], "y": ROWS}), Held(rows={"x": BIG[0], "y": ROWS + 1})),
    "a file": (Held(samples=FILES), Held(samples=[*FILES[:50], ("/data/cats/other.jpg", 0), *FILES[51:]])),
    "the class of a file": (Held(samples=FILES), Held(samples=[*FILES[:50], (FILES[50][0], 1), *FILES[51:]])),
    "a file more": (Held(samples=FILES), Held(samples=FILES[:-1])),
    "items": ([1, 2, 3], [1, 2, 4]),
    "items that are tensors": (list(ROWS.repeat(20, 1)), list(ROWS.repeat(20, 1).neg())),
    "a set": (Held(words={"a", "b"}), Held(words={"a", "c"})),
    "a deque": (Held(words=deque("abc")), Held(words=deque("abd"))),
    "bytes": (Held(data=b"abc"), Held(data=b"abd")),
    "an array.array": (Held(data=array("q", [1, 2])), Held(data=array("q", [1, 3]))),
    "a long text": (Held(text="to be or not " * 10_000), Held(text="to be or now " * 10_000)),
    "a short text": (Held(split="train"), Held(split="val")),
    "a number": (Held(scale=1.0), Held(scale=2.0)),
    "a flag": (Held(train=True), Held(train=False)),
    "a range": (range(0, 10), range(0, 20, 2)),
    "the indices of a subset": (Subset(TensorDataset(ROWS), [0, 1, 2]), Subset(TensorDataset(ROWS), [0, 1, 3])),
    "what a subset is of": (Subset(TensorDataset(ROWS), [0, 1]), Subset(TensorDataset(ROWS + 1), [0, 1])),
    "one of several data sets": (
        ConcatDataset([TensorDataset(ROWS), TensorDataset(ROWS)]),
        ConcatDataset([TensorDataset(ROWS), TensorDataset(ROWS + 1)]),
    ),
    "one of stacked data sets": (
        StackDataset(a=TensorDataset(ROWS), b=TensorDataset(ROWS)),
        StackDataset(a=TensorDataset(ROWS), b=TensorDataset(ROWS + 1)),
    ),
    "a dataclass inside": (Held(settings=Settings()), Held(settings=Settings(classes=["dog", "cat"]))),
    "a number in a dataclass": (Held(settings=Settings()), Held(settings=Settings(scale=2.0))),
    "an object in a list": (Held(rows=[Example("a"), Example("b")]), Held(rows=[Example("a"), Example("c")])),
    "slots": (Slotted([1, 2]), Slotted([1, 3])),
    "the shards of a stream": (Streamed(["a.tar", "b.tar"]), Streamed(["a.tar", "c.tar"])),
    "Hugging Face's own": (Held(_fingerprint="5f2a"), Held(_fingerprint="77d0")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_content_has_another_fingerprint(name: str) -> None:
    """Where two data sets of one class and length differ, a part that both have differs."""
    one, other = CHANGES[name]

    first, second = fingerprint(one), fingerprint(other)

    assert first.keys() == second.keys()
    assert len([path for path in first if first[path] != second[path]]) == 1


@pytest.mark.parametrize("name", CHANGES)
def test_looking_reads_no_item_moves_no_stream_and_changes_nothing(name: str) -> None:
    """Law 3: no item, length or property is asked for, no number drawn, no attribute set."""
    dataset = CHANGES[name][0]
    attributes = dict(getattr(dataset, "__dict__", {}))
    streams = RNGState.capture()

    first, second = fingerprint(dataset), fingerprint(dataset)

    assert first == second
    assert RNGState.capture() == streams
    now = getattr(dataset, "__dict__", {})
    assert list(now) == list(attributes) and all(now[name] is attributes[name] for name in now)


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_fingerprint import CHANGES, fingerprint
print(json.dumps({name: fingerprint(pair[0]) for name, pair in CHANGES.items()}))
"""


def test_every_process_finds_the_same_fingerprint() -> None:
    """No hash seed, address or order of a set is in it."""
    command = [sys.executable, "-c", SCRIPT, os.fspath(Path(__file__).parent)]
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]

    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for environment in environments
    ]
    outputs = [process.communicate()[0] for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("dataset.tensors.0") == 2


def test_the_parts_are_named_by_their_paths() -> None:
    """A difference can be told by the attribute that it is in."""
    dataset = Subset(StackDataset(TensorDataset(ROWS), Sized(scale=2, samples=FILES)), range(4))

    parts = fingerprint(dataset)

    assert {path: re.sub("[0-9a-f]{16}", "…", text) for path, text in parts.items()} == {
        "dataset.datasets.0.tensors.0": "float32 (20, 3) …",
        "dataset.datasets.1.scale": "= 2",
        "dataset.datasets.1.samples": "list of 100 …",
        "indices": "= range(0, 4)",
    }


def test_data_may_be_moved_as_a_whole() -> None:
    """A job that comes back elsewhere finds its files under another folder: they are the same files."""
    here = Held(samples=FILES, root="/data", path=Path("/data/cats"), url="s3://bucket/a")
    there = Held(
        samples=[(path.replace("/data", "/scratch/job 7"), label) for path, label in FILES],
        root="/scratch/job 7",
        path=Path("/scratch/job 7/cats"),
        url="s3://other/a",
    )

    assert fingerprint(here) == fingerprint(there)
    assert list(fingerprint(here)) == ["samples"]


def test_what_use_changes_is_not_kept() -> None:
    """Counters, caches and logs of reads are neither saved nor, where they are numbers, compared in this process."""
    dataset = Held(rows=ROWS, num_reads=0, cache={}, log=["begun"])
    first_look(dataset)
    dataset.__dict__.update(num_reads=5, cache={3: ROWS[3]}, log=["begun", "read 3"])

    kept, now = lasting_fingerprint(dataset), fingerprint(dataset)

    assert list(kept) == ["rows"]
    assert list(now) == ["rows", "cache.3", "log"]


def test_another_object_starts_from_its_own_first_look() -> None:
    """A number is compared with that of a data set built anew, though another object of the class has counted on."""
    used = Held(rows=ROWS, epoch=0)
    first_look(used)
    used.__dict__["epoch"] = 3
    fresh = Held(rows=ROWS, epoch=1)

    assert fingerprint(fresh)["epoch"] == "= 1"
    assert "epoch" not in fingerprint(used)


def test_data_that_was_changed_in_place_is_found_in_the_same_process() -> None:
    """Only numbers, texts and flags are excused by an earlier look at the object, not its data."""
    dataset = Held(rows=ROWS.clone())
    first_look(dataset)
    before = fingerprint(dataset)
    dataset.__dict__["rows"][3] = -1.0

    assert fingerprint(dataset) != before
    assert list(fingerprint(dataset)) == ["rows"]


def test_a_data_set_that_is_gone_is_forgotten() -> None:
    """A first look keeps no data set alive, and is not taken for that of another at the same place."""
    dataset = Held(rows=ROWS)
    first_look(dataset)
    key = id(dataset)
    was_known = key in module._first_parts

    del dataset

    assert (was_known, key in module._first_parts) == (True, False)


def test_what_says_nothing_of_the_data_is_left_out() -> None:
    """Models, functions, generators, private counters, empty containers and objects of unknown classes."""
    dataset = Held(
        model=torch.nn.Linear(1, 1),
        transform=len,
        rng=np.random.default_rng(0),
        random=random.Random(0),
        _position=3,
        cache={},
        lock=object(),
        locks=[object(), object()],
        models={"a": torch.nn.Linear(1, 1)},
        nothing=[None, None],
        kind=int,
        parent=None,
        rows=ROWS,
    )
    dataset.__dict__["itself"] = dataset

    assert list(fingerprint(dataset)) == ["rows"]


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.ones(3, dtype=torch.complex64).conj()],
    ids=["sparse", "meta", "conjugated"],
)
def test_of_an_unusual_tensor_kind_and_shape_are_compared(tensor: torch.Tensor) -> None:
    """What cannot be read cheaply is described."""
    parts = fingerprint(Held(rows=tensor))

    assert parts["rows"].startswith(f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} ")
    assert first_look(Held(rows=tensor)) is None


def test_a_memory_map_is_sampled_sparsely(tmp_path: Path) -> None:
    """Of a file on disk few pages are read; its first and last element are among them."""
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(100_000.0))
    before = fingerprint(Held(rows=np.load(path, mmap_mode="r")))
    np.save(path, changed(np.arange(100_000.0), -1, 0.0))

    after = fingerprint(Held(rows=np.load(path, mmap_mode="r")))

    assert before["rows"].startswith("float64 (100000,) ")
    assert before != after


def test_a_look_at_much_data_is_short() -> None:
    """Ten million numbers, a million files, labels and dictionary entries: under 50 ms of work."""
    number = 10**6
    dataset = Held(
        rows=torch.zeros(10 * number),
        samples=[("/data/a.jpg", 0)] * number,
        targets=[1] * number,
        names={index: "a" for index in range(number)},
        seen=set(range(number)),
        text="abc " * number,
    )

    started = time.thread_time()
    reason = first_look(dataset)
    seconds = time.thread_time() - started

    assert reason is None
    assert seconds < 0.05
    assert len(fingerprint(dataset)) == 6


def test_a_look_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no fingerprint, and the reason is told."""
    monkeypatch.setattr(module, "TIME_LIMIT_SECONDS", 0.0)
    dataset = Held(samples=FILES)

    assert first_look(dataset) == "a look at what it holds takes more than 0 ms of work"
    assert lasting_fingerprint(dataset) == {}


@pytest.mark.parametrize("dataset", [Held(), Held(num_items=5), iter([1, 2])], ids=["nothing", "number", "iterator"])
def test_a_data_set_that_holds_no_data_says_so(dataset: Any) -> None:
    """One that makes or opens its items when they are asked for has only numbers and texts to compare."""
    assert first_look(dataset) == "it holds no data that can be looked at without reading items"


class Named(Held):
    """Says itself what it is, and draws on the way."""

    def __fingerprint__(self) -> Any:
        random.random(), np.random.rand(), torch.rand(()), self.rng.random()
        return self.name() if callable(self.name) else self.name


def named(name: Any) -> Named:
    """A data set with a name, and with data that then is not looked at."""
    return Named(name=name, rows=ROWS, rng=random.Random(0))


def test_a_data_set_may_say_itself_what_it_is() -> None:
    """`__fingerprint__` takes the place of everything else, also inside a Subset; what it draws is taken back."""
    dataset = named("v1")
    streams, own = RNGState.capture(), dataset.rng.getstate()

    parts = fingerprint(dataset)

    assert parts == {"fingerprint": "'v1'"}
    assert fingerprint(Subset(dataset, [1])).keys() == {"dataset.fingerprint", "indices"}
    assert first_look(dataset) is None
    assert (RNGState.capture(), dataset.rng.getstate()) == (streams, own)


def test_a_long_name_is_shortened_to_a_digest() -> None:
    """The index of a checkpoint stays small; the last letter counts."""
    one, other = fingerprint(named("a" * 1000 + "b"))["fingerprint"], fingerprint(named("a" * 1001))["fingerprint"]

    assert (len(one), len(other)) == (32, 32)
    assert one != other


def fails() -> str:
    raise OSError("the manifest is gone")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (5, "its __fingerprint__() returned 5, not a str"),
        ("", "its __fingerprint__() returned '', not a str"),
        (fails, "its __fingerprint__() raised OSError('the manifest is gone')"),
    ],
    ids=["number", "empty", "error"],
)
def test_a_name_that_is_none_is_told(name: Callable[[], str] | object, reason: str) -> None:
    """A data set that fails to say what it is stops no training; the reason is told."""
    dataset = named(name)

    assert first_look(dataset) == reason
    assert fingerprint(dataset) == {}


def test_a_fingerprint_stays_small() -> None:
    """However many attributes and data sets there are, it has at most 32 parts of at most about 100 characters."""
    many = ConcatDataset([Sized(**{f"rows_{index}": [index] for index in range(50)}) for _ in range(100)])

    parts = fingerprint(many)

    assert len(parts) == 32
    assert max(len(path) + len(text) for path, text in parts.items()) < 100
