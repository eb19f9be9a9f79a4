"""What is deleted from the callback's folder: this run's old checkpoints, and what stands in a new one's way."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_resume.catalog import CheckpointInfo, newest_verified, prune_checkpoints, steps_of_run
from lightning_resume.errors import ResumeError
from lightning_resume.policy import archived, to_prune

SPARE_BYTES = 2**16
SPARE_SHARE = 100

Place = tuple[int, int]


def spare_bytes(num_bytes: int) -> int:
    """Of free space beyond a checkpoint's data: its index, its directory, and the file system's own maps of blocks.

    The index is some KiB, the directory one block, the maps are far below the hundredth part; the unused ends of the
    files' last blocks are no part of it.
    """
    return SPARE_BYTES + num_bytes // SPARE_SHARE


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay. Deletes full ones of one run only, named after their step; never the newest good one.

    What stays, whatever its age: archived ones (`policy.archived`), weights-only ones, those of other runs, and all
    that this callback did not write. A failure is a warning, also where somebody else prunes at the same time. Any
    thread may call it. A crash leaves at most a hidden directory, which is cleaned up when the next fit starts.

    Attributes:
        folder: of the checkpoints.
        keep_last_k: so many newest stay, by timeline and step.
        archive_every_n_train_steps: the first at or after each multiple stays; None: nothing is archived.
    """

    folder: str
    keep_last_k: int
    archive_every_n_train_steps: int | None = None

    def prune(self, run_id: str | None, newest: str | os.PathLike[str] | None) -> list[Path]:
        """Deletes the run's checkpoints beyond the newest `keep_last_k`. Call it when the newest is durable.

        Args:
            run_id: of the run.
            newest: the checkpoint that was just saved; it stays even if others are newer.

        Returns:
            Those that were deleted.
        """
        try:
            run = steps_of_run(self.folder, run_id)
            keep = archived(run, self.archive_every_n_train_steps) | _places(run, newest)
            return prune_checkpoints(run[place].path for place in to_prune(run, self.keep_last_k, keep))
        except (ResumeError, OSError) as error:
            warnings.warn(f"could not delete old checkpoints in {self.folder!r}: {error}", stacklevel=2)
            return []

    def make_room(self, num_bytes: int, run_id: str | None, newest: str | os.PathLike[str] | None = None) -> bool:
        """Before a save: deletes the run's oldest checkpoints where the disk has too little space for another one.

        Also such as `keep_last_k` would keep, but only as many as are needed, and none where all would not be enough;
        then it warns, with both numbers.

        Args:
            num_bytes: size of the checkpoint to be, each file in whole blocks.
            run_id: of the run.
            newest: the checkpoint that this process has saved or resumed from, and so knows to be good; it stays, and
                the newest stays. Without it the newest one that passes a full verification stays.

        Returns:
            Whether there is enough space.
        """
        spare = spare_bytes(num_bytes)
        needed = num_bytes + spare
        try:
            free = shutil.disk_usage(self.folder).free
            if free >= needed:
                return True
            pruned = prune_checkpoints(self._in_the_way(needed - free, run_id, newest))
            free = shutil.disk_usage(self.folder).free
        except (ResumeError, OSError) as error:
            warnings.warn(f"could not make room for a checkpoint in {self.folder!r}: {error}", stacklevel=2)
            return False
        if pruned:
            names = ", ".join(path.name for path in pruned)
            warnings.warn(f"deleted {names} in {self.folder!r} to make room for a new checkpoint", stacklevel=2)
        if free < needed:
            warnings.warn(
                f"a checkpoint needs {num_bytes:,} bytes, and {spare:,} for its index and directory, but "
                f"{self.folder!r} has {free:,} bytes of free space, and no older checkpoints whose deletion would be "
                "enough: free some space",
                stacklevel=2,
            )
        return free >= needed

    def _in_the_way(self, num_bytes: int, run_id: str | None, newest: str | os.PathLike[str] | None) -> list[Path]:
        """The oldest ones that free so many bytes when they are deleted; none if all of them do not."""
        run = steps_of_run(self.folder, run_id)
        good = _places(run, newest)
        if not good and (verified := newest_verified(run)) is not None:
            good = {verified}
        if not good:
            return []
        keep = archived(run, self.archive_every_n_train_steps) | good
        paths = [run[place].path for place in to_prune(run, 1, keep)]
        for number, freed in enumerate(_freed_bytes(paths), start=1):
            if freed >= num_bytes:
                return paths[:number]
        return []


def _places(run: dict[Place, CheckpointInfo], path: str | os.PathLike[str] | None) -> set[Place]:
    if path is None:
        return set()
    real = os.path.realpath(path)
    return {place for place, info in run.items() if os.path.realpath(info.path) == real}


def _freed_bytes(paths: Collection[Path]) -> Iterator[int]:
    """What deleting the first one frees, the first two, and so on; a file with several names goes with its last."""
    freed = 0
    names_left: dict[tuple[int, int], int] = {}
    for path in paths:
        for name in os.listdir(path):
            status = os.lstat(path / name)
            inode = status.st_dev, status.st_ino
            names_left[inode] = names_left.get(inode, status.st_nlink) - 1
            if names_left[inode] == 0:
                freed += status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size
        yield freed
