"""Rewriting a checkpoint of an older schema in its place: verified first, durable, and whole at every instant."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_durable_writes import fail_at, intercepted, killed_child, save, value_of

from lightning_resume.catalog import clean_incomplete, scan_checkpoints
from lightning_resume.errors import CheckpointWriteError, CorruptCheckpointError
from lightning_resume.format.migrate import migrate_checkpoint
from lightning_resume.format.migrations import SCHEMA
from lightning_resume.format.strict_json import canonical_json, parse_json
from lightning_resume.format.verify import read_index, verify_checkpoint

SCHEMA_1 = Path(__file__).parent / "frozen" / "schema-1"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of schema 1."""
    return Path(shutil.copytree(SCHEMA_1, tmp_path / "step-00000003"))


def save_schema_1(path: Path) -> Path:
    """A checkpoint of a few small files, as schema 1 wrote it."""
    save(path, 1.0)
    document = parse_json((path / "index.json").read_bytes())
    document = {name: value for name, value in document.items() if name not in ("timeline", "digest")}
    document["schema"] = "lightning-resume/1"
    digest = hashlib.sha256(canonical_json(document)).hexdigest()
    (path / "index.json").write_text(json.dumps({**document, "digest": digest}))
    return path


def schema_of(path: Path) -> str:
    """The schema that stands in the index on disk."""
    return str(parse_json((path / "index.json").read_bytes())["schema"])


def data_of(path: Path) -> dict[str, bytes]:
    """The contents of all files but the index."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "index.json"}


def refuse(*arguments: Any, **keywords: Any) -> None:
    """A file system without hard links."""
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("can_link", [True, False], ids=["linked", "copied"])
def test_a_migrated_checkpoint_has_the_newest_index_and_the_same_data(
    can_link: bool, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where links can be made no data is copied; where they cannot, it is copied and compared with the digests."""
    before, inode = data_of(old), (old / "state.json").stat().st_ino
    if not can_link:
        monkeypatch.setattr(os, "link", refuse)

    index = migrate_checkpoint(old)

    assert schema_of(old) == SCHEMA
    assert index == verify_checkpoint(old)
    assert (index.timeline, index.run_id, index.global_step) == (0, "frozen", 3)
    assert data_of(old) == before
    assert ((old / "state.json").stat().st_ino == inode) is can_link
    assert [path.name for path in old.parent.iterdir()] == [old.name]


def test_migrating_a_checkpoint_of_the_newest_schema_changes_nothing(tmp_path: Path) -> None:
    """It is checked, and left as it is, to the byte."""
    checkpoint = tmp_path / "c"
    save(checkpoint, 1.0)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in checkpoint.iterdir()}

    index = migrate_checkpoint(checkpoint)

    assert index == read_index(checkpoint)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in checkpoint.iterdir()} == before


def test_migrating_a_damaged_checkpoint_is_refused(old: Path) -> None:
    """Nothing is built on what is not sound, and nothing is made: it is verified before."""
    (old / "state.json").write_bytes(b"x" * (old / "state.json").stat().st_size)

    with intercepted(lambda *_: None) as calls, pytest.raises(CorruptCheckpointError) as caught:
        migrate_checkpoint(old)

    assert caught.value.file == "state.json"
    assert [name for name, _ in calls if name not in ("open", "close")] == []
    assert schema_of(old) == "lightning-resume/1"


def test_a_link_is_migrated_where_it_leads_to(old: Path) -> None:
    """The link stays a link."""
    link = old.parent / "best"
    link.symlink_to(old.name)

    migrate_checkpoint(link)

    assert link.is_symlink()
    assert schema_of(old) == SCHEMA


def test_every_file_is_durable_before_the_swap(old: Path) -> None:
    """Also a linked one: the copy that was made by hand was perhaps never on the disk."""
    synced: list[str] = []

    def note(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "fsync":
            synced.append(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")).name)
        elif name == "rename":
            synced.append("rename")

    with intercepted(note):
        migrate_checkpoint(old)
    ladder = synced[: synced.index("rename")]

    assert sorted(ladder[:-1]) == sorted(path.name for path in old.iterdir())
    assert ladder[-2] == "index.json"
    assert ladder[-1].endswith(".tmp")


@pytest.mark.parametrize("can_link", [True, False], ids=["linked", "copied"])
def test_a_kill_at_any_file_operation_leaves_the_old_or_the_new_one(
    can_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its own path, with nobody cleaning up; and what is left over can be cleaned up."""
    if not can_link:
        monkeypatch.setattr(os, "link", refuse)
    total = len(operations_of(tmp_path / "measure"))
    seen = set()

    for number in range(1, total + 1):
        path = save_schema_1(tmp_path / str(number) / "step-00000003")

        status = killed_child(lambda path=path: migrate_checkpoint(path), number)
        good = [info for info in scan_checkpoints(path.parent, verify=True) if info.status == "good"]
        clean_incomplete(path.parent)

        assert status == 137
        assert value_of(path) == 1.0
        assert len(good) == 1
        assert [left.name for left in path.parent.iterdir()] == ["step-00000003"]
        seen.add(schema_of(path))
    assert seen == {"lightning-resume/1", SCHEMA}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_failure_at_any_file_operation_leaves_the_old_or_the_new_one(code: int, tmp_path: Path) -> None:
    """A typed error with the errno, or success; and no half one in either case."""
    total = len(operations_of(tmp_path / "measure"))
    outcomes = set()

    for number in range(1, total + 1):
        path = save_schema_1(tmp_path / str(number) / "step-00000003")
        failed = try_to_migrate(path, fail_at(number, total, code), code)

        assert value_of(path) == 1.0
        outcomes.add((failed, schema_of(path)))
    # In turn: before the swap; at the last fsync of the parent; while a link is made, or the old one is deleted.
    assert outcomes == {(True, "lightning-resume/1"), (True, SCHEMA), (False, SCHEMA)}


def operations_of(path: Path) -> list[tuple[str, Any]]:
    """The file operations of one undisturbed migration."""
    save_schema_1(path)
    with intercepted(lambda number, name, arguments: None) as calls:
        migrate_checkpoint(path)
    return calls


def try_to_migrate(path: Path, before: Callable[[int, str, tuple[Any, ...]], None], code: int) -> bool:
    """Migrates under injected faults; whether it failed."""
    try:
        with intercepted(before):
            migrate_checkpoint(path)
    except (CheckpointWriteError, OSError) as error:
        assert error.errno == code
        return True
    return False


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes there while it is migrated: the newer one stays."""
    path = Path(shutil.copytree(SCHEMA_1, tmp_path / "last"))
    link, overwritten = os.link, []

    def links(*arguments: Any, **keywords: Any) -> None:
        if not overwritten:
            overwritten.append(True)
            save(path, 2.0, overwrite=True)
        link(*arguments, **keywords)

    monkeypatch.setattr(os, "link", links)

    index = migrate_checkpoint(path)

    assert index == verify_checkpoint(path)
    assert index.run_id is None
    assert [left.name for left in tmp_path.iterdir()] == ["last"]
