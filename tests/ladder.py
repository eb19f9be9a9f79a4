"""The order in which a checkpoint becomes durable, checked on any list of file operations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from lightning_resume.format.hidden import parse_hidden
from lightning_resume.lock import LOCK_NAME


class Step(NamedTuple):
    """One operation.

    Attributes:
        what: "create", "write", "sync", "rename" or "remove".
        path: what it works on.
        target: a rename's new name.
    """

    what: str
    path: str
    target: str = ""


def assert_ladder(steps: Sequence[Step], num_saves: int, num_pruned: int) -> None:
    """Checks every save and every deletion in the list.

    Each data file is synced after its last write; then the index is written and synced; then the hidden directory is
    synced; then it is renamed into place; then the parent is synced; and only after that is anything deleted: first
    renamed out of sight, that made durable, then removed.
    """
    commits = [n for n, step in enumerate(steps) if step.what == "rename" and _kind(step.path) == "tmp"]
    deletions = [n for n, step in enumerate(steps) if step.what == "rename" and _kind(step.target) == "trash"]
    assert (len(commits), len(deletions)) == (num_saves, num_pruned)
    for commit in commits:
        _assert_commit(steps, commit)
    for deletion in deletions:
        parent, trash = os.path.dirname(steps[deletion].path), steps[deletion].target
        before = [n for n in commits if n < deletion]
        assert _find(steps, "sync", parent, before[-1]) < deletion
        removals = [n for n, step in enumerate(steps) if step.what == "remove" and _is_in(step.path, trash)]
        assert removals
        assert deletion < _find(steps, "sync", parent, deletion) < removals[0]
    removed = [step.path for step in steps if step.what == "remove" and os.path.basename(step.path) != LOCK_NAME]
    assert all(_kind_of_any(path) == "trash" for path in removed), removed


def _assert_commit(steps: Sequence[Step], commit: int) -> None:
    temp, parent = steps[commit].path, os.path.dirname(steps[commit].path)
    inside = [(n, step) for n, step in enumerate(steps) if os.path.dirname(step.path) == temp]
    names = {os.path.basename(step.path) for _, step in inside if step.what == "create"}
    assert {"index.json", "state.json"} < names
    synced = {}
    for name in names:
        path = os.path.join(temp, name)
        last_write = max(n for n, step in inside if step.path == path and step.what in ("create", "write"))
        synced[name] = _find(steps, "sync", path, last_write)
    index = os.path.join(temp, "index.json")
    index_written = min(n for n, step in inside if step.path == index and step.what == "write")
    assert max(n for name, n in synced.items() if name != "index.json") < index_written < synced["index.json"]
    assert synced["index.json"] < _find(steps, "sync", temp, synced["index.json"]) < commit
    assert max(n for n, _ in inside) < commit
    _find(steps, "sync", parent, commit)


def _find(steps: Sequence[Step], what: str, path: str, after: int) -> int:
    """The first such step after another one."""
    for number in range(after + 1, len(steps)):
        if steps[number][:2] == (what, path):
            return number
    raise AssertionError(f"no {what} of {path} after {steps[after]}")


def _kind(path: str) -> str:
    hidden = parse_hidden(os.path.basename(path))
    return hidden.kind if hidden else ""


def _kind_of_any(path: str) -> str:
    return _kind(path) or _kind(os.path.dirname(path))


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + os.sep)
