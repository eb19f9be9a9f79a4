"""`index.json` says what a checkpoint is; the reader takes nothing that a writer of this schema would not write."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resume.errors import CorruptCheckpointError, SchemaError, UnsafePathError, UnsupportedStateError
from lightning_resume.format.checkpoint import read_index, verify_checkpoint, write_checkpoint
from lightning_resume.format.index import index_from_bytes
from lightning_resume.format.migrations import SCHEMA, require_known_schema, upgrade_index

COUNTERS = {"global_step": 12, "current_epoch": 1, "batch_in_epoch": 4, "world_size": 2}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small checkpoint with all that an index can hold."""
    path = tmp_path / "step-00000012"
    write_checkpoint(
        path,
        {"state_dict": {"w": torch.ones(3)}, "optimizer_states": [{"m": torch.ones(1)}], "x": torch.ones(2)},
        rank_states=[{"r": 0}, {"r": torch.ones(1)}],
        counters=COUNTERS,
        identity={"length": 32, "sampler": {"shuffle": True, "seed": None}, "sizes": [4, 0.5]},
        run_id="run",
        timeline=1,
        metadata={"note": "Grüße"},
    )
    return path


def resign(document: dict[str, Any]) -> bytes:
    """JSON of an index whose digest is right: what someone who knows the format can forge."""
    document = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return json.dumps({**document, "digest": hashlib.sha256(text.encode()).hexdigest()}).encode()


def test_the_index_holds_what_was_given(checkpoint: Path) -> None:
    """Counters, identity, run and texts; sizes and digests of all other files; when and by what it was written."""
    index = read_index(checkpoint)

    assert (index.global_step, index.current_epoch, index.batch_in_epoch, index.world_size) == (12, 1, 4, 2)
    assert index.identity == {"length": 32, "sampler": {"shuffle": True, "seed": None}, "sizes": [4, 0.5]}
    assert (index.kind, index.run_id, index.metadata) == ("full", "run", {"note": "Grüße"})
    assert (index.num_ranks, index.schema, index.timeline) == (2, "lightning-resume/2", 1)
    assert index.versions["torch"] == torch.__version__
    assert datetime.now(timezone.utc) - datetime.fromisoformat(index.created) < timedelta(minutes=5)
    assert {*index.files, "index.json"} == {path.name for path in checkpoint.iterdir()}
    for name, entry in index.files.items():
        data = (checkpoint / name).read_bytes()
        assert (entry.num_bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert index.num_bytes == sum(path.stat().st_size for path in checkpoint.iterdir() if path.name != "index.json")


def test_what_was_not_given_is_none_or_empty(tmp_path: Path) -> None:
    """A plain loop need not count anything."""
    index = write_checkpoint(tmp_path / "c", {})

    assert (index.global_step, index.current_epoch, index.batch_in_epoch, index.world_size) == (None,) * 4
    assert (index.run_id, index.identity, index.metadata, index.num_ranks) == (None, {}, {}, 0)
    assert index.timeline == 0


def test_the_index_that_was_returned_is_the_one_on_disk(checkpoint: Path) -> None:
    """A caller can keep it instead of reading it again; it can be sent to another process."""
    index = read_index(checkpoint)

    again = write_checkpoint(checkpoint, {"a": 1}, overwrite=True)

    assert again == read_index(checkpoint)
    assert again != index
    assert pickle.loads(pickle.dumps(index)) == index


def test_the_digest_is_over_the_canonical_json(checkpoint: Path) -> None:
    """sha256 of the document without its digest, keys sorted, no spaces: anyone can compute it."""
    document = json.loads((checkpoint / "index.json").read_text())

    assert (
        resign(document)
        == json.dumps(
            {**{key: value for key, value in document.items() if key != "digest"}, "digest": document["digest"]}
        ).encode()
    )


def test_a_changed_value_with_the_old_digest_is_corrupt(checkpoint: Path) -> None:
    """A flipped digit in the step number does not pass."""
    text = (checkpoint / "index.json").read_text().replace('"global_step": 12', '"global_step": 13')
    (checkpoint / "index.json").write_text(text)

    with pytest.raises(CorruptCheckpointError, match="digest") as caught:
        read_index(checkpoint)

    assert caught.value.file == "index.json"


def without(name: str) -> Callable[[dict[str, Any]], object]:
    """A change that drops a field."""
    return lambda document: document.pop(name)


def with_(**fields: Any) -> Callable[[dict[str, Any]], object]:
    """A change that sets fields."""
    return lambda document: document.update(fields)


def with_file(name: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    """A change that adds a file, or changes what stands for one."""
    default = {"bytes": 1, "sha256": "0" * 64}
    return lambda document: document["files"].update({name: {**document["files"].get(name, default), **fields}})


@pytest.mark.parametrize(
    "change",
    [
        *[
            without(name)
            for name in ("kind", "created", "run_id", "timeline", "counters", "identity", "versions", "files")
        ],
        with_(more=1),
        with_(kind="partial"),
        with_(kind=None),
        with_(created=5),
        with_(run_id=5),
        with_(timeline=-1),
        with_(timeline=True),
        with_(timeline=1.0),
        with_(timeline=None),
        with_(timeline=2**63),
        with_(schema="lightning-resume/1"),
        with_(counters=[]),
        with_(counters={"global_step": 1.0}),
        with_(counters={"global_step": True}),
        with_(counters={"global_step": "1"}),
        with_(metadata={"a": 1}),
        with_(versions={"torch": None}),
        with_(identity=None),
        with_(files=[]),
        with_(files={}),
        with_file("state.json", bytes=-1),
        with_file("state.json", bytes=1.0),
        with_file("state.json", bytes=True),
        with_file("state.json", sha256="0" * 63),
        with_file("state.json", sha256="X" * 64),
        with_file("state.json", more=1),
        with_file("notes.txt"),
        with_file("model.pt"),
        with_file("model-00001-of-00002.safetensors"),
        with_file("optimizer-00002-of-00002.safetensors"),
        with_file("rank-00007.json"),
        with_file("rank-1.json"),
        with_file("state.json."),
        with_file("model.safetensors.."),
        with_file("a..b"),
        with_file("CON"),
        lambda document: document["files"].pop("state.json"),
        lambda document: document["files"].pop("rank-00000.json"),
    ],
)
def test_a_forged_index_with_a_right_digest_is_corrupt(change: Any, checkpoint: Path) -> None:
    """Known fields of the right type only, a complete set of files of known names, nothing else."""
    document = json.loads((checkpoint / "index.json").read_text())
    change(document)

    with pytest.raises(CorruptCheckpointError) as caught:
        index_from_bytes(resign(document), checkpoint)

    assert caught.value.file == "index.json"
    assert caught.value.path == str(checkpoint)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "Expecting value"),
        (b"\x00\xff\xfe binary", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"[1]", "no JSON object"),
        (b"{} {}", "Extra data"),
        (b'{"schema": "a", "schema": "b"}', "stands twice"),
        (b'{"counters": {"a": 1, "a": 1}}', "stands twice"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"1" * 5000 + b"}", "a number of 5000 digits"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b'{"a":' * 100_000, "nested too deeply"),
        (b"{}" + b" " * (16 * 2**20), "more than"),
    ],
)
def test_anything_else_than_an_index_is_corrupt(data: bytes, found: str) -> None:
    """Garbage of every kind ends in one typed error, in bounded time and memory."""
    with pytest.raises(CorruptCheckpointError) as caught:
        index_from_bytes(data, "c")

    assert found in caught.value.found


def test_a_deep_identity_is_refused_when_read_and_when_written(checkpoint: Path) -> None:
    """What is written can be read, and the other way round."""
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    document = json.loads((checkpoint / "index.json").read_text())
    document["identity"] = {"a": deep}

    with pytest.raises(CorruptCheckpointError, match="nested too deeply"):
        index_from_bytes(resign(document), checkpoint)
    with pytest.raises(UnsupportedStateError, match="nested too deeply"):
        write_checkpoint(checkpoint, {}, identity={"a": deep}, overwrite=True)


@pytest.mark.parametrize(
    ("arguments", "key_path"),
    [
        ({"identity": {"a": {"b": (1, 2)}}}, "identity.a.b"),
        ({"identity": {"a": {1: 2}}}, "identity.a.1"),
        ({"identity": {"a": float("nan")}}, "identity.a"),
        ({"identity": {"a": torch.ones(1)}}, "identity.a"),
        ({"identity": {"a": [2**64]}}, "identity.a.0"),
        ({"identity": {"\ud800": 1}}, "identity.\ud800"),
        ({"counters": {"a": 2**63}}, "counters.a"),
        ({"metadata": {"a": "\udfff"}}, "metadata.a"),
        ({"timeline": 2**63}, "timeline"),
    ],
)
def test_what_the_index_cannot_hold_exactly_is_refused(
    arguments: dict[str, Any], key_path: str, tmp_path: Path
) -> None:
    """A tuple would come back as a list, a key 1 as "1": then identities would differ that are the same."""
    with pytest.raises(UnsupportedStateError) as caught:
        write_checkpoint(tmp_path / "c", {}, **arguments)

    assert caught.value.key_path == key_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [{"counters": {"a": 1.5}}, {"counters": {"a": True}}, {"metadata": {"a": 1}}], ids=str
)
def test_counters_are_ints_and_metadata_texts(arguments: dict[str, Any], tmp_path: Path) -> None:
    """The writer's index has to pass the reader's check before anything is created."""
    with pytest.raises(TypeError, match=r"\['a'\]=.* is no (int|str)"):
        write_checkpoint(tmp_path / "c", {}, **arguments)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("timeline", "error"), [(-1, ValueError), (True, TypeError), (1.0, TypeError)])
def test_a_timeline_is_a_count(timeline: Any, error: type[Exception], tmp_path: Path) -> None:
    """How often a run has gone back: refused before anything is created."""
    with pytest.raises(error, match=f"timeline={timeline}"):
        write_checkpoint(tmp_path / "c", {}, timeline=timeline)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("schema", ["lightning-resume/3", "lightning-resume/999"])
def test_an_unknown_schema_is_named_with_what_can_be_read(schema: str, checkpoint: Path) -> None:
    """A newer version's checkpoint is not called corrupt, whatever else it holds."""
    (checkpoint / "index.json").write_text(json.dumps({"schema": schema, "new": "fields"}))

    with pytest.raises(SchemaError, match="newer") as caught:
        read_index(checkpoint)

    assert (caught.value.found, caught.value.supported) == (schema, ("lightning-resume/1", "lightning-resume/2"))


@pytest.mark.parametrize("schema", [None, 1, "", "other/1", "lightning-resume/x", "lightning-resume/1 "])
def test_a_schema_of_another_kind_is_corrupt(schema: Any, checkpoint: Path) -> None:
    """It is no version of this format."""
    document = json.loads((checkpoint / "index.json").read_text())

    with pytest.raises(CorruptCheckpointError, match="schema"):
        index_from_bytes(resign({**document, "schema": schema}), checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/../../model.safetensors",
        "..",
        ".",
        "",
        ".hidden.safetensors",
        "a\\b.safetensors",
        "model.safetensors\n",
        "mödel.safetensors",
        "model\0.safetensors",
        "C:model.safetensors",
        "model.safetensors:stream",
        "model\\..\\..\\x.safetensors",
        "model.safetensors/",
        "x" * 300,
    ],
    ids=ascii,
)
def test_a_name_that_could_lead_out_is_refused_before_anything_is_opened(
    name: str, checkpoint: Path, monkeypatch: Any
) -> None:
    """The digest is right: only the name is wrong, and the message says which."""
    document = json.loads((checkpoint / "index.json").read_text())
    document["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (checkpoint / "index.json").write_bytes(resign(document))
    opened: list[str] = []
    real_open = __import__("os").open
    monkeypatch.setattr("os.open", lambda path, *a, **k: opened.append(str(path)) or real_open(path, *a, **k))

    with pytest.raises(UnsafePathError) as caught:
        verify_checkpoint(checkpoint)

    assert caught.value.file == name
    assert repr(name) in str(caught.value)
    assert opened == [str(checkpoint), "index.json"]


def test_migration_steps_are_applied_in_order_and_leave_their_input_alone() -> None:
    """Pure functions from one schema to the next."""
    steps = {
        "lightning-resume/1": lambda d: {**d, "schema": "lightning-resume/2", "log": [*d["log"], 1]},
        "lightning-resume/2": lambda d: {**d, "schema": "lightning-resume/3", "log": [*d["log"], 2]},
    }
    document = {"schema": "lightning-resume/1", "log": []}

    result = upgrade_index(document, steps=steps, newest="lightning-resume/3")

    assert result == {"schema": "lightning-resume/3", "log": [1, 2]}
    assert document == {"schema": "lightning-resume/1", "log": []}


def test_a_schema_is_known_if_a_step_leads_on_from_it() -> None:
    """Old ones are read for ever, newer ones refused."""
    steps = {"lightning-resume/1": dict}

    require_known_schema({"schema": "lightning-resume/1"}, "c", steps=steps, newest="lightning-resume/2")
    with pytest.raises(SchemaError) as caught:
        require_known_schema({"schema": "lightning-resume/3"}, "c", steps=steps, newest="lightning-resume/2")

    assert caught.value.supported == ("lightning-resume/1", "lightning-resume/2")
    assert SCHEMA == "lightning-resume/2"
