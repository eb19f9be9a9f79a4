"""Round trips of random states, of a real training state, and what a fresh process with another seed reads."""

from __future__ import annotations

import pickle
import random
import string
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_resume.errors import MissingStateError, UnsupportedStateError
from lightning_resume.format.checkpoint import read_checkpoint, verify_checkpoint, write_checkpoint
from lightning_resume.format.tensors import FILE_DTYPES

DTYPES = [dtype for dtype in FILE_DTYPES if not dtype.is_floating_point or dtype.itemsize > 1]


class Maker:
    """Makes random states of everything that can be saved."""

    def __init__(self, seed: int) -> None:
        """Starts a stream of its own."""
        self.random = random.Random(seed)
        self.made: list[torch.Tensor] = []

    def text(self) -> str:
        """A short text, at times with characters that JSON or file systems dislike."""
        alphabet = string.ascii_letters + '._-/\\"$ \0é😀\ud83d\ude00'
        return "".join(self.random.choice(alphabet) for _ in range(self.random.randrange(8)))

    def scalar(self) -> Any:
        """A hashable value without parts."""
        return self.random.choice(
            [
                lambda: None,
                lambda: self.random.random() < 0.5,
                lambda: self.random.randrange(-(10**3), 10**3),
                lambda: self.random.getrandbits(self.random.randrange(1, 200)) * self.random.choice([-1, 1]),
                lambda: self.random.choice([0.0, -0.0, float("inf"), self.random.gauss(0, 1) * 10.0**40]),
                lambda: complex(self.random.random(), -0.0),
                self.text,
                lambda: self.random.randbytes(self.random.choice([0, 3, 2000])),
                lambda: timedelta(microseconds=self.random.randrange(10**9)),
                lambda: Decimal(self.random.randrange(10**9)).scaleb(-5),
                lambda: np.float32(self.random.random()),
                lambda: np.int64(self.random.randrange(10)),
                lambda: self.random.choice(DTYPES),
                lambda: torch.Size([self.random.randrange(4)]),
            ]
        )()

    def tensor(self) -> torch.Tensor:
        """A tensor of a random kind; now and then one that was made before."""
        if self.made and self.random.random() < 0.2:
            return self.random.choice(self.made)
        shape = [self.random.randrange(4) for _ in range(self.random.randrange(4))]
        generator = torch.Generator().manual_seed(self.random.randrange(2**30))
        tensor = torch.randint(0, 2, shape, generator=generator).to(self.random.choice(DTYPES))
        if tensor.dim() > 1 and self.random.random() < 0.5:
            tensor = tensor.transpose(0, -1)
        self.made.append(tensor)
        return tensor

    def key(self) -> Any:
        """A key: a scalar, or a tuple of two."""
        key = self.scalar()
        return (key, self.scalar()) if self.random.random() < 0.2 else key

    def value(self, depth: int) -> Any:
        """Any value, with at most `depth` levels below it."""
        if depth == 0 or self.random.random() < 0.2:
            return self.scalar() if self.random.random() < 0.6 else self.tensor()
        items = [self.value(depth - 1) for _ in range(self.random.randrange(5))]
        pairs = [(self.key(), item) for item in items]
        return self.random.choice(
            [
                lambda: items,
                lambda: tuple(items),
                lambda: dict(pairs),
                lambda: {self.text(): item for item in items},
                lambda: OrderedDict(pairs),
                lambda: defaultdict(list, pairs),
                lambda: Counter({key: 1 for key, _ in pairs}),
                lambda: deque(items, maxlen=self.random.choice([None, 9])),
                lambda: {self.scalar() for _ in items},
                lambda: np.array([self.random.random() for _ in items], dtype=">f4"),
                lambda: [self.random.random() for _ in range(600)],
            ]
        )()


@pytest.mark.parametrize("seed", range(60))
def test_a_random_state_comes_back_exactly(seed: int, tmp_path: Path, same: Any) -> None:
    """Whatever is put together of what can be saved comes back equal in value, type, order and sharing."""
    maker = Maker(seed)
    state = {name: maker.value(5) for name in ("callbacks", "optimizer_states", "loops")}
    state["state_dict"] = {maker.text(): maker.tensor() for _ in range(8)}
    rank_states = [{"rank": maker.value(3)} for _ in range(maker.random.randrange(3))]

    index = write_checkpoint(
        tmp_path / "c", state, rank_states=rank_states, max_shard_bytes=maker.random.choice([1, 50, 10**6])
    )
    result = read_checkpoint(tmp_path / "c")

    assert verify_checkpoint(tmp_path / "c") == index
    assert same(result, state)
    for rank, rank_state in enumerate(rank_states):
        assert same(read_checkpoint(tmp_path / "c", keys=(), rank=rank), {"rank_state": rank_state})


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_byte_anywhere_never_passes(seed: int, tmp_path: Path) -> None:
    """One random byte of one random file: a typed error, from reading as from verifying."""
    from lightning_resume.errors import CheckpointError

    generator = random.Random(seed)
    maker = Maker(seed)
    state = {"state_dict": {"w": torch.ones(9)}, "x": maker.value(4)}
    write_checkpoint(tmp_path / "c", state, rank_states=[{"r": torch.ones(3)}])
    file = generator.choice(sorted((tmp_path / "c").iterdir()))
    data = bytearray(file.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    file.write_bytes(data)

    for look in (lambda: read_checkpoint(tmp_path / "c", rank=0), lambda: verify_checkpoint(tmp_path / "c")):
        with pytest.raises(CheckpointError) as caught:
            look()
        assert caught.value.path == str(tmp_path / "c")


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "LBFGS", "Adagrad", "RMSprop", "NAdam"])
def test_an_optimizer_goes_on_as_if_it_had_never_stopped(optimizer: str, tmp_path: Path, same: Any) -> None:
    """Int keys, tuples, step tensors and closures' lists: with JSON's keys Adam would drop its moments silently."""

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    whole, first, second = make(), make(), make()
    train(*whole, range(6))
    train(*first, range(3))

    write_checkpoint(tmp_path / "c", {"state_dict": first[0].state_dict(), "optimizer_states": [first[1].state_dict()]})
    state = read_checkpoint(tmp_path / "c")
    second[0].load_state_dict(state["state_dict"])
    second[1].load_state_dict(state["optimizer_states"][0])
    train(*second, range(3, 6))

    assert all(torch.equal(*pair) for pair in zip(whole[0].parameters(), second[0].parameters(), strict=True))
    assert same(second[1].state_dict(), whole[1].state_dict())


def test_random_streams_survive(tmp_path: Path) -> None:
    """python's tuple of 625 numbers, numpy's dict and array, torch's bytes, a generator's 128-bit ints."""
    generator = np.random.default_rng(0)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "own": generator.bit_generator.state,
    }

    write_checkpoint(tmp_path / "c", {}, rank_states=[state])
    expected = (random.random(), np.random.rand(), torch.rand(1), generator.random())
    result = read_checkpoint(tmp_path / "c", rank=0)["rank_state"]
    random.setstate(result["python"])
    np.random.set_state(result["numpy"])
    torch.set_rng_state(result["torch"])
    other = np.random.default_rng(99)
    other.bit_generator.state = result["own"]

    assert (random.random(), np.random.rand(), torch.rand(1), other.random()) == expected


def test_each_rank_reads_its_own_state(tmp_path: Path) -> None:
    """Rank 0's random streams on all ranks is the classic fault."""
    ranks = [{"rng": torch.full((3,), rank), "rank": rank} for rank in range(3)]

    index = write_checkpoint(tmp_path / "c", {"a": 1}, rank_states=ranks)
    results = [read_checkpoint(tmp_path / "c", rank=rank) for rank in range(3)]

    assert index.num_ranks == 3
    assert [result["rank_state"]["rank"] for result in results] == [0, 1, 2]
    assert all(torch.equal(result["rank_state"]["rng"], ranks[n]["rng"]) for n, result in enumerate(results))
    assert "rank_state" not in read_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_without_a_state_is_refused(rank: int, tmp_path: Path) -> None:
    """Told with the number of those that have one."""
    write_checkpoint(tmp_path / "c", {"a": 1}, rank_states=[{}, {}])

    with pytest.raises(MissingStateError, match="2 ranks") as caught:
        read_checkpoint(tmp_path / "c", rank=rank)

    assert f"rank {rank}" in caught.value.field


def test_the_key_of_the_rank_state_is_reserved(tmp_path: Path) -> None:
    """Otherwise one would hide the other."""
    with pytest.raises(UnsupportedStateError) as caught:
        write_checkpoint(tmp_path / "c", {"rank_state": 1}, rank_states=[{}])

    assert caught.value.key_path == "rank_state"


def test_no_pickle_is_written_or_read(tmp_path: Path, monkeypatch: Any) -> None:
    """Neither on the way to disk nor back, whatever the state holds; nothing on disk has a pickle's name."""

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(np, "load", refuse)
    maker = Maker(0)

    write_checkpoint(
        tmp_path / "c",
        {"state_dict": {"w": torch.ones(1)}, "x": maker.value(6)},
        rank_states=[{"r": random.getstate()}],
    )
    result = read_checkpoint(tmp_path / "c", rank=0)

    assert result["rank_state"]["r"] == random.getstate()
    assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".json", ".safetensors"}


def test_another_process_reads_the_same(tmp_path: Path) -> None:
    """Nothing depends on this process: its hash seed, its objects, its order of imports."""
    write_checkpoint(tmp_path / "c", {"a": {1, "x", (2, 3)}, "b": {None: torch.arange(3)}, "c": np.float32(0.1)})
    code = (
        "import sys; from lightning_resume.format.checkpoint import read_checkpoint;"
        "s = read_checkpoint(sys.argv[1]);"
        "print(s['a'] == {1, 'x', (2, 3)}, s['b'][None].tolist(), repr(s['c']))"
    )

    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )

    assert result.stdout.split("\n")[0] == f"True [0, 1, 2] {np.float32(0.1)!r}"


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two saves of one state differ in nothing but the moment in the index: digests can be compared."""
    maker = Maker(7)
    state = {"state_dict": {"w": torch.ones(3)}, "x": maker.value(4)}

    first = write_checkpoint(tmp_path / "a", state)
    second = write_checkpoint(tmp_path / "b", state)

    assert first.files == second.files
