"""The data files are safetensors files that the library reads, and our own reader is strict about them."""

from __future__ import annotations

import json
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_resume.format.checkpoint import read_checkpoint, verify_checkpoint, write_checkpoint
from lightning_resume.format.header import build_header, parse_header


def state() -> dict[str, Any]:
    """A small training state after one step of Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "extra": torch.ones(3)}


def test_the_library_reads_the_weights_under_their_own_names(tmp_path: Path) -> None:
    """`load_file` gives the state dict: the directory can be handed to tools that know nothing of this package."""
    expected = state()["state_dict"]

    write_checkpoint(tmp_path / "c", state())
    result = load_file(tmp_path / "c" / "model.safetensors")

    assert sorted(result) == sorted(expected)
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_every_data_file_can_be_opened_by_the_library(tmp_path: Path) -> None:
    """Also optimizer, state and ranks; each is marked as torch's."""
    write_checkpoint(tmp_path / "c", state(), rank_states=[{"rng": torch.arange(5)}])

    names = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))

    assert names == [f"{name}.safetensors" for name in ("model", "optimizer", "rank-00000", "state")]
    for name in names:
        with safe_open(tmp_path / "c" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert all(file.get_tensor(key) is not None for key in file.keys())  # noqa: SIM118


def test_shards_have_hugging_faces_names_and_weight_map(tmp_path: Path) -> None:
    """`model-00001-of-0000N.safetensors` and `model.safetensors.index.json`, as its tools write and read them."""
    expected = state()["state_dict"]

    index = write_checkpoint(tmp_path / "c", state(), max_shard_bytes=64)
    document = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    shards = sorted(name for name in index.files if name.startswith("model-"))
    merged = {key: value for shard in shards for key, value in load_file(tmp_path / "c" / shard).items()}

    assert len(shards) > 2
    assert shards == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    assert document["metadata"] == {"total_size": sum(value.nbytes for value in expected.values())}
    assert sorted(document["weight_map"]) == sorted(expected)
    assert all(key in load_file(tmp_path / "c" / shard) for key, shard in document["weight_map"].items())
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


@pytest.mark.parametrize("max_shard_bytes", [1, 64, 100, 10_000])
def test_any_shard_size_reads_back_the_same(max_shard_bytes: int, tmp_path: Path, same: Any) -> None:
    """Sharding is invisible to the reader; a tensor that is larger than a shard gets one of its own."""
    value = state()

    index = write_checkpoint(tmp_path / "c", value, max_shard_bytes=max_shard_bytes)
    result = read_checkpoint(tmp_path / "c")

    assert same(result, value)
    assert verify_checkpoint(tmp_path / "c") == index


def test_a_shard_holds_no_more_than_it_may(tmp_path: Path) -> None:
    """Only a single tensor may exceed the limit."""
    write_checkpoint(tmp_path / "c", {"state_dict": {str(n): torch.ones(n) for n in range(40)}}, max_shard_bytes=100)

    sizes = [
        [tensor.nbytes for tensor in load_file(path).values()] for path in (tmp_path / "c").glob("model-*.safetensors")
    ]

    assert len(sizes) > 10
    assert all(sum(shard) <= 100 or len(shard) == 1 for shard in sizes)


def test_a_header_that_would_grow_too_long_starts_a_new_shard(tmp_path: Path, monkeypatch: Any) -> None:
    """Readers refuse headers over 100 MB; many long names are spread over files."""
    monkeypatch.setattr("lightning_resume.format.planned.HEADER_BUDGET_BYTES", 5000)
    value = {"state_dict": {f"{n:03d}" + "x" * 1000: torch.tensor(n) for n in range(20)}}

    index = write_checkpoint(tmp_path / "c", value)
    result = read_checkpoint(tmp_path / "c")

    assert len(index.shards("model")) >= 5
    assert result["state_dict"] == value["state_dict"]


@pytest.mark.parametrize("max_shard_bytes", [0, -1])
def test_a_shard_size_below_one_is_a_wrong_argument(max_shard_bytes: int, tmp_path: Path) -> None:
    """Told before anything is created."""
    with pytest.raises(ValueError, match="max_shard_bytes"):
        write_checkpoint(tmp_path / "c", {}, max_shard_bytes=max_shard_bytes)

    assert list(tmp_path.iterdir()) == []


def test_more_shards_than_can_be_numbered_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """Five digits: told, and nothing is left behind."""
    monkeypatch.setattr("lightning_resume.format.planned.MAX_SHARDS", 3)

    with pytest.raises(ValueError, match="would make 4 shards"):
        write_checkpoint(tmp_path / "c", {"state_dict": {str(n): torch.ones(1) for n in range(4)}}, max_shard_bytes=1)

    assert list(tmp_path.iterdir()) == []


def test_the_data_is_aligned(tmp_path: Path) -> None:
    """Every tensor begins at a multiple of its item size, whatever stands before it, so that it can be mapped."""
    value = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(1).half()}

    write_checkpoint(tmp_path / "c", {"state_dict": value})
    data = (tmp_path / "c" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    assert (8 + length) % 8 == 0
    assert [header[name]["data_offsets"] for name in "bca"] == [[0, 24], [24, 26], [26, 29]]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    """Other tools' files come out as 0600, which locks a group out of its own checkpoints."""
    before = os.umask(umask)
    try:
        write_checkpoint(tmp_path / "c", state())
    finally:
        os.umask(before)

    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "c").iterdir()}

    assert modes == {mode}
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o777 & ~umask


def test_a_file_of_the_library_can_stand_in_for_ours() -> None:
    """The format is the library's: its header passes our parser."""
    data = save_bytes({"a": torch.ones(2, 3), "b": torch.ones(1, dtype=torch.int8)})
    length = int.from_bytes(data[:8], "little")

    header = parse_header(data[8 : 8 + length], len(data) - 8 - length)

    assert [(entry.name, entry.dtype, entry.shape) for entry in header.entries] == [
        ("a", "F32", (2, 3)),
        ("b", "I8", (1,)),
    ]


def save_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    """What the library writes."""
    from safetensors.torch import save

    return save(tensors)


def header_text(**changes: Any) -> bytes:
    """A sound header for two tensors of 8 bytes each, with changes."""
    document = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    }
    for name, fields in changes.items():
        document[name] = fields if fields is None or type(fields) is not dict else {**document.get(name, {}), **fields}
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "no JSON object"),
        (b" {}", "no JSON object"),
        (b"{", "Expecting"),
        (b'{"a": 1, "a": 1}', "stands twice"),
        (b'{"\xff": 1}', "UTF-8"),
        (b"{}" + b"\0", "Extra data"),
        (b'{"a":' + b"[" * 100_000, "deep"),
        (header_text(a=None), "malformed fields"),
        (header_text(a={"more": 1}), "malformed fields"),
        (header_text(a={"dtype": "F33"}), "unknown dtype"),
        (header_text(a={"dtype": ["F32"]}), "unknown dtype"),
        (header_text(a={"shape": 2}), "malformed shape"),
        (header_text(a={"shape": [2.0]}), "malformed shape"),
        (header_text(a={"shape": [True, 2]}), "malformed shape"),
        (header_text(a={"shape": [-2]}), "malformed shape"),
        (header_text(a={"shape": [1] * 65 + [2]}), "malformed shape"),
        (header_text(a={"shape": [2**63]}), "malformed shape"),
        (header_text(a={"shape": [2**62, 2**62]}), "do not fit"),
        (header_text(a={"shape": [3]}), "do not fit"),
        (header_text(a={"dtype": "F16"}), "do not fit"),
        (header_text(a={"data_offsets": [0]}), "malformed shape or place"),
        (header_text(a={"data_offsets": [8, 0]}), "do not fit"),
        (header_text(a={"data_offsets": [0, 10**30]}), "digits"),
        (header_text(b={"data_offsets": [4, 12]}), "hole or an overlap before 'b'"),
        (header_text(b={"data_offsets": [9, 17]}), "hole or an overlap before 'b'"),
        (header_text(a={"data_offsets": [8, 16]}), "hole or an overlap"),
        (header_text(c={"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}), "16 bytes of data"),
        (b"{}", "16 bytes of data"),
        (header_text(__metadata__=1), "__metadata__"),
        (header_text(__metadata__={"a": 1}), "__metadata__"),
        (header_text().replace(b"[2]", b"[NaN]"), "NaN"),
        (header_text().replace(b"[2]", b"[1e999]"), "too large"),
    ],
)
def test_a_malformed_header_is_a_value_error(text: bytes, message: str) -> None:
    """Bounds, overlaps, holes, types, sizes, duplicates and depth: all are checked, with no other exception."""
    with pytest.raises(ValueError, match=message):
        parse_header(text, 16)


def test_a_header_without_flaws_is_accepted() -> None:
    """The cases above differ from this one in one thing each."""
    header = parse_header(header_text() + b"   ", 16)

    assert [entry.name for entry in header.entries] == ["a", "b"]


def test_a_header_that_readers_refuse_is_not_built(monkeypatch: Any) -> None:
    """What is written can be read back."""
    monkeypatch.setattr("lightning_resume.format.header.MAX_HEADER_BYTES", 1000)

    with pytest.raises(ValueError, match="header of"):
        build_header([("x" * 1001, "U8", (1,))], {})


def test_an_empty_model_is_a_file_without_tensors(tmp_path: Path) -> None:
    """The file is there because the key is; without the key there is none."""
    write_checkpoint(tmp_path / "c", {"state_dict": OrderedDict()})
    index = write_checkpoint(tmp_path / "d", {"other": 1})

    assert load_file(tmp_path / "c" / "model.safetensors") == {}
    assert read_checkpoint(tmp_path / "c") == {"state_dict": OrderedDict()}
    assert list(index.files) == ["state.json"]


def test_other_keys_may_be_model_and_optimizer(tmp_path: Path) -> None:
    """A hand-written loop has names of its own."""
    index = write_checkpoint(
        tmp_path / "c",
        {"net": {"w": torch.ones(1)}, "opt": {"m": torch.ones(2)}},
        model_key="net",
        optimizer_key="opt",
    )

    assert sorted(index.files) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    assert list(load_file(tmp_path / "c" / "model.safetensors")) == ["w"]


def test_a_tensor_that_changes_its_size_while_it_is_saved_stops_the_save(tmp_path: Path, monkeypatch: Any) -> None:
    """The header has been written by then: a file that contradicts it must never appear."""
    value = torch.ones(4)
    from lightning_resume.format import planned

    def resize_then_build(*arguments: Any) -> bytes:
        value.resize_(8)
        return build_header(*arguments)

    monkeypatch.setattr(planned, "build_header", resize_then_build)

    with pytest.raises(TypeError, match="changed while it was saved"):
        write_checkpoint(tmp_path / "c", {"state_dict": {"w": value}})

    assert list(tmp_path.iterdir()) == []


def test_the_librarys_file_and_ours_hold_the_same_data(tmp_path: Path) -> None:
    """Same order, same offsets, same bytes: only the padding of the header may differ."""
    value = state()["state_dict"]

    write_checkpoint(tmp_path / "c", {"state_dict": value})
    save_file(dict(value), tmp_path / "library.safetensors", metadata={"format": "pt"})
    sizes = [path.stat().st_size for path in (tmp_path / "c" / "model.safetensors", tmp_path / "library.safetensors")]

    assert abs(sizes[0] - sizes[1]) < 8
