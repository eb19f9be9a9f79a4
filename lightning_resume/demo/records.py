"""Reads the record that a run's processes append to, also while they write it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lightning_resume.demo.settings import RECORD_FILE

Record = dict[str, Any]


class Place(NamedTuple):
    """A place in training: a batch, and the optimizer steps made so far."""

    epoch: int
    batch: int
    global_step: int


class Tail:
    """Follows a record while it grows.

    Args:
        run_dir: The run whose record is read; there need not be one yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / RECORD_FILE
        self.offset = 0
        self.rest = b""

    def read(self) -> list[Record]:
        """Returns the lines that have come since the last call; a line without its end is left for later."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            new = file.read()
        self.offset += len(new)
        *lines, self.rest = (self.rest + new).split(b"\n")
        return [json.loads(line) for line in lines]


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """Returns the records of a kind."""
    return [record for record in records if record["kind"] == kind]


def place_of(record: Record) -> Place:
    """Returns where the record of a batch stands."""
    return Place(record["epoch"], record["batch"], record["global_step"])
