"""A checkpoint of every schema that was ever written is kept here for ever, and is loaded."""

from __future__ import annotations

import math
import shutil
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch
from torch import nn

from lightning_resume.catalog import newest_good
from lightning_resume.format import registry
from lightning_resume.format.checkpoint import (
    migrate_checkpoint,
    read_checkpoint,
    register_type,
    verify_checkpoint,
    write_checkpoint,
)
from lightning_resume.format.migrations import SCHEMA, STEPS

FROZEN = Path(__file__).parent / "frozen"


class Point(NamedTuple):
    """A class of the user's, registered under a name."""

    x: int
    y: int


@pytest.fixture(autouse=True)
def registered(monkeypatch: Any) -> None:
    """Registers the class for one test."""
    monkeypatch.setattr(registry, "BY_TYPE", {})
    monkeypatch.setattr(registry, "BY_NAME", {})
    register_type(Point, name="frozen.Point")


def frozen_state() -> dict[str, Any]:
    """What the frozen checkpoints were made from: every encoding of both schemas occurs."""
    weight = torch.arange(6.0).reshape(2, 3)
    model = OrderedDict({"a.weight": weight, "tied": weight, "b": torch.arange(4.0).reshape(2, 2).t()})
    model._metadata = OrderedDict({"": {"version": 2}})
    adam = {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 0.5), "frozen": nn.Parameter(torch.ones(1), False)}
    return {
        "epoch": 1,
        "state_dict": model,
        "optimizer_states": [{"state": {0: adam}, "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999)}]}],
        "plain": [None, True, 2**63, -0.0, math.inf, complex(1, -2), "\ud800", b"\0\1", bytearray(2000), ..., 1e300],
        "containers": {
            1: (1, [2]),
            None: {"$": {3}, "s": frozenset({"a"})},
            "more": [defaultdict(list, a=[1]), Counter("aab"), deque([1], maxlen=3), range(1, 9, 2), slice(1, None)],
        },
        "packed": [[0.5] * 600, tuple(range(600))],
        "library": [
            *[PurePosixPath("a/b"), datetime(2024, 1, 2, 3, 4, 5, 6, timezone(timedelta(hours=2), "X"), fold=1)],
            *[date(2024, 2, 29), time(1, 2), timedelta(days=1, microseconds=3), timezone.utc],
            *[Decimal("1.10"), Fraction(1, 3), UUID(int=7)],
        ],
        "numpy": [
            *[np.float32(0.1), np.datetime64("2024-01-01"), np.str_("x"), np.bytes_(b"y"), np.dtype(">i4")],
            *[np.arange(6, dtype=">i2").reshape(2, 3), np.ones((2, 2), order="F"), np.array(["a", "bc"])],
        ],
        "torch": [
            *[torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"), torch.strided, torch.channels_last],
            *[torch.tensor([1 + 2j], dtype=torch.complex128), torch.ones(2, requires_grad=True)],
            torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
            torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), is_coalesced=True),
            torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_csr(),
        ],
        "registered": Point(1, 2),
    }


def frozen_ranks() -> list[dict[str, Any]]:
    """The states of two ranks."""
    return [{"rng": torch.arange(4, dtype=torch.uint8), "position": rank} for rank in range(2)]


COUNTERS = {"global_step": 3, "current_epoch": 1, "batch_in_epoch": 1, "world_size": 2}
ARGUMENTS: dict[str, Any] = {
    "counters": COUNTERS,
    "identity": {"length": 32, "sampler": {"shuffle": True}},
    "run_id": "frozen",
    "max_shard_bytes": 24,
}
TIMELINES = {1: 0, 2: 2}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("schema", TIMELINES)
def test_a_frozen_schema_is_read(schema: int, same: Any) -> None:
    """Every value and type, each rank's state, and all that the index says."""
    path = FROZEN / f"schema-{schema}"

    index = verify_checkpoint(path)
    result = read_checkpoint(path, rank=1)

    assert same(result, {**frozen_state(), "rank_state": frozen_ranks()[1]})
    assert result["state_dict"]["tied"] is result["state_dict"]["a.weight"]
    assert result["state_dict"]["b"].stride() == (1, 2)
    assert f'"schema": "lightning-resume/{schema}"' in (path / "index.json").read_text()
    assert (index.schema, index.kind, index.counters, index.run_id) == (SCHEMA, "full", COUNTERS, "frozen")
    assert index.timeline == TIMELINES[schema]
    assert index.identity == ARGUMENTS["identity"]
    assert index.metadata == {"note": f"written by schema {schema}"}


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_the_newest_schema_was_made_from_is_still_written_the_same(tmp_path: Path) -> None:
    """The bytes of all data files have not changed: a change of the format would need a new schema."""
    newest = max(TIMELINES)
    before = verify_checkpoint(FROZEN / f"schema-{newest}")

    after = write_checkpoint(
        tmp_path / "c",
        frozen_state(),
        rank_states=frozen_ranks(),
        timeline=TIMELINES[newest],
        metadata={"note": f"written by schema {newest}"},
        **ARGUMENTS,
    )

    assert f"lightning-resume/{newest}" == SCHEMA
    assert replace(after, created="", versions={}, digest="") == replace(before, created="", versions={}, digest="")


def test_no_schema_is_without_its_frozen_directory() -> None:
    """A new schema comes with a checkpoint of its own."""
    names = {path.name for path in FROZEN.iterdir()}

    assert names == {f"schema-{number}" for number in TIMELINES}
    assert {*STEPS, SCHEMA} == {f"lightning-resume/{number}" for number in TIMELINES}


@pytest.mark.parametrize("path", sorted(FROZEN.iterdir()), ids=lambda path: path.name)
def test_every_frozen_checkpoint_is_migrated_in_place(path: Path, tmp_path: Path, same: Any) -> None:
    """Afterwards it is of the newest schema on disk, holds the same state, and is found by a scan."""
    copy = tmp_path / "step-00000003"
    shutil.copytree(path, copy)

    index = migrate_checkpoint(copy)
    newest = newest_good(tmp_path, verify=True)

    assert index == verify_checkpoint(copy)
    assert f'"schema": "{SCHEMA}"' in (copy / "index.json").read_text()
    assert newest is not None
    assert newest.path == copy
    assert same(read_checkpoint(copy, rank=0), read_checkpoint(path, rank=0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
