"""Damaged and hostile checkpoints: refused with the file's name, before anything is returned or changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lightning_resume.catalog import scan_checkpoints
from lightning_resume.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    ResumeError,
    UnsafePathError,
    UnsupportedSetupError,
)
from lightning_resume.format.checkpoint import read_checkpoint, read_index, verify_checkpoint, write_checkpoint
from lightning_resume.format.output import OutputFile


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with every kind of file, the model in shards."""
    path = tmp_path / "step-00000003"
    write_checkpoint(
        path,
        {
            "state_dict": {"a": torch.arange(40.0), "b": torch.arange(20.0)},
            "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(40)}}}],
            "x": {"t": (torch.ones(2), np.arange(3))},
        },
        rank_states=[{"rng": torch.arange(9)}],
        max_shard_bytes=200,
    )
    return path


FILES = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "optimizer.safetensors",
    "state.safetensors",
    "state.json",
    "rank-00000.safetensors",
    "rank-00000.json",
]


def forge(checkpoint: Path, name: str, data: bytes) -> None:
    """Replaces a file and redoes every digest: what someone who knows the format can do."""
    (checkpoint / name).write_bytes(data)
    document = json.loads((checkpoint / "index.json").read_text())
    document["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "index.json").write_text(resigned(json.dumps(document)))


def resigned(text: str) -> str:
    """The JSON of an index with a right digest."""
    document = json.loads(text)
    document.pop("digest", None)
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return json.dumps({**document, "digest": hashlib.sha256(canonical.encode()).hexdigest()})


def test_the_fixture_has_every_file(checkpoint: Path) -> None:
    """The tests below leave none out."""
    names = sorted(path.name for path in checkpoint.iterdir())

    assert names == sorted([*FILES, "index.json"])


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found_by_reading_and_by_verifying(name: str, place: int, checkpoint: Path) -> None:
    """The digest of every file is compared, the sizes being the same."""
    data = bytearray((checkpoint / name).read_bytes())
    data[place] ^= 1
    (checkpoint / name).write_bytes(data)

    with pytest.raises(CorruptCheckpointError) as reading:
        read_checkpoint(checkpoint, rank=0)
    with pytest.raises(CorruptCheckpointError) as verifying:
        verify_checkpoint(checkpoint)

    assert reading.value.file == verifying.value.file == name
    assert name in str(reading.value)
    assert read_index(checkpoint).num_ranks == 1


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "10 bytes less": lambda data: data[:-10],
    "2 bytes more": lambda data: data + b"\0\0",
    "empty": lambda data: b"",
    "7 bytes": lambda data: data[:7],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_size_is_found_by_the_quick_look(name: str, cut: str, checkpoint: Path) -> None:
    """Cut off or too long: named, with both sizes, without reading any data."""
    data = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(CUTS[cut](data))

    with pytest.raises(CorruptCheckpointError) as caught:
        read_index(checkpoint)

    assert caught.value.file == name
    assert caught.value.expected == f"{len(data)} bytes"
    assert caught.value.found == f"{len(CUTS[cut](data))} bytes"


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_shard_with_a_right_digest_is_found_by_its_header(cut: str, checkpoint: Path) -> None:
    """Never zeros for what is missing, and no error of a lower library."""
    name = "optimizer.safetensors"
    forge(checkpoint, name, CUTS[cut]((checkpoint / name).read_bytes()))

    for look in (read_checkpoint, verify_checkpoint):
        with pytest.raises(CorruptCheckpointError) as caught:
            look(checkpoint)
        assert caught.value.file == name


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name: str, checkpoint: Path) -> None:
    """Also one that this reader would not need."""
    (checkpoint / name).unlink()

    with pytest.raises(CorruptCheckpointError) as caught:
        read_checkpoint(checkpoint, keys=())

    assert (caught.value.file, caught.value.found) == (name, "nothing")


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "model.safetensors", "checkpoint.pt", "sub"])
def test_an_extra_file_is_named(name: str, checkpoint: Path) -> None:
    """What the index does not vouch for does not belong there."""
    (checkpoint / name).mkdir() if name == "sub" else (checkpoint / name).write_text("x")

    with pytest.raises(CorruptCheckpointError) as caught:
        read_index(checkpoint)

    assert (caught.value.file, caught.value.found) == (name, "an extra file")


@pytest.mark.parametrize("name", [*FILES, "index.json"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "directory", "socket", "device"])
@pytest.mark.timeout(60)
def test_only_regular_files_are_opened(
    kind: str, name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link could lead anywhere, a pipe would make the reader wait for ever, a device never end."""
    (checkpoint / name).rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(checkpoint / name)
    elif kind == "socket":
        monkeypatch.chdir(checkpoint)  # the path of a socket may be about 100 characters long
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
    elif kind == "device":
        try:
            os.mknod(checkpoint / name, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # endless zeros
        except PermissionError:
            pytest.skip("making a device takes a right that this user has not")
    elif kind == "directory":
        (checkpoint / name).mkdir()
    else:
        (checkpoint / name).symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))

    with pytest.raises(UnsafePathError) as caught:
        read_index(checkpoint)

    assert caught.value.file == name


def test_a_link_that_takes_the_place_of_a_file_between_look_and_open_is_not_followed(
    checkpoint: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """The check and the opening are not one step; the open itself refuses links."""
    name = "state.json"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes((checkpoint / name).read_bytes())
    real_open = os.open

    def swap_then_open(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if path == name:
            (checkpoint / name).unlink()
            (checkpoint / name).symlink_to(elsewhere)
        return real_open(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", swap_then_open)

    with pytest.raises(CheckpointReadError) as caught:
        read_index(checkpoint)

    assert caught.value.file == name


def test_the_checkpoint_may_be_reached_through_a_linked_folder(checkpoint: Path, tmp_path: Path) -> None:
    """Where a user keeps the folder is the user's business."""
    (tmp_path / "link").symlink_to(tmp_path)

    result = read_checkpoint(tmp_path / "link" / checkpoint.name)

    assert torch.equal(result["state_dict"]["a"], torch.arange(40.0))


@pytest.mark.parametrize("name", ["../x.safetensors", "/elsewhere/x.safetensors", "a/../../x"])
def test_a_weight_map_that_leads_out_of_the_directory_is_refused(name: str, checkpoint: Path) -> None:
    """Hugging Face's index is never used to open anything, and is refused all the same."""
    file = "model.safetensors.index.json"
    document = json.loads((checkpoint / file).read_text())
    document["weight_map"]["a"] = name
    forge(checkpoint, file, json.dumps(document).encode())

    for look in (read_checkpoint, verify_checkpoint):
        with pytest.raises(UnsafePathError) as caught:
            look(checkpoint)
        assert caught.value.file == name


@pytest.mark.parametrize("data", [b"{}", b"[]", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"{", b"\xff"])
def test_a_weight_map_that_says_something_else_is_corrupt(data: bytes, checkpoint: Path) -> None:
    """It has to say where the tensors are."""
    forge(checkpoint, "model.safetensors.index.json", data)

    for look in (read_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            look(checkpoint)
        assert "model.safetensors.index.json" in str(caught.value) or "'1'" in str(caught.value)


def test_swapped_shards_with_right_digests_do_not_pass(checkpoint: Path) -> None:
    """Two shards that hold the same name contradict each other."""
    first = (checkpoint / FILES[0]).read_bytes()
    forge(checkpoint, FILES[1], first)

    for look in (read_checkpoint, verify_checkpoint):
        with pytest.raises(CorruptCheckpointError, match="again") as caught:
            look(checkpoint)
        assert caught.value.file == FILES[1]


def set_skeleton(checkpoint: Path, node: Any, file: str = "state.json") -> None:
    """Puts a node at the top of a state file, digests redone."""
    text = node if isinstance(node, bytes) else json.dumps({"state": [["x", node]]}).encode()
    forge(checkpoint, file, text)


HOSTILE_NODES = [
    {"$": "unknown"},
    {"$": ["list"]},
    {"$": None},
    {"$": "tensor"},
    {"$": "tensor", "f": "model", "n": "missing"},
    {"$": "tensor", "f": "nowhere", "n": "a"},
    {"$": "tensor", "f": "rank-00000", "n": "rng"},
    {"$": "tensor", "f": ["model"], "n": {}},
    {"$": "tensor", "f": "model", "n": "a", "stride": [0]},
    {"$": "tensor", "f": "model", "n": "a", "stride": [-1]},
    {"$": "tensor", "f": "model", "n": "a", "stride": [2**62]},
    {"$": "tensor", "f": "model", "n": "a", "stride": [1, 1]},
    {"$": "tensor", "f": "model", "n": "a", "stride": "1"},
    {"$": "tensor", "f": "model", "n": "a", "dtype": "load"},
    {"$": "tensor", "f": "model", "n": "a", "dtype": "complex128"},
    {"$": "tensor", "f": "state", "n": "x.t.1", "grad": True},
    {"$": "sparse", "layout": "sparse_coo", "size": [2], "coalesced": True, "indices": [[9]], "values": [1]},
    {"$": "sparse", "layout": "load", "size": [2], "outer": 1, "inner": 1, "values": 1},
    {"$": "ndarray", "f": "state", "n": "x.t.1", "dtype": "O", "shape": [3], "order": "C"},
    {"$": "ndarray", "f": "state", "n": "x.t.1", "dtype": "|O8", "shape": [3], "order": "C"},
    {"$": "ndarray", "f": "state", "n": "x.t.1", "dtype": "<i8", "shape": [2**40], "order": "C"},
    {"$": "ndarray", "f": "state", "n": "x.t.1", "dtype": "<i8,<i8", "shape": [3], "order": "C"},
    {"$": "np.scalar", "dtype": "<f8", "v": "00"},
    {"$": "np.scalar", "dtype": "<f8", "v": "zz"},
    {"$": "np.scalar", "dtype": "O", "char": "O", "v": "00" * 8},
    {"$": "int", "v": "0xzz"},
    {"$": "int", "v": 5},
    {"$": "float", "v": "00"},
    {"$": "str", "v": "ff"},
    {"$": "bytes", "v": "0"},
    {"$": "bytes", "f": "state", "n": "missing"},
    {"$": "tuple", "v": 5},
    {"$": "tuple", "v": {"a": 1}},
    {"$": "tuple"},
    {"$": "set", "v": [[1]]},
    {"$": "dict", "v": [[1, 2], [1, 3]]},
    {"$": "dict", "v": [[1, 2], [True, 3]]},
    {"$": "dict", "v": [[[1], 2]]},
    {"$": "dict", "v": [[1]]},
    {"$": "dict", "v": 5},
    {"$": "OrderedDict", "v": {}, "attributes": [1]},
    {"$": "defaultdict", "factory": "eval", "v": []},
    {"$": "defaultdict", "factory": "__import__", "v": []},
    {"$": "deque", "v": [], "maxlen": "x"},
    {"$": "Fraction", "v": [1, 0]},
    {"$": "Decimal", "v": "x"},
    {"$": "UUID", "v": "x"},
    {"$": "datetime", "v": [1]},
    {"$": "datetime", "v": [99999, 1, 1, 0, 0, 0, 0, None, 0]},
    {"$": "date", "v": ["a", 1, 1]},
    {"$": "timedelta", "v": [10**15, 0, 0]},
    {"$": "timezone", "v": [5]},
    {"$": "range", "v": [0, 1, 0]},
    {"$": "torch.dtype", "v": "load"},
    {"$": "torch.dtype", "v": "nn"},
    {"$": "torch.device", "v": "nowhere"},
    {"$": "torch.Size", "v": ["a"]},
    {"$": "type", "name": ["os.system"], "v": "true"},
    {"$": "type", "v": 1},
]


@pytest.mark.parametrize("node", HOSTILE_NODES, ids=[f"{n}-{node.get('$')}" for n, node in enumerate(HOSTILE_NODES)])
def test_a_forged_skeleton_ends_in_one_typed_error(node: Any, checkpoint: Path) -> None:
    """No lower error escapes, nothing is imported, called or allocated because the file says so."""
    set_skeleton(checkpoint, [node])

    with pytest.raises(CorruptCheckpointError) as caught:
        read_checkpoint(checkpoint)

    assert caught.value.file == "state.json"
    assert "'x" in caught.value.expected


TOKENS = [
    "null",
    "true",
    "-1",
    "0",
    "9" * 19,
    "1e308",
    '""',
    '"x"',
    "[]",
    "{}",
    '{"$":"tensor"}',
    '"state"',
    '"load"',
    "[0]",
]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("file", ["state.json", "index.json", "model.safetensors.index.json"])
def test_a_forged_file_with_any_value_replaced_is_read_or_refused(file: str, seed: int, checkpoint: Path) -> None:
    """One or two JSON values are exchanged and all digests redone: no other error than this package's own escapes."""
    generator = random.Random(seed)
    text = (checkpoint / file).read_text()
    index = (checkpoint / "index.json").read_text()
    outcomes = set()

    for _ in range(15):
        changed = text
        for _ in range(generator.choice([1, 2])):
            values = list(re.finditer(r'"[^"]*"|-?[0-9][0-9.e+-]*|null|true|false', changed))
            value = generator.choice(values)
            other = generator.choice([*TOKENS, generator.choice(values).group()])
            changed = changed[: value.start()] + other + changed[value.end() :]
        if file == "index.json":
            with contextlib.suppress(ValueError, AttributeError):
                changed = resigned(changed)
            (checkpoint / file).write_text(changed)
        else:
            forge(checkpoint, file, changed.encode())
        try:
            verify_checkpoint(checkpoint)
            read_checkpoint(checkpoint, rank=0)
            outcomes.add("read")
        except ResumeError:
            outcomes.add("refused")
        assert len(scan_checkpoints(checkpoint.parent)) == 1
        (checkpoint / file).write_text(text)
        (checkpoint / "index.json").write_text(index)

    assert "refused" in outcomes


def test_a_class_that_is_not_registered_is_never_looked_up(checkpoint: Path) -> None:
    """The name on disk is a key of a table, not something to import."""
    set_skeleton(checkpoint, {"$": "type", "name": "os.system", "v": "true"})

    with pytest.raises(TypeError, match=r"os\.system, which is not registered") as caught:
        read_checkpoint(checkpoint)

    assert caught.value.key_path == "x"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b'{"state": {}}',
        b'{"state": [1]}',
        b'{"state": [[1, 2]]}',
        b'{"state": [["a", 1], ["a", 2]]}',
        b'{"state": [], "more": 1}',
        b'{"state": [["x", {"a": 1, "a": 2}]]}',
        b'{"state": [["x", NaN]]}',
        b'{"state": [["x", ' + b"9" * 30 + b"]]}",
        b'{"state": [["x", ' + b"[" * 100_000 + b"]" * 100_000 + b"]]}",
        b'{"state": [["x", ' + b"[" * 900 + b"]" * 900 + b"]]}",
        b"\xff",
    ],
    ids=lambda data: ascii(data[:24]),
)
@pytest.mark.parametrize("file", ["state.json", "rank-00000.json"])
def test_a_malformed_state_file_ends_in_one_typed_error(file: str, data: bytes, checkpoint: Path) -> None:
    """Duplicate keys, literals that are no JSON, long numbers, depth."""
    set_skeleton(checkpoint, data, file)

    with pytest.raises(CorruptCheckpointError) as caught:
        read_checkpoint(checkpoint, rank=0)

    assert caught.value.file == file


def test_a_rank_may_not_refer_to_other_files(checkpoint: Path) -> None:
    """A rank's state has its own data, so that it can be checked by itself."""
    set_skeleton(checkpoint, {"$": "tensor", "f": "model", "n": "a"}, "rank-00000.json")

    with pytest.raises(CorruptCheckpointError, match="a reference to data in 'model'"):
        read_checkpoint(checkpoint, rank=0)


def test_verifying_finds_a_reference_to_data_that_is_not_there(checkpoint: Path) -> None:
    """Digests alone would not: the state file itself is sound."""
    set_skeleton(checkpoint, [{"$": "tensor", "f": "model", "n": "missing"}])

    with pytest.raises(CorruptCheckpointError, match="missing") as caught:
        verify_checkpoint(checkpoint)

    assert caught.value.file == "state.json"


def test_json_above_its_bound_is_not_parsed(checkpoint: Path, monkeypatch: Any) -> None:
    """Size is checked before memory is spent."""
    monkeypatch.setattr("lightning_resume.format.verify.MAX_STATE_BYTES", 100)
    set_skeleton(checkpoint, "x" * 200)

    with pytest.raises(CorruptCheckpointError, match="at most 100 bytes"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 5000])
def test_a_header_length_beyond_the_file_is_not_allocated(length: int, checkpoint: Path) -> None:
    """The first eight bytes are a stranger's."""
    forge(checkpoint, "optimizer.safetensors", struct.pack("<Q", length) + b"{}" + b" " * 100)

    with pytest.raises(CorruptCheckpointError, match=f"header of {length} bytes") as caught:
        read_checkpoint(checkpoint)

    assert caught.value.file == "optimizer.safetensors"


def test_a_shape_that_no_tensor_can_have_is_refused(checkpoint: Path) -> None:
    """Empty on paper, impossible in memory."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}).encode()
    forge(checkpoint, "optimizer.safetensors", struct.pack("<Q", len(header)) + header)

    with pytest.raises(CorruptCheckpointError, match="no tensor can have"):
        read_checkpoint(checkpoint)


def test_another_valid_safetensors_file_in_a_shards_place_is_found(checkpoint: Path) -> None:
    """Weights of another run, same names and sizes: only the digest tells."""
    save_file({"a": torch.zeros(40)}, checkpoint / FILES[0], metadata={"format": "pt"})
    size = read_index_size(checkpoint, FILES[0])
    data = (checkpoint / FILES[0]).read_bytes()
    (checkpoint / FILES[0]).write_bytes(data)

    with pytest.raises(CorruptCheckpointError, match="sha256" if len(data) == size else "bytes") as caught:
        read_checkpoint(checkpoint)

    assert caught.value.file == FILES[0]


def read_index_size(checkpoint: Path, name: str) -> int:
    """Size of a file as the index has it."""
    return int(json.loads((checkpoint / "index.json").read_text())["files"][name]["bytes"])


def test_a_writer_that_loses_the_end_of_a_shard_is_found_out(tmp_path: Path, monkeypatch: Any) -> None:
    """The digest is taken of what was to be written, so what the disk then lost is missed at once."""
    real_finish = OutputFile.finish

    def lossy_finish(file: OutputFile) -> None:
        fd = os.dup(file._fd)
        real_finish(file)
        if os.fstat(fd).st_size > 3000:
            os.truncate(fd, os.fstat(fd).st_size - 512)
        os.close(fd)

    monkeypatch.setattr(OutputFile, "finish", lossy_finish)
    write_checkpoint(tmp_path / "c", {"state_dict": {"w": torch.ones(1000)}})

    with pytest.raises(CorruptCheckpointError) as caught:
        read_index(tmp_path / "c")

    (info,) = scan_checkpoints(tmp_path)
    assert caught.value.file == "model.safetensors"
    assert (info.status, info.reason.partition(":")[0]) == ("corrupt", "model.safetensors")


def test_without_verify_only_sizes_and_structure_are_checked(checkpoint: Path) -> None:
    """The caller's choice: a flipped data byte passes, a cut file does not."""
    data = bytearray((checkpoint / FILES[0]).read_bytes())
    data[-1] ^= 1
    (checkpoint / FILES[0]).write_bytes(data)

    result = read_checkpoint(checkpoint, verify=False)

    assert not torch.equal(result["state_dict"]["a"], torch.arange(40.0))
    (checkpoint / FILES[0]).write_bytes(data[:-1])
    with pytest.raises(CorruptCheckpointError, match="bytes"):
        read_checkpoint(checkpoint, verify=False)


def test_a_missing_checkpoint_is_not_found(tmp_path: Path) -> None:
    """It can be caught as FileNotFoundError too."""
    with pytest.raises(CheckpointNotFoundError) as caught:
        read_checkpoint(tmp_path / "c")

    assert isinstance(caught.value, FileNotFoundError)
    assert (caught.value.path, caught.value.found) == (str(tmp_path / "c"), "nothing")


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    """A `.ckpt` file of another tool is not opened."""
    (tmp_path / "last.ckpt").write_bytes(b"pickle")

    with pytest.raises(CheckpointNotFoundError) as caught:
        read_checkpoint(tmp_path / "last.ckpt")

    assert caught.value.found == "a file"


@pytest.mark.timeout(60)
def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    """Nobody waits for somebody to write into it."""
    os.mkfifo(tmp_path / "step-00000001")

    with pytest.raises(CheckpointNotFoundError) as caught:
        read_checkpoint(tmp_path / "step-00000001")

    assert caught.value.path == str(tmp_path / "step-00000001")
    assert [info.status for info in scan_checkpoints(tmp_path)] == ["foreign"]


@pytest.mark.parametrize("kind", ["nothing", "a file"])
def test_a_missing_checkpoint_is_not_found_on_windows_either(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Where no file can be opened relative to a directory, the answers are the same."""
    monkeypatch.setattr("lightning_resume.format.contained.HAS_DIR_FD", False)
    if kind == "a file":
        (tmp_path / "c").write_text("x")

    with pytest.raises(CheckpointNotFoundError) as caught:
        read_index(tmp_path / "c")

    assert caught.value.found == kind


@pytest.mark.parametrize("action", [read_checkpoint, lambda path: write_checkpoint(path, {})], ids=["read", "write"])
def test_a_big_endian_machine_is_refused(action: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Numbers would come out with their bytes reversed."""
    monkeypatch.setattr("sys.byteorder", "big")

    with pytest.raises(UnsupportedSetupError, match="little-endian") as caught:
        action(tmp_path / "c")

    assert caught.value.setup == "a big-endian machine"


def test_a_directory_without_an_index_was_never_committed(checkpoint: Path) -> None:
    """Presence of the index is validity."""
    (checkpoint / "index.json").unlink()

    with pytest.raises(IncompleteCheckpointError, match=r"index\.json") as caught:
        read_checkpoint(checkpoint)

    assert caught.value.path == str(checkpoint)


def test_an_error_of_the_disk_is_told_as_such(checkpoint: Path, monkeypatch: Any) -> None:
    """EIO says nothing about the checkpoint's contents: it is not called corrupt."""

    class Failing:
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdopen", Failing)

    with pytest.raises(CheckpointReadError) as caught:
        read_checkpoint(checkpoint)

    assert isinstance(caught.value, OSError)
    assert (caught.value.errno, caught.value.file) == (5, "index.json")


def test_reading_takes_only_the_files_that_the_keys_need(checkpoint: Path, monkeypatch: Any) -> None:
    """The model's weights can be read without reading the optimizer's state."""
    data = bytearray((checkpoint / "optimizer.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "optimizer.safetensors").write_bytes(data)

    result = read_checkpoint(checkpoint, keys={"state_dict", "absent"})

    assert list(result) == ["state_dict"]
    with pytest.raises(CorruptCheckpointError):
        read_checkpoint(checkpoint, keys={"optimizer_states"})


def test_excluded_keys_are_left_out_with_the_files_that_only_they_need(checkpoint: Path) -> None:
    """Weights can be tested where the optimizer's file is damaged; a key in both arguments is left out."""
    data = bytearray((checkpoint / "optimizer.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "optimizer.safetensors").write_bytes(data)

    result = read_checkpoint(checkpoint, exclude={"optimizer_states", "absent"})

    assert list(result) == ["state_dict", "x"]
    assert list(read_checkpoint(checkpoint, keys={"state_dict", "x"}, exclude={"x"})) == ["state_dict"]


@pytest.mark.parametrize("argument", ["keys", "exclude"])
def test_keys_given_as_one_text_are_a_wrong_argument(argument: str, checkpoint: Path) -> None:
    """Its letters would be taken for keys, and nothing would be read."""
    with pytest.raises(TypeError, match=f"{argument}='state_dict' is one text"):
        read_checkpoint(checkpoint, **{argument: "state_dict"})
