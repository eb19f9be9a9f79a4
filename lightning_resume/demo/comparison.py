"""Says which parts of two runs are equal, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from lightning_resume.demo.driver import Run
from lightning_resume.demo.records import Record, of_kind
from lightning_resume.demo.settings import FINAL_FILE

Array = np.ndarray[Any, np.dtype[Any]]

# name of the bucket, the kind of record that holds it, the fields that name the record, the field that is compared
RECORDED = [
    ("items of each batch", "batch", ("epoch", "batch"), "items"),
    ("loss of each batch", "batch", ("epoch", "batch"), "loss"),
    ("learning rates", "batch", ("epoch", "batch"), "learning_rate"),
    ("validation metrics", "validation", ("global_step",), "metrics"),
    ("epoch means", "epoch", ("epoch",), "metrics"),
]


@dataclass(frozen=True)
class Bucket:
    """The verdict on one part of the runs.

    Attributes:
        name: What was compared.
        num_compared: How many values. What was trained twice is compared twice.
        num_different: How many of them are not bit-equal, or are missing on one side.
        largest_difference: The largest absolute difference: 0.0 when all are bit-equal, inf when a value is missing or
            is NaN on one side only, and None where no number tells it (digests).
    """

    name: str
    num_compared: int
    num_different: int
    largest_difference: float | None

    @property
    def is_exact(self) -> bool:
        """Whether there was something to compare, and all of it is bit-equal."""
        return self.num_compared > 0 and self.num_different == 0


def compare_runs(baseline: Run, interrupted: Run) -> list[Bucket]:
    """Compares the final states of two finished runs, and all that they wrote down on the way.

    Each record of the interrupted run is compared, also those of the batches that a kill made it train again.

    Returns:
        One bucket for each part of the runs.
    """
    expected, found = (load_file(run.run_dir / FINAL_FILE) for run in (baseline, interrupted))
    buckets = [compare_tensors(part, expected, found) for part in ("weights", "optimizer", "schedule", "streams")]
    for name, kind, key_fields, field in RECORDED:
        records = (of_kind(run.records, kind) for run in (baseline, interrupted))
        buckets.append(compare_records(name, *records, key_fields=key_fields, field=field))
    return buckets


def compare_tensors(part: str, expected: Mapping[str, Array], found: Mapping[str, Array]) -> Bucket:
    """Compares the tensors whose names begin with `part`: dtype, shape, and each element's bytes."""
    num_compared, num_different, largest = 0, 0, 0.0
    for name in sorted(name for name in expected.keys() | found.keys() if name.startswith(f"{part}.")):
        left, right = expected.get(name), found.get(name)
        if left is None or right is None or (left.dtype, left.shape) != (right.dtype, right.shape):
            size = max(tensor.size for tensor in (left, right) if tensor is not None)
            num_compared, num_different, largest = num_compared + size, num_different + size, math.inf
            continue
        left_bytes, right_bytes = (tensor.reshape(-1, 1).view(np.uint8) for tensor in (left, right))
        is_different = (left_bytes != right_bytes).any(axis=1)
        num_compared += left.size
        num_different += int(is_different.sum())
        for a, b in zip(left.reshape(-1)[is_different], right.reshape(-1)[is_different], strict=True):
            largest = max(largest, difference(float(a), float(b)))
    return Bucket({"streams": "random streams"}.get(part, part), num_compared, num_different, largest)


def compare_records(
    name: str, expected: list[Record], found: list[Record], *, key_fields: tuple[str, ...], field: str
) -> Bucket:
    """Compares a field of two runs' records, each with the record of the same key; numbers are hex strings there."""
    table = {tuple(record[key] for key in key_fields): values_of(record, field) for record in expected}
    missing = set(table)
    num_compared, num_different, largest = 0, 0, 0.0
    for record in found:
        key = tuple(record[key] for key in key_fields)
        missing.discard(key)
        left, right = table.get(key, {}), values_of(record, field)
        for item in left.keys() | right.keys():
            num_compared += 1
            if left.get(item) != right.get(item):
                num_different += 1
                largest = max(largest, difference(number(left.get(item)), number(right.get(item))))
    if missing:
        num_different, largest = num_different + len(missing), math.inf
    return Bucket(name, num_compared, num_different, None if field == "items" else largest)


def values_of(record: Record, field: str) -> dict[str, str]:
    """Returns the field's values by name; a field may hold one value or several."""
    value = record[field]
    return value if isinstance(value, dict) else {field: value}


def number(value: str | None) -> float:
    """Returns the number that a hex string holds; NaN when there is none."""
    try:
        return math.nan if value is None else float.fromhex(value)
    except (OverflowError, ValueError):  # a digest
        return math.nan


def difference(a: float, b: float) -> float:
    """Returns the absolute difference of two numbers that are not bit-equal; inf when it is no number."""
    result = abs(a - b)
    return math.inf if math.isnan(result) else result
