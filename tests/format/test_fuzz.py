"""Ten thousand damaged or forged checkpoints: each is read, or refused by an error of this package, and nothing else.

Two kinds of inputs. Raw: bytes of a file are flipped, cut, inserted, copied. Forged: a JSON value, key or header entry
is exchanged and every digest up to the index's own is redone, so that what stands behind the digests is reached.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_resume.catalog import scan_checkpoints
from lightning_resume.errors import ResumeError
from lightning_resume.format.checkpoint import read_checkpoint, read_index, verify_checkpoint, write_checkpoint
from lightning_resume.format.registry import DECODERS, register_type

STATES = ["state.json", "rank-00000.json"]
SHARDS = ["model.safetensors", "state.safetensors", "optimizer.safetensors"]
NUM_RAW = {"index.json": 600, "state.json": 600, "model.safetensors": 600}
NUM_RAW_SEALED = {"state.json": 800, "model.safetensors": 800}
NUM_FORGED = {"index.json": 2000, "state.json": 2600, "shard": 2000}

MAX_MESSAGE_CHARS = 10_000
MAX_GROWTH_BYTES = 256 * 2**20


def fuzz(num_inputs: int) -> settings:
    """The same inputs every time, each of which may take as long as it takes on a busy machine."""
    return settings(
        max_examples=num_inputs,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# -- the checkpoint ----------------------------------------------------------------------------------------------------


@dataclass
class Colour:
    """A class of the user's."""

    red: int


register_type(Colour, name="tests.Colour")


def everything() -> dict[str, Any]:
    """A state in which each encoding occurs."""
    versions: OrderedDict[str, Any] = OrderedDict(a=1)
    versions._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    return {
        "state_dict": OrderedDict(a=torch.arange(4.0), b=torch.arange(6).reshape(2, 3).t()),
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"betas": (0.9, 0.99)}]}],
        "tensors": [
            torch.ones(2, dtype=torch.complex128),
            torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
            torch.nn.Parameter(torch.ones(2)),
            torch.eye(2).to_sparse(),
            torch.eye(2).to_sparse_csr(),
            torch.float8_e5m2,
            torch.device("cpu"),
            torch.Size([2, 3]),
            torch.channels_last,
            torch.strided,
        ],
        "arrays": (np.arange(6).reshape(2, 3).T, np.float32(1.5), np.array(["x", "yz"]), np.str_("s"), np.dtype("<i4")),
        "texts": ["plain", "\ud800", b"short", bytes(2000), bytearray(2000), list(range(600)), ("t",) * 2],
        "numbers": [2**70, -(2**70), float("nan"), 1j, range(3), slice(1, 2), Fraction(1, 3), Decimal("1.5")],
        "mappings": [{1: 2, (3, "x"): {}}, versions, Counter("aab"), defaultdict(list, a=[1]), deque([1], 3), {4}],
        "others": [
            datetime(2024, 5, 1, tzinfo=timezone.utc),
            timedelta(3),
            UUID(int=5),
            PurePosixPath("a"),
            ...,
            Colour(3),
        ],
    }


def a_little() -> dict[str, Any]:
    """A state with as many files, and little in them."""
    state = everything()
    return {**{key: state[key] for key in ("state_dict", "optimizer_states")}, "tensors": state["tensors"][:2]}


class Forge:
    """A sound checkpoint, and the means to put other bytes into it."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self.path = folder / "step-00000003"
        write_checkpoint(
            self.path,
            state,
            rank_states=[{"rng": torch.arange(3), "place": [1, {2: (3,)}]}],
            counters={"global_step": 3, "current_epoch": 1},
            identity={"data": {"length": 3, "digests": ["a", 1.5, None]}},
            metadata={"note": "x"},
            run_id="r",
        )
        self.files = {file.name: file.read_bytes() for file in self.path.iterdir()}

    def put(self, name: str, data: bytes, *, seal: bool) -> None:
        """Writes a file; with `seal` the index vouches for it, as someone who knows the format can do."""
        self._write(name, data)
        if seal:
            document = json.loads(self.files["index.json"])
            document["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            self._write("index.json", sealed(Pairs(document.items())))

    def mend(self, name: str) -> None:
        """Puts the sound file back."""
        for file in {name, "index.json"}:
            self._write(file, self.files[file])

    def _write(self, name: str, data: bytes) -> None:
        (self.path / name).unlink()  # some file systems write a file that is cut short to the disk at once
        (self.path / name).write_bytes(data)


# -- JSON as a tree in which anything can be said ----------------------------------------------------------------------


class Pairs(list[Any]):
    """A JSON object whose keys may stand twice."""


class Raw(str):
    """A piece of text to be written as it is."""


def parsed(data: bytes) -> Any:
    """The tree of a text."""
    return json.loads(data, object_pairs_hook=Pairs)


def written(tree: Any) -> str:
    """The text of a tree."""
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, dict):
        tree = Pairs(tree.items())
    if isinstance(tree, Pairs):
        return "{" + ",".join(f"{quoted(key)}:{written(value)}" for key, value in tree) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(written, tree)) + "]"
    if isinstance(tree, str):
        return quoted(tree)
    return json.dumps(tree)


def sealed(tree: Any) -> bytes:
    """The text of an index whose digest is right, where there can be one."""
    text = written(tree)
    try:
        document = json.loads(text)
        document.pop("digest", None)
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    except (ValueError, AttributeError, RecursionError):
        return text.encode()
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return written(Pairs([*(pair for pair in tree if pair[0] != "digest"), ("digest", digest)])).encode()


def places(tree: Any, root: Any = None) -> list[tuple[Any, int]]:
    """Every place in a tree that holds a value: container and number."""
    found: list[tuple[Any, int]] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, list) and not isinstance(node, tuple):
            for number, item in enumerate(node):
                found.append((node, number))
                pending.append(item[1] if isinstance(node, Pairs) else item)
    return found


SCALARS: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 63, 2**31, 2**62, 2**63 - 1, 2**63, -(2**63), 0.5, -0.0, 1e308),
    *map(Raw, ("NaN", "-Infinity", "1e999", "9" * 20, "9" * 5000, "1." + "0" * 50, "01", "0x1", "'x'", "")),
    *(
        "",
        "x",
        "state",
        "model",
        "rank-00000",
        "rng",
        "a",
        "b",
        "load",
        "_inductor",
        "onnx",
        "os.system",
        "tests.Colour",
    ),
    *("../x", "/etc/passwd", "a\\b", "a\0b", "C:x", "x.", "\ud800", "é" * 300, "x" * 20_000, "0", "ff", "0xff", "-0x1"),
    *("<f8", "|O8", "<i8,<i8", "|S999999999", "<U0", "|V8", "M8[s]", "F", "C", "sparse_coo", "sparse_csr", "float32"),
    *("complex128", "float8_e8m0fnu", "cuda:0", "meta", "channels_last", "F64", "I64", "F8_E4M3", "lightning-resume/2"),
]
CONTAINERS: list[Any] = [
    [], Pairs(), [0], [1, 2], [3, 2], [-1], [2**40], [2**62, 4], [0, 2**62, 2**62], [1] * 65, ["a"], [[1, 2]],
    Pairs([("a", 1)]), Pairs([("a", 1), ("a", 2)]), Pairs([("$", "tensor")]), Pairs([("$", "x"), ("$", "tuple")]),
    Pairs([("items", 5), ("keys", 5), ("__class__", 5)]),
    Raw("[" * 300 + "]" * 300), Raw("[" * 990 + "]" * 990), Raw("[" * 20_000 + "]" * 20_000),
    Raw('{"a":' * 400 + "1" + "}" * 400), Raw('{"$":"tuple","v":[' * 300 + "]}" * 300), Raw("[" * 50_000),
]  # fmt: skip
VALUES = SCALARS + CONTAINERS
TAGS = [*DECODERS, "unknown", "Colour"]
FIELDS = ["v", "f", "n", "dtype", "char", "shape", "order", "stride", "parameter", "grad", "factory", "maxlen"]
FIELDS += ["attributes", "name", "layout", "size", "coalesced", "indices", "values", "outer", "inner", "more"]


def node_of(generator: random.Random, names: list[tuple[str, str]]) -> Pairs:
    """A skeleton node of any tag with any fields; mostly with a reference to data that is there."""
    node = Pairs([("$", generator.choice(TAGS))])
    if generator.random() < 0.6:
        group, name = generator.choice(names)
        node += [("f", group), ("n", name)]
    for field in generator.sample(FIELDS, generator.randint(0, 4)):
        node.append((field, copy.deepcopy(generator.choice(VALUES))))
    return node


NAMES = [
    ("model", "a"),
    ("model", "b"),
    ("optimizer", "0.state.0.exp_avg"),
    ("state", "tensors.0"),
    ("state", "texts.3"),
]
NAMES += [("state", "arrays.0"), ("state", "texts.5"), ("rank-00000", "rng"), ("nowhere", "a"), ("model", "missing")]


def changed(tree: Any, place: int, seed: int, kind: str) -> None:
    """Changes one value, key or item of a tree."""
    found = places(tree)
    if not found:
        return
    parent, number = found[place % len(found)]
    generator = random.Random(seed)
    is_pair = isinstance(parent, Pairs)
    key, value = parent[number] if is_pair else (None, parent[number])
    if kind == "delete":
        del parent[number]
        return
    if kind == "double":
        parent.insert(generator.randint(0, len(parent)), copy.deepcopy(parent[number]))
        return
    if kind == "key" and is_pair:
        key = generator.choice([str(item) for item in VALUES if isinstance(item, str)] + FIELDS + ["$"])
    elif kind == "other":
        other, at = generator.choice(found)
        value = copy.deepcopy(other[at][1] if isinstance(other, Pairs) else other[at])
    elif kind == "node":
        value = node_of(generator, NAMES)
    elif kind == "wrap":
        value = generator.choice([[value], Pairs([("x", value)]), Pairs([("$", generator.choice(TAGS)), ("v", value)])])
    elif kind == "nudge" and type(value) is int:
        value += generator.choice([-1, 1, 8, -8, 2**20, 2**40, -(2**40), 2**62])
    elif kind == "tag" and isinstance(value, Pairs):
        value[:] = [("$", generator.choice(TAGS)) if name == "$" else (name, item) for name, item in value]
    else:
        value = copy.deepcopy(generator.choice(VALUES))
    parent[number] = (key, value) if is_pair else value


KINDS = ["value", "value", "delete", "double", "key", "other", "node", "wrap", "nudge", "tag"]
NUMBER = st.integers(0, 2**20)
TREE_CHANGES = st.lists(st.tuples(NUMBER, NUMBER, st.sampled_from(KINDS)), min_size=1, max_size=3)
BYTE_CHANGES = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "drop", "insert", "copy"]), NUMBER, st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    """Changes bytes, without knowing what they mean."""
    buffer = bytearray(data)
    for kind, number, value in changes:
        at = number % max(len(buffer), 1)
        if kind == "flip" and buffer:
            buffer[at] ^= value or 1
        elif kind == "cut":
            del buffer[at:]
        elif kind == "drop":
            del buffer[at : at + value]
        elif kind == "insert":
            buffer[at:at] = bytes([value]) * (1 + number % 5)
        elif kind == "copy":
            buffer[at:at] = buffer[value : value + number % 40]
    return bytes(buffer)


def header_changed(data: bytes, changes: list[tuple[int, int, str]], lie: int) -> bytes:
    """Changes the header of a shard; the length before it is right, or a lie."""
    length = int.from_bytes(data[:8], "little")
    tree = [parsed(data[8 : 8 + length])]
    for place, seed, kind in changes:
        changed(tree, place, seed, kind)
    text = "".join(map(written, tree)).encode()
    told = [len(text)] * 6 + [len(text) + 1, len(text) - 1, 0, 2**63, 2**64 - 1, 10**8]
    return (max(told[lie % len(told)], 0)).to_bytes(8, "little") + text + data[8 + length :]


# -- what is watched ---------------------------------------------------------------------------------------------------


class Watch:
    """Notes what the interpreter does while it is on: files, imports, code. A hook cannot be taken out again."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[tuple[str, Any]] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event.startswith(self._PREFIXES):
            self.seen.append((event, arguments[0] if arguments else None))

    _PREFIXES = ("open", "import", "exec", "compile", "pickle.", "marshal.", "os.", "subprocess.", "socket.", "ctypes.")


@pytest.fixture(scope="module")
def watch() -> Watch:
    """One hook for all tests of the module."""
    return Watch()


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory, watch: Watch) -> Forge:
    """A checkpoint of everything, read once so that all is imported that reading needs."""
    forge = Forge(tmp_path_factory.mktemp("fuzz"), everything())
    read_checkpoint(forge.path)
    assert look(forge, watch) == {"read"}
    return forge


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, rich: Forge, watch: Watch) -> Forge:
    """One that is read quickly."""
    forge = Forge(tmp_path_factory.mktemp("fuzz"), a_little())
    assert look(forge, watch) == {"read"}
    return forge


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """No input makes a reader take more than a constant, whatever sizes it names."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    yield

    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert growth < MAX_GROWTH_BYTES


def streams() -> tuple[Any, ...]:
    """The global random streams, as they stand."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def look(forge: Forge, watch: Watch) -> set[str]:
    """Reads a checkpoint in all ways; whatever is no error of this package passes on. Returns the outcomes."""
    readers: list[Callable[[], Any]] = [
        lambda: read_index(forge.path),
        lambda: verify_checkpoint(forge.path),
        lambda: read_checkpoint(forge.path, rank=0),
    ]
    before, outcomes = streams(), set()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        watch.seen, watch.is_on = [], True
        try:
            for reader in readers:
                try:
                    reader()
                    outcomes.add("read")
                except ResumeError as error:
                    message = str(error)
                    outcomes.add("refused")
                    assert len(message) < MAX_MESSAGE_CHARS
                    message.encode()  # can be printed
            (info,) = scan_checkpoints(forge.path.parent)
            str(info).encode()
        finally:
            watch.is_on = False
    assert (info.path, info.status in ("good", "corrupt")) == (forge.path, True)
    assert [event for event in watch.seen if not is_inside(forge, *event)] == []
    assert [str(warning.message) for warning in told] == []
    assert streams() == before
    return outcomes


def is_inside(forge: Forge, event: str, argument: Any) -> bool:
    """Whether an event is the opening or listing of the checkpoint, its folder or one of its files."""
    if event == "open":  # a handle, or a plain name relative to the handle on the directory
        return type(argument) is int or argument in forge.files or str(argument) == str(forge.path)
    return event == "os.listdir" and (type(argument) is int or Path(argument) in (forge.path, forge.path.parent))


def nothing_lies_where_we_stand() -> bool:
    """Whether a plain name could only be found relative to the checkpoint's handle."""
    return not {*STATES, *SHARDS, "index.json"} & set(os.listdir())


def looked_at(forge: Forge, watch: Watch, name: str, data: bytes, *, seal: bool) -> set[str]:
    """What became of looking at the checkpoint with one file replaced, which is put right again."""
    forge.put(name, data, seal=seal)
    try:
        return set(look(forge, watch))
    finally:
        forge.mend(name)


# -- the inputs --------------------------------------------------------------------------------------------------------


def test_there_are_ten_thousand_inputs() -> None:
    """And plain file names do not exist in the directory in which the tests run."""
    numbers = [*NUM_RAW.values(), *NUM_RAW_SEALED.values(), *NUM_FORGED.values()]

    assert sum(numbers) >= 10_000
    assert nothing_lies_where_we_stand()


def means_the_same(data: bytes, forge: Forge) -> bool:
    """Whether white space is all that differs."""
    return bool(parsed(data) == parsed(forge.files["index.json"]))


@pytest.mark.parametrize("name", NUM_RAW)
def test_damaged_bytes_are_refused(name: str, small: Forge, watch: Watch) -> None:
    """Any damage to a file is found by its digest; what is damaged back to itself is read."""
    outcomes = set()

    @fuzz(NUM_RAW[name])
    @given(changes=BYTE_CHANGES)
    def run(changes: list[tuple[str, int, int]]) -> None:
        data = damaged(small.files[name], changes)
        found = looked_at(small, watch, name, data, seal=False)
        assert "refused" in found or data == small.files[name] or (name == "index.json" and means_the_same(data, small))
        outcomes.update(found)

    run()

    assert "refused" in outcomes


@pytest.mark.parametrize("name", NUM_RAW_SEALED)
def test_damaged_bytes_with_right_digests_are_read_or_refused(name: str, small: Forge, watch: Watch) -> None:
    """The digests say nothing against them: what they mean has to be looked at."""
    outcomes = set()

    @fuzz(NUM_RAW_SEALED[name])
    @given(changes=BYTE_CHANGES)
    def run(changes: list[tuple[str, int, int]]) -> None:
        outcomes.update(looked_at(small, watch, name, damaged(small.files[name], changes), seal=True))

    run()

    assert outcomes == {"read", "refused"}


def test_a_forged_index_is_read_or_refused(small: Forge, watch: Watch) -> None:
    """Its own digest is redone after one to three changes."""
    outcomes = set()

    @fuzz(NUM_FORGED["index.json"])
    @given(changes=TREE_CHANGES)
    def run(changes: list[tuple[int, int, str]]) -> None:
        tree = parsed(small.files["index.json"])
        for place, seed, kind in changes:
            changed(tree, place, seed, kind)
        outcomes.update(looked_at(small, watch, "index.json", sealed(tree), seal=False))

    run()

    assert outcomes == {"read", "refused"}


def test_a_forged_state_is_read_or_refused(rich: Forge, watch: Watch) -> None:
    """Nodes of any tag with any fields; digests of file and index are redone."""
    outcomes = set()

    @fuzz(NUM_FORGED["state.json"])
    @given(name=st.sampled_from([*STATES, "state.json"]), changes=TREE_CHANGES)
    def run(name: str, changes: list[tuple[int, int, str]]) -> None:
        tree = parsed(rich.files[name])
        for place, seed, kind in changes:
            changed(tree, place, seed, kind)
        outcomes.update(looked_at(rich, watch, name, written(tree).encode(), seal=True))

    run()

    assert outcomes == {"read", "refused"}


def test_a_forged_header_is_read_or_refused(small: Forge, watch: Watch) -> None:
    """Offsets, shapes, dtypes, names and the length itself; digests of file and index are redone."""
    outcomes = set()

    @fuzz(NUM_FORGED["shard"])
    @given(name=st.sampled_from(SHARDS), changes=TREE_CHANGES, lie=st.integers(0, 11))
    def run(name: str, changes: list[tuple[int, int, str]], lie: int) -> None:
        outcomes.update(looked_at(small, watch, name, header_changed(small.files[name], changes, lie), seal=True))

    run()

    assert outcomes == {"read", "refused"}
