"""Reading: the quick ways give what the plain ones give, bit for bit, and refuse what they refuse."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_resume.errors import CorruptCheckpointError
from lightning_resume.format import shards
from lightning_resume.format.checkpoint import read_checkpoint, write_checkpoint
from lightning_resume.format.contained import CheckpointFiles
from lightning_resume.format.header import DTYPE_BYTES, build_header
from lightning_resume.format.index import FileEntry
from lightning_resume.format.strict_json import parse_json
from lightning_resume.format.tensors import TORCH_DTYPES


def read_file(path: Path, tensors: list[tuple[str, str, tuple[int, ...]]], data: bytes) -> dict[str, torch.Tensor]:
    """Writes a shard by hand, and reads it with a check of its digest."""
    content = build_header(tensors, {}) + data
    (path / "model.safetensors").write_bytes(content)
    files = CheckpointFiles(path, path)
    try:
        entry = FileEntry(len(content), hashlib.sha256(content).hexdigest())
        return shards.read_groups(files, {"model": {"model.safetensors": entry}}, verify=True)["model"][0]
    finally:
        files.close()


def bits(tensor: torch.Tensor) -> bytes:
    """The memory of a dense tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("shift", [0, 1])
def test_neighbours_of_any_dtype_keep_every_bit(dtype: str, shift: int, tmp_path: Path) -> None:
    """NaNs with a payload, bools that are neither 0 nor 1; wherever they stand, and whatever their shape."""
    shapes = [(5,), (0,), (1,), (1000,), (3, 2), (), (7,), (0, 4), (8,), (9,)]
    tensors = [("shift", "U8", (shift,)), *((str(number), dtype, shape) for number, shape in enumerate(shapes))]
    num_bytes = [torch.Size(shape).numel() * DTYPE_BYTES[dtype] for shape in shapes]
    data = random.Random(0).randbytes(shift + sum(num_bytes))

    read = read_file(tmp_path, tensors, data)

    begin = shift
    for number, shape in enumerate(shapes):
        tensor = read[str(number)]
        assert (tuple(tensor.shape), tensor.dtype) == (shape, TORCH_DTYPES[dtype])
        assert bits(tensor) == data[begin : begin + num_bytes[number]]
        begin += num_bytes[number]


def test_neighbours_have_memory_of_their_own_aligned_as_torchs(tmp_path: Path) -> None:
    """Many of them are cut out of one block at once, but are no views of it."""
    state = {"state_dict": {str(number): torch.full((number % 700 + 1,), float(number)) for number in range(3000)}}
    write_checkpoint(tmp_path / "c", state)

    read = read_checkpoint(tmp_path / "c")["state_dict"]

    assert all(torch.equal(read[name], tensor) for name, tensor in state["state_dict"].items())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in read.values())
    assert all(tensor._base is None and tensor.data_ptr() % 64 == 0 for tensor in read.values())
    assert len({tensor.data_ptr() for tensor in read.values()}) == len(read)


def test_without_a_thread_to_spare_neighbours_are_hashed_all_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    """A sound file is read, and one with another byte is refused."""
    sizes = [1000] * 600
    tensors = [(str(number), "F32", (size,)) for number, size in enumerate(sizes)]
    data = bytes(4 * sum(sizes))
    real = shards.read_into

    def read_into(file: Any, view: memoryview) -> None:
        real(file, view)
        view[-1] ^= 1

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for is_full in (False, True):
        if is_full:
            monkeypatch.setattr(threading.Thread, "start", start)
        assert len(read_file(tmp_path, tensors, data)) == 600
        with monkeypatch.context() as patch:
            patch.setattr(shards, "read_into", read_into)
            with pytest.raises(CorruptCheckpointError, match="sha256"):
                read_file(tmp_path, tensors, data)


def test_a_thread_that_fails_to_hash_lets_nothing_pass(tmp_path: Path, monkeypatch: Any) -> None:
    """Its part is missing in the digest: what it was to vouch for is not returned."""
    real = hashlib.sha256
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)

    class Failing:
        def __init__(self) -> None:
            self.digest = real()

        def update(self, data: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise MemoryError
            self.digest.update(data)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    tensors = [(str(number), "F32", (1000,)) for number in range(600)]
    with monkeypatch.context() as patch:
        patch.setattr(shards.hashlib, "sha256", lambda data=b"": real(data) if data else Failing())

        with pytest.raises(CorruptCheckpointError, match="sha256"):
            read_file(tmp_path, tensors, bytes(2_400_000))


def strict(text: str) -> Any:
    """What a parser that looks at every object and number makes of a text, or None where it refuses it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError
        return dict(pairs)

    def bounded(digits: str) -> int:
        if len(digits) > 20:
            raise ValueError
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_int=bounded)
    except ValueError:
        return None


KEYS = st.sampled_from(['"a"', '"b"', '"a:"', '":"', '"\\":"', '" :"', '"\\u003a"', '"a\\\\"', '"\\t:"', '""'])
SPACES = st.sampled_from(["", "", " ", "\n", "\t", "\r ", "  "])
NUMBERS = st.integers(min_value=0, max_value=25).flatmap(
    lambda n: st.sampled_from(["1" + "0" * n, "-1" + "0" * n, "0"])
)


@st.composite
def texts(draw: Any, depth: int = 3) -> str:
    """Small JSON documents with doubled keys, colons in texts, odd spaces, and long numbers."""
    kind = draw(st.sampled_from(["text", "number", "list", "object", "object"])) if depth else "number"
    if kind == "text":
        return str(draw(KEYS))
    if kind == "number":
        return str(draw(NUMBERS))
    items = [draw(texts(depth=depth - 1)) for _ in range(draw(st.integers(0, 3)))]
    space = draw(SPACES)
    if kind == "list":
        return "[" + f"{space},".join(items) + "]"
    pairs = [f"{draw(KEYS)}{draw(SPACES)}:{draw(SPACES)}{item}" for item in items]
    return "{" + f",{space}".join(pairs) + "}"


@given(texts(), st.sampled_from([None, 1, 2]))
def test_the_quick_parser_refuses_what_the_slow_one_refuses(text: str, expected_levels: int | None) -> None:
    """And both make the same of every other text, with as many levels of objects as were expected or with others."""
    expected = strict(text)

    try:
        found = parse_json(text.encode(), expected_levels)
    except ValueError:
        found = None

    assert found == expected


@pytest.mark.parametrize(
    "text", ['{"a":1,"a":":"}', '{"a":{"b":1},"a":1}', '{"x":[{"a" :1,"a"\t:2}],"y":":: \\":"}', '{"a":1,"\\u0061":2}']
)
def test_a_doubled_key_does_not_hide_behind_colons(text: str) -> None:
    """Colons in texts, white space before a colon, what stands under the first of the two."""
    with pytest.raises(ValueError, match="the key 'a' stands twice"):
        parse_json(text.encode())


@pytest.mark.parametrize("num_items", [3, 2**18])
def test_what_was_read_can_be_resized(num_items: int, tmp_path: Path) -> None:
    """As any tensor of one's own, whatever its size: numpy forbids it for what it has seen."""
    write_checkpoint(tmp_path / "ck", {"state_dict": {"weight": torch.ones(num_items)}})

    weight = read_checkpoint(tmp_path / "ck")["state_dict"]["weight"]

    assert weight.resize_(2 * num_items).numel() == 2 * num_items


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_is_replaced_behind_its_header_is_refused(verify: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """Headers are read first: the data of one file never comes back under the names of another, digests or not."""
    old, new = (build_header([(name, "F32", (2**18,))], {}) + bytes(2**20) for name in "ab")
    real = shards.for_each

    def replace_first(*arguments: Any) -> None:
        (tmp_path / "model.safetensors").write_bytes(new)
        real(*arguments)

    monkeypatch.setattr(shards, "for_each", replace_first)
    for content in (old, new):
        (tmp_path / "model.safetensors").write_bytes(old)
        files = CheckpointFiles(tmp_path, tmp_path)
        entry = FileEntry(len(content), hashlib.sha256(content).hexdigest())
        try:
            with pytest.raises(CorruptCheckpointError, match="another header than a moment before"):
                shards.read_groups(files, {"model": {"model.safetensors": entry}}, verify=verify)
        finally:
            files.close()


def test_large_tensors_are_allocated_by_the_thread_that_wants_them(tmp_path: Path, monkeypatch: Any) -> None:
    """Other threads' heaps give memory back and take it again, which takes long."""
    write_checkpoint(
        tmp_path / "ck", {"state_dict": {str(n): torch.full((2**19,), float(n)) for n in range(4)}}, max_shard_bytes=1
    )
    real, threads = shards._empty, set()

    def empty(entry: Any) -> torch.Tensor:
        threads.add(threading.current_thread())
        return real(entry)

    monkeypatch.setattr(shards, "_empty", empty)
    monkeypatch.setattr(shards, "threads_to_read", lambda sizes: 3)

    read = read_checkpoint(tmp_path / "ck")["state_dict"]

    assert threads == {threading.current_thread()}
    assert all(torch.equal(read[str(n)], torch.full((2**19,), float(n))) for n in range(4))
