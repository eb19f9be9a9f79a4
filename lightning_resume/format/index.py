"""``index.json``: what makes a directory a checkpoint. Strict in both directions; knows no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_resume.errors import CorruptCheckpointError, UnsafePathError, UnsupportedStateError
from lightning_resume.format.migrations import SCHEMA, require_known_schema, upgrade_index
from lightning_resume.format.strict_json import canonical_json, parse_json, require_whole_characters

INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 16 * 2**20
MAX_IDENTITY_DEPTH = 32
KINDS = ("full", "weights")

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RANK_JSON = re.compile(r"rank-[0-9]{5}\.json")
_DATA_FILE = re.compile(
    r"(?P<group>model|optimizer|state|rank-[0-9]{5})(?:-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5}))?\.safetensors"
)
_JSON_FILES = ("state.json", "model.safetensors.index.json")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        num_bytes: its size.
        sha256: digest of its contents, 64 hex digits.
    """

    num_bytes: int
    sha256: str


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "schema": str,
    "kind": str,
    "created": str,
    "run_id": (str, type(None)),
    "timeline": int,
    "counters": dict,
    "identity": dict,
    "metadata": dict,
    "versions": dict,
    "files": dict,
    "digest": str,
}


@dataclass(frozen=True)
class CheckpointIndex:
    """What a checkpoint's ``index.json`` says.

    Attributes:
        kind: "full", or "weights" for a model-only save.
        files: name → size and digest of every other file in the directory.
        counters: name → int, such as ``global_step``, ``current_epoch``, ``batch_in_epoch``, ``world_size``.
        identity: fingerprint of the data; plain JSON values.
        metadata: the caller's own texts.
        versions: of the libraries that wrote it.
        run_id: of the run that wrote it.
        timeline: number of times that the run had gone back to an earlier step before this save.
        created: moment of the save, ISO 8601 in UTC.
        schema: the schema string it was written in, after migration the newest.
        digest: sha256 over the canonical JSON of all the rest.
    """

    kind: str
    files: Mapping[str, FileEntry]
    counters: Mapping[str, int]
    identity: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    run_id: str | None = None
    timeline: int = 0
    created: str = ""
    schema: str = SCHEMA
    digest: str = ""

    @property
    def global_step(self) -> int | None:
        """Optimizer steps taken, or None if the save did not say."""
        return self.counters.get("global_step")

    @property
    def current_epoch(self) -> int | None:
        """The epoch in progress, or None if the save did not say."""
        return self.counters.get("current_epoch")

    @property
    def batch_in_epoch(self) -> int | None:
        """Batches trained in this epoch, or None if the save did not say."""
        return self.counters.get("batch_in_epoch")

    @property
    def world_size(self) -> int | None:
        """Number of processes at the save, or None if the save did not say."""
        return self.counters.get("world_size")

    @property
    def num_ranks(self) -> int:
        """Number of ranks with a state of their own in the checkpoint."""
        return sum(1 for name in self.files if _RANK_JSON.fullmatch(name))

    @property
    def num_bytes(self) -> int:
        """Size of all files but the index itself."""
        return sum(entry.num_bytes for entry in self.files.values())

    def with_files(self, files: Mapping[str, FileEntry]) -> CheckpointIndex:
        """The same index for these files."""
        return replace(self, files=dict(files))

    def shards(self, group: str) -> list[str]:
        """Names of a group's safetensors files ("model", "optimizer", "state", "rank-00000"), in order."""
        return sorted(name for name in self.files if (match := _DATA_FILE.fullmatch(name)) and match["group"] == group)


def index_to_bytes(index: CheckpointIndex) -> tuple[CheckpointIndex, bytes]:
    """Writes an index as JSON.

    Returns:
        The index with its digest, and the bytes of ``index.json``.

    Raises:
        UnsupportedStateError: counters, identity or metadata hold what JSON cannot hold exactly.
        TypeError: a counter is no int, or another field of the wrong type.
        ValueError: the timeline is negative, or the index would be larger than what may be read back.
    """
    for name, values, kind in (("counters", index.counters, int), ("metadata", index.metadata, str)):
        for key, value in values.items():
            if type(value) is not kind:
                raise TypeError(f"{name}[{key!r}]={value!r} is no {kind.__name__}")
    if index.run_id is not None and type(index.run_id) is not str:
        raise TypeError(f"run_id={index.run_id!r} is no str")
    if type(index.timeline) is not int:
        raise TypeError(f"timeline={index.timeline!r} is no int")
    if index.timeline < 0:
        raise ValueError(f"timeline={index.timeline} is negative")
    _require_plain(index.run_id, "run_id", 0)
    _require_plain(index.timeline, "timeline", 0)
    _require_plain(dict(index.counters), "counters", 0)
    _require_plain(dict(index.metadata), "metadata", 0)
    _require_plain(dict(index.identity), "identity", 0)
    document: dict[str, Any] = {
        "schema": index.schema,
        "kind": index.kind,
        "created": index.created,
        "run_id": index.run_id,
        "timeline": index.timeline,
        "counters": dict(index.counters),
        "identity": dict(index.identity),
        "metadata": dict(index.metadata),
        "versions": dict(index.versions),
        "files": {name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in index.files.items()},
    }
    document["digest"] = _digest(document)
    data = json.dumps(document, ensure_ascii=True, allow_nan=False, indent=1).encode("ascii") + b"\n"
    if len(data) > MAX_INDEX_BYTES:
        raise ValueError(
            f"the index would have {len(data)} bytes, more than {MAX_INDEX_BYTES}: make the identity shorter"
        )
    return index_from_bytes(data, ""), data


def index_from_bytes(data: bytes, path: str | os.PathLike[str]) -> CheckpointIndex:
    """Reads an index strictly: known fields of the right type only, its own digest right, safe file names.

    Args:
        data: contents of ``index.json``.
        path: the checkpoint's path, for messages.

    Raises:
        CorruptCheckpointError: it is not an index, or its digest is wrong.
        SchemaError: it was written in an unknown schema.
        UnsafePathError: it names a file outside the directory.
    """
    try:
        document = _parse(data)
        found = _digest({key: value for key, value in document.items() if key != "digest"})
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(path, INDEX_NAME, "an index in JSON", str(error)) from error
    require_known_schema(document, path)
    digest = document.get("digest")
    if digest != found:
        expected = digest[:100] if type(digest) is str else f"of type {type(digest).__name__}"
        raise CorruptCheckpointError(path, INDEX_NAME, f"digest {expected}", f"digest {found}")
    try:
        return _build(upgrade_index(document), path)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(path, INDEX_NAME, "an index of its schema", str(error)) from error


def require_safe_name(name: str, path: str | os.PathLike[str]) -> None:
    """Raises `UnsafePathError` unless the name is a plain file name: [A-Za-z0-9._-], no leading dot, no separator."""
    if not _SAFE_NAME.fullmatch(name):
        raise UnsafePathError(path, name)


def _parse(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_INDEX_BYTES:
        raise ValueError(f"{len(data)} bytes, more than {MAX_INDEX_BYTES}")
    document = parse_json(data)
    if type(document) is not dict:
        raise ValueError("no JSON object")
    require_whole_characters(document)
    return document


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(document)).hexdigest()


def _build(document: dict[str, Any], path: str | os.PathLike[str]) -> CheckpointIndex:
    if document.keys() != _FIELDS.keys():
        raise ValueError(f"fields {sorted(document)}")
    for name, types in _FIELDS.items():
        if not isinstance(document[name], types):
            raise ValueError(f"{name} of type {type(document[name]).__name__}")
    if document["kind"] not in KINDS:
        raise ValueError(f"kind {document['kind']!r}")
    if type(document["timeline"]) is not int or not 0 <= document["timeline"] < 2**63:
        raise ValueError(f"timeline {document['timeline']!r}")
    if not all(type(value) is int for value in document["counters"].values()):
        raise ValueError("a counter that is no int")
    for name in ("metadata", "versions"):
        if not all(type(value) is str for value in document[name].values()):
            raise ValueError(f"{name} with a value that is no text")
    if _depth(document["identity"]) > MAX_IDENTITY_DEPTH:
        raise ValueError("an identity nested too deeply")
    for name in document["files"]:
        require_safe_name(name, path)
    files = {name: _file_entry(name, entry) for name, entry in document["files"].items()}
    _require_known_files(files)
    return CheckpointIndex(**{**document, "files": files})


def _file_entry(name: str, entry: Any) -> FileEntry:
    if type(entry) is not dict or entry.keys() != {"bytes", "sha256"}:
        raise ValueError(f"no size and digest for {name}")
    num_bytes, digest = entry["bytes"], entry["sha256"]
    if type(num_bytes) is not int or num_bytes < 0 or type(digest) is not str or not _DIGEST.fullmatch(digest):
        raise ValueError(f"a malformed size or digest for {name}")
    return FileEntry(num_bytes, digest)


def _require_known_files(files: Mapping[str, FileEntry]) -> None:
    shards: dict[str, list[tuple[int, int]]] = {}
    for name in files:
        match = _DATA_FILE.fullmatch(name)
        if match:
            shards.setdefault(match["group"], []).append((int(match["number"] or 1), int(match["count"] or 1)))
        elif name not in _JSON_FILES and not _RANK_JSON.fullmatch(name):
            raise ValueError(f"a file that does not belong to this schema: {name}")
    if "state.json" not in files:
        raise ValueError("no state.json")
    for group, numbers in shards.items():
        if sorted(numbers) != [(number + 1, len(numbers)) for number in range(len(numbers))]:
            raise ValueError(f"an incomplete set of {group} shards")
    ranks = sorted(name for name in files if _RANK_JSON.fullmatch(name))
    if ranks != [f"rank-{rank:05d}.json" for rank in range(len(ranks))]:
        raise ValueError("an incomplete set of ranks")


_REMEDY = "Turn it into plain JSON values."


def _require_plain(value: Any, key_path: str, depth: int) -> None:
    kind = type(value)
    if depth > MAX_IDENTITY_DEPTH:
        raise UnsupportedStateError(key_path, "it is nested too deeply", _REMEDY)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise UnsupportedStateError(f"{key_path}.{key}", "the index takes keys of type str only", _REMEDY)
            _require_plain(key, f"{key_path}.{key}", depth + 1)
            _require_plain(item, f"{key_path}.{key}", depth + 1)
    elif kind is list:
        for number, item in enumerate(value):
            _require_plain(item, f"{key_path}.{number}", depth + 1)
    elif kind is str:
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise UnsupportedStateError(key_path, "the index takes no lone surrogates", _REMEDY)
    elif kind is int:
        if not -(2**63) <= value < 2**63:
            raise UnsupportedStateError(key_path, "the index takes ints of 64 bits only", _REMEDY)
    elif kind is float:
        if value != value or value in (float("inf"), float("-inf")):
            raise UnsupportedStateError(key_path, "the index takes finite floats only", _REMEDY)
    elif value is not None and kind is not bool:
        reason = f"the index takes None, bool, int, float, str, list and dict only, not {kind.__name__}"
        raise UnsupportedStateError(key_path, reason, _REMEDY)


def _depth(value: Any) -> int:
    items = value.values() if type(value) is dict else value if type(value) is list else ()
    return 1 + max(map(_depth, items), default=0)
