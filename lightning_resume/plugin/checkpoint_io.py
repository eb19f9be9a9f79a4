"""`AtomicCheckpointIO`: Lightning's door to the disk, with this package's checkpoints behind it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from lightning_resume.catalog import prune_checkpoints
from lightning_resume.errors import CheckpointError, UnsupportedSetupError, WorldSizeError
from lightning_resume.format.checkpoint import read_checkpoint, read_index
from lightning_resume.format.plans import PlanCache
from lightning_resume.format.prepared import PreparedCheckpoint, prepare_checkpoint
from lightning_resume.plugin.shape import check_weights

RANK_STATES = "lightning_resume"
"""Key of a Lightning checkpoint under which each rank's own state travels to the writer, and back."""


STATE_KEY = "AtomicResumeCallback"
"""Key of this package's own callback among the callbacks' states."""


def _refuse(path: str, error: CheckpointError) -> str:
    raise error


@dataclass(frozen=True)
class Fitting:
    """What loading for `fit` needs to know; elsewhere the weights and what belongs to them are enough.

    Attributes:
        rank: of this process.
        world_size: number of processes.
        before_restore: called with path and checkpoint before Lightning restores anything; refuses by raising.
        agree: turns this rank's path into the one that all ranks load.
        instead: called with a path that could not be read, and why; returns what to read in its place, or raises.
        may_change_world_size: whether a checkpoint of another number of processes is worth reading.
    """

    rank: int
    world_size: int
    before_restore: Callable[[str, Mapping[str, Any]], None]
    agree: Callable[[str], str] = str
    instead: Callable[[str, CheckpointError], str] = _refuse
    may_change_world_size: bool = False


class AtomicCheckpointIO(CheckpointIO):
    """Writes and reads checkpoints as directories: atomic, durable, verified, without pickle.

    `AtomicResumeCallback` installs it. On its own (`Trainer(plugins=[AtomicCheckpointIO()])`) it gives crash-safe
    files to `ModelCheckpoint` and `trainer.save_checkpoint`, without exact resume.

    A path that Lightning chose (`best.ckpt`) becomes a directory of that name. `weights_only=True` when saving makes a
    model-only checkpoint.

    Args:
        max_shard_bytes: size of a safetensors file at which the next one is begun.
    """

    def __init__(self, max_shard_bytes: int = 2**30) -> None:
        self.max_shard_bytes = max_shard_bytes
        self.run_id: str | None = None
        self.timeline = 0
        self.fitting: Fitting | None = None
        self.complete: Callable[[str, dict[str, Any]], None] = lambda path, checkpoint: None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Writes the checkpoint; a crash at any point leaves what stood at `path` before, or the new one, whole.

        Raises:
            UnsupportedStateError: a value has no exact encoding; names its key path.
            CheckpointWriteError: the operating system refused (disk full, permission).
            ValueError: `storage_options` were given; there are none.
        """
        if storage_options is not None:
            raise ValueError(f"AtomicCheckpointIO takes no storage_options, got {storage_options!r}")
        self.prepare(checkpoint, path).commit()

    def prepare(
        self,
        checkpoint: Mapping[str, Any],
        path: str | os.PathLike[str],
        frozen: Collection[str] = (),
        plans: PlanCache | None = None,
    ) -> PreparedCheckpoint:
        """Encodes the checkpoint and plans its files, to be written by `commit`; creates nothing.

        Args:
            checkpoint: as Lightning makes it.
            path: the directory to be.
            frozen: names of weights that are expected not to change from save to save.
            plans: of the saves before.

        Raises:
            UnsupportedStateError: a value has no exact encoding; names its key path.
            CheckpointExistsError: what stands at `path` may not be replaced.
        """
        ranks = checkpoint.get(RANK_STATES, [])
        state = {key: value for key, value in checkpoint.items() if key != RANK_STATES}
        return prepare_checkpoint(
            path,
            state,
            rank_states=ranks,
            counters=_counters(state, ranks),
            identity=ranks[0]["identity"] if ranks else {},
            kind="full" if "optimizer_states" in state else "weights",
            run_id=self.run_id,
            timeline=self.timeline,
            max_shard_bytes=self.max_shard_bytes,
            overwrite=True,
            frozen=frozen,
            plans=plans,
        )

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verifies and reads the checkpoint; tensors are on the CPU.

        Raises:
            CheckpointError: nothing whole is there; the subclass tells what is wrong.
            WorldSizeError: another number of processes saved it, and `fit` is to go on from it.
            MissingStateError: there are no weights in it.
            UnsupportedSetupError: a file was given: Lightning's own checkpoints are pickles and are not opened.
        """
        if Path(path).is_file():
            raise UnsupportedSetupError(
                f"the file {os.fspath(path)!r}",
                "checkpoints of this package are directories; a .ckpt file is a pickle and is not opened",
                "Load it in a Trainer without AtomicResumeCallback and AtomicCheckpointIO.",
            )
        if self.fitting is None:
            checkpoint = read_checkpoint(path, exclude={"optimizer_states"})
            check_weights(os.fspath(path), checkpoint)
            self.complete(os.fspath(path), checkpoint)
            return checkpoint
        path = self.fitting.agree(os.fspath(path))
        try:
            checkpoint = _read(self.fitting, path)
        except CheckpointError as error:
            path = self.fitting.instead(path, error)
            checkpoint = _read(self.fitting, path)
        check_weights(os.fspath(path), checkpoint)
        self.complete(os.fspath(path), checkpoint)
        self.fitting.before_restore(os.fspath(path), checkpoint)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes the checkpoint: first out of sight by one rename, then its files. None there: nothing happens."""
        if Path(path).is_dir():
            prune_checkpoints([path])


def _read(fitting: Fitting, path: str) -> dict[str, Any]:
    num_ranks = read_index(path).num_ranks
    if num_ranks not in (0, fitting.world_size) and not fitting.may_change_world_size:
        raise WorldSizeError(num_ranks, fitting.world_size)
    rank = min(fitting.rank, num_ranks - 1) if num_ranks else None
    return read_checkpoint(path, rank=rank)


def _counters(state: Mapping[str, Any], ranks: list[dict[str, Any]]) -> dict[str, int]:
    counters = {"global_step": state.get("global_step", 0), "current_epoch": state.get("epoch", 0)}
    if ranks:
        counters |= {"batch_in_epoch": ranks[0]["batch_in_epoch"], "world_size": len(ranks)}
    return counters
