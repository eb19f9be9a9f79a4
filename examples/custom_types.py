"""Objects of your own classes in a checkpoint, without pickle.

A checkpoint holds values, never code: loading one imports nothing and runs nothing because the checkpoint says so. A
class of yours is taught once, by a name that stands for it on disk. Run it: ::

    python examples/custom_types.py

Expect

    1. an unknown class is refused at the first save, by its key path: hyper_parameters.augmentation
    2. taught with register_type(), all values come back equal and of equal type
    EXACT
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from lightning_resume import UnsupportedStateError, read_checkpoint, register_type, write_checkpoint


class Padding(Enum):
    """An enum: members come back as members."""

    ZERO = "zero"
    REFLECT = "reflect"


@dataclass
class Augmentation:
    """A dataclass: field by field."""

    shift: tuple[int, int]
    padding: Padding


class RunningMean:
    """A class that is neither: say what it is made of, and how to make it of that."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros((), dtype=torch.float64), 0

    def update(self, value: float) -> None:
        """Takes one more value."""
        self.total += value
        self.count += 1


def encode_mean(mean: RunningMean) -> dict[str, Any]:
    """Returns plain values, containers and tensors."""
    return {"total": mean.total, "count": mean.count}


def decode_mean(state: dict[str, Any]) -> RunningMean:
    """Makes the object again."""
    mean = RunningMean()
    mean.total, mean.count = state["total"], state["count"]
    return mean


def main() -> int:
    """Saves and loads; says whether what came back is what was saved."""
    mean = RunningMean()
    mean.update(0.1)
    mean.update(0.2)
    state = {"hyper_parameters": {"augmentation": Augmentation((1, 2), Padding.REFLECT)}, "means": [mean]}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        try:
            write_checkpoint(path, state)
        except UnsupportedStateError as error:
            print(f"1. an unknown class is refused at the first save, by its key path: {error.key_path}")
        if path.exists():
            print("a refused save has left something behind")
            return 1

        # Once, before the first save and before every load, for instance where the classes are defined.
        register_type(Padding)
        register_type(Augmentation)
        register_type(RunningMean, name="my_project.RunningMean", encode=encode_mean, decode=decode_mean)
        write_checkpoint(path, state)
        loaded = read_checkpoint(path)

    again = loaded["means"][0]
    equal = (
        loaded["hyper_parameters"] == state["hyper_parameters"]
        and loaded["hyper_parameters"]["augmentation"].padding is Padding.REFLECT
        and type(again) is RunningMean
        and torch.equal(again.total, mean.total)
        and again.count == mean.count
    )
    if not equal:
        print(f"NOT equal: {loaded}")
        return 1
    print("2. taught with register_type(), all values come back equal and of equal type")
    print("EXACT")
    return 0


if __name__ == "__main__":
    sys.exit(main())
