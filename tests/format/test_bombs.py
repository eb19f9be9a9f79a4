"""Small files that ask for much: refused before memory, time or imports are spent on them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resume.catalog import scan_checkpoints
from lightning_resume.errors import CorruptCheckpointError, UnsafePathError, UnsupportedStateError
from lightning_resume.format.checkpoint import read_checkpoint, verify_checkpoint, write_checkpoint
from lightning_resume.format.header import MAX_PARTS, build_header, parse_header
from lightning_resume.format.strict_json import parse_json, require_few_parts

MODEL = "model-00001-of-00002.safetensors"
WEIGHT_MAP = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with every kind of file that holds JSON."""
    path = tmp_path / "step-00000003"
    state = {"state_dict": {"a": torch.arange(40.0), "b": torch.arange(20.0)}, "x": {"y": 1}}
    write_checkpoint(path, state, rank_states=[{"r": {"s": 1}}], identity={"data": {"length": 3}}, max_shard_bytes=200)
    return path


def sealed(document: dict[str, Any]) -> str:
    """The text of an index with a right digest."""
    document = {key: value for key, value in document.items() if key != "digest"}
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return json.dumps({**document, "digest": hashlib.sha256(canonical.encode()).hexdigest()})


def forge(checkpoint: Path, name: str, text: bytes) -> None:
    """Replaces the JSON of a file (of a shard: its header) and redoes the digests."""
    file = checkpoint / name
    if name == "index.json":
        file.write_bytes(text)
        return
    data = file.read_bytes()
    if name.endswith(".safetensors"):
        length = int.from_bytes(data[:8], "little")
        text = len(text).to_bytes(8, "little") + text + data[8 + length :]
    file.write_bytes(text)
    document = json.loads((checkpoint / "index.json").read_bytes())
    document["files"][name] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (checkpoint / "index.json").write_text(sealed(document))


def json_of(checkpoint: Path, name: str) -> bytes:
    """The JSON of a file (of a shard: its header)."""
    data = (checkpoint / name).read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")] if name.endswith(".safetensors") else data


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """Checks that python allocated no more than this at any moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < num_bytes


def refused(checkpoint: Path, file: str) -> CorruptCheckpointError:
    """Reads a checkpoint in every way, and returns the one error that comes out each time."""
    errors = []
    for look in (lambda path: read_checkpoint(path, rank=0), verify_checkpoint):
        with pytest.raises(CorruptCheckpointError) as caught:
            look(checkpoint)
        errors.append(caught.value)
    (info,) = scan_checkpoints(checkpoint.parent, verify=True)

    assert [error.file for error in errors] == [file, file]
    assert errors[0].found == errors[1].found
    assert info.status == "corrupt"
    assert len(str(errors[0])) < 10_000
    return errors[0]


FILES = ["index.json", "state.json", "rank-00000.json", WEIGHT_MAP, MODEL]
BOMBS: dict[str, tuple[bytes, str]] = {
    "depth of lists": (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    "depth of objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    "digits": (b"9" * 100_000, "a number of 100000 digits"),
    "negative digits": (b"-" + b"9" * 100_000, "a number of 100001 digits"),
    "decimals": (b"0." + b"3" * 100_000, "too long"),
    "exponent": (b"1e" + b"9" * 100_000, "too long"),
    "half a character in bytes": (b'"\xed\xa0\x80"', "not UTF-8"),
    "doubled key": (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' stands twice"),
    "doubled key further in": (b'[{"c": [{"a": 1, "a": 1}]}]', "the key 'a' stands twice"),
    "not a number": (b"NaN", "no JSON number"),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("file", FILES)
def test_json_that_is_legal_for_others_is_refused_in_every_file(file: str, bomb: str, checkpoint: Path) -> None:
    """Wherever it stands in the file, with right digests, in bounded memory."""
    text, reason = BOMBS[bomb]
    before = json_of(checkpoint, file).rstrip()
    forge(checkpoint, file, before[:-1] + b', "bomb": ' + text + b"}")

    with at_most(64 * 2**20):
        error = refused(checkpoint, file)

    assert reason in error.found or (file == WEIGHT_MAP and "quotes, brackets and commas" in error.found)


@pytest.mark.parametrize("text", [b'"\\ud800"', b'{"\\uDfff": 1}', b'[["a", "\\udc00\\ud800"]]'], ids=ascii)
def test_half_a_character_in_the_index_is_refused(text: bytes, checkpoint: Path) -> None:
    """What the index says is printed by whoever lists checkpoints."""
    forge(checkpoint, "index.json", json_of(checkpoint, "index.json").rstrip()[:-1] + b', "bomb": ' + text + b"}")

    error = refused(checkpoint, "index.json")

    assert error.found == "half of a surrogate pair"


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON document."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(item)


@pytest.mark.parametrize("file", FILES)
def test_a_doubled_key_is_refused_at_every_level(file: str, checkpoint: Path) -> None:
    """Parsers differ in which of the two they take, so neither is taken."""
    original = {name: (checkpoint / name).read_bytes() for name in (file, "index.json")}
    document = json.loads(json_of(checkpoint, file))
    num_levels = 0

    for holder in list(objects(document)):
        for key in list(holder):
            holder["MARK"] = holder[key]
            text = json.dumps(document).replace('"MARK"', json.dumps(key)).encode()
            del holder["MARK"]
            forge(checkpoint, file, text)

            error = refused(checkpoint, file)

            assert "stands twice" in error.found
            num_levels += 1
            for name, data in original.items():
                (checkpoint / name).write_bytes(data)
    assert num_levels >= 2


def many_entries(count: int) -> bytes:
    """A header of so many numbers, each of which is sound."""
    entries = (f'"t{n}":{{"dtype":"F32","shape":[],"data_offsets":[{4 * n},{4 * n + 4}]}}' for n in range(count))
    return ("{" + ",".join(entries) + "}").encode()


HEADERS: dict[str, Callable[[], bytes]] = {
    "a million tensors": lambda: many_entries(10**6),
    "empty lists": lambda: b'{"a":[' + b"[]," * 10**7 + b"[]]}",
    "empty objects": lambda: b'{"a":[' + b"{}," * 10**7 + b"{}]}",
    "numbers": lambda: b'{"a":{"dtype":"F32","shape":[' + b"1," * 10**7 + b'1],"data_offsets":[0,4]}}',
    "metadata": lambda: b'{"__metadata__":{' + b",".join(b'"%d":""' % n for n in range(10**6)) + b"}}",
    "quotes behind backslashes": lambda: b'{"\\\\":[' + b'"\\"\\\\",' * 10**6 + b"1]}",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_of_a_million_parts_is_not_parsed(kind: str) -> None:
    """What is spent is a few times the text; parsed, it would be twenty times the text."""
    text = HEADERS[kind]()

    with at_most(3 * len(text) + 2**20), pytest.raises(ValueError, match=f"more than {MAX_PARTS} quotes"):
        parse_header(text, 4 * 10**6)


def test_a_header_as_large_as_a_writer_makes_it_is_parsed() -> None:
    """40,000 tensors in a file, with names that are full of brackets, quotes and backslashes."""
    names = [f'{n}"[{{,\\' * 12 for n in range(40_000)]
    data = build_header([(name, "U8", ()) for name in names], {})

    header = parse_header(data[8:], len(names))

    assert [entry.name for entry in header.entries] == names


def test_parts_are_counted_outside_of_strings_only() -> None:
    """Exactly, where a quick count is not enough."""
    text = b'{"a\\"[,{":"\\\\","b":[1,2]}'

    require_few_parts(text, 6 + 5)
    with pytest.raises(ValueError, match="more than 9 quotes"):
        require_few_parts(text, 9)

    assert parse_json(text) == {'a"[,{': "\\", "b": [1, 2]}


def test_a_weight_map_may_have_as_many_parts_as_there_are_tensors(checkpoint: Path) -> None:
    """Its size alone would allow hundreds of millions."""
    text = json_of(checkpoint, WEIGHT_MAP)[:-1] + b', "more": [' + b"[]," * 10**6 + b"[]]}"
    forge(checkpoint, WEIGHT_MAP, text)

    with at_most(64 * 2**20):
        error = refused(checkpoint, WEIGHT_MAP)

    assert "more than 110 quotes" in error.found


@pytest.mark.parametrize(
    "value", [bytes(10**6), bytearray(10**6), [0.5] * 10**4, (7,) * 10**4], ids=lambda value: type(value).__name__
)
def test_data_that_is_referred_to_often_is_built_once(value: Any, tmp_path: Path) -> None:
    """A thousand references to a megabyte are a megabyte; what was one object comes back as one."""
    write_checkpoint(tmp_path / "c", {"x": [value] * 1000})

    with at_most(64 * 2**20):
        result = read_checkpoint(tmp_path / "c")["x"]

    assert result[0] == value
    assert type(result[0]) is type(value)
    assert {id(item) for item in result} == {id(result[0])}


@pytest.mark.parametrize("value", [bytearray(2000), [0.5] * 600], ids=lambda value: type(value).__name__)
def test_equal_objects_that_were_two_come_back_as_two(value: Any, tmp_path: Path) -> None:
    """One may be changed without the other."""
    write_checkpoint(tmp_path / "c", {"x": [value, value[:]]})

    first, second = read_checkpoint(tmp_path / "c")["x"]

    assert first == second == value
    assert first is not second


IMPORTING = """
import sys
from pathlib import Path
from lightning_resume.errors import CorruptCheckpointError
from lightning_resume.format.checkpoint import read_checkpoint

seen = []
sys.addaudithook(lambda event, arguments: seen.append(arguments[0]) if event == "import" else None)
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        read_checkpoint(path)
    except CorruptCheckpointError as error:
        print(path.name, error.file, "_inductor" in error.found, seen)
"""


def test_a_name_that_torch_would_import_is_not_looked_up(tmp_path: Path) -> None:
    """torch imports some of its packages as soon as somebody asks for them as attributes."""
    nodes = [{"$": tag, "v": "_inductor"} for tag in ("torch.dtype", "torch.layout", "torch.memory_format")]
    nodes.append({"$": "tensor", "f": "model", "n": "a", "dtype": "_inductor"})
    nodes.append({"$": "sparse", "size": [1], "values": 1, "layout": "_inductor"})
    for number, node in enumerate(nodes):
        write_checkpoint(tmp_path / str(number), {"state_dict": {"a": torch.ones(1)}})
        forge(tmp_path / str(number), "state.json", json.dumps({"state": [["x", node]]}).encode())

    command = [sys.executable, "-c", IMPORTING, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})

    assert result.stdout.splitlines() == [f"{number} state.json True []" for number in range(len(nodes))]


@pytest.mark.parametrize("device", [0, None, ["cpu"], True])
def test_a_device_is_a_text(device: Any, checkpoint: Path) -> None:
    """A number would wake whatever accelerator there is."""
    forge(checkpoint, "state.json", json.dumps({"state": [["x", {"$": "torch.device", "v": device}]]}).encode())

    with pytest.raises(CorruptCheckpointError, match="a device that is no text") as caught:
        read_checkpoint(checkpoint)

    assert caught.value.file == "state.json"


def test_a_fraction_of_huge_numbers_is_refused_by_both_sides(checkpoint: Path, tmp_path: Path) -> None:
    """To reduce it would take hours."""
    huge = {"$": "int", "v": "0x" + "9" * 10**6}
    node = {"$": "Fraction", "v": [huge, {**huge, "v": huge["v"] + "1"}]}
    forge(checkpoint, "state.json", json.dumps({"state": [["x", node]]}).encode())

    with pytest.raises(CorruptCheckpointError, match="a fraction of numbers with more than 131072 bits"):
        read_checkpoint(checkpoint)
    with pytest.raises(UnsupportedStateError, match="more than 131072 bits") as caught:
        write_checkpoint(tmp_path / "c", {"x": {"y": Fraction(2**131072, 3)}})

    assert caught.value.key_path == "x.y"
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", [OrderedDict, Counter])
@pytest.mark.parametrize("name", ["items", "keys", "__class__", "copy"])
def test_an_attribute_that_hides_a_method_is_refused_by_both_sides(
    name: str, kind: Any, checkpoint: Path, tmp_path: Path
) -> None:
    """`state_dict.items()` would call a value of the file's."""
    node = {"$": kind.__name__, "v": {}, "attributes": {name: 5}}
    forge(checkpoint, "state.json", json.dumps({"state": [["x", node]]}).encode())
    value = kind()
    value.__dict__[name] = 5

    with pytest.raises(CorruptCheckpointError, match=f"an attribute '{name}', which the class has") as reading:
        read_checkpoint(checkpoint)
    with pytest.raises(UnsupportedStateError, match=f"its attribute '{name}' hides") as writing:
        write_checkpoint(tmp_path / "c", {"x": value})

    assert reading.value.file == "state.json"
    assert writing.value.key_path == "x"


def test_a_message_is_short_whatever_the_file_says(checkpoint: Path) -> None:
    """And it can be printed; the attribute has all of it."""
    name = "\x1b[2J" + "x" * 10**6
    document = json.loads((checkpoint / "index.json").read_bytes())
    document["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (checkpoint / "index.json").write_text(sealed(document))

    with pytest.raises(UnsafePathError) as caught:
        read_checkpoint(checkpoint)

    assert caught.value.file == name
    assert len(str(caught.value)) < 2000
    assert "\x1b" not in str(caught.value)
