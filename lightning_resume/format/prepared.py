"""A checkpoint between its state and the disk: encoded at one moment, then copied, then written and committed."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_resume.errors import CheckpointWriteError, ResumeError, UnsupportedSetupError
from lightning_resume.format.accelerator import beside_training, cuda_devices, finish_training
from lightning_resume.format.claims import Claim, Marks, StaleCopyError, claim_unchanged, marks_of
from lightning_resume.format.collector import paused_collection
from lightning_resume.format.durable import commit_directory, require_replaceable, write_file
from lightning_resume.format.encoding import Layout, encode_files
from lightning_resume.format.gather import copy_files
from lightning_resume.format.image import Image, whole_pages
from lightning_resume.format.index import INDEX_NAME, KINDS, CheckpointIndex, FileEntry, index_to_bytes
from lightning_resume.format.lanes import write_files
from lightning_resume.format.links import KeptFile, keep_file, link_file
from lightning_resume.format.planned import PlannedFile
from lightning_resume.format.plans import PlanCache
from lightning_resume.format.runs import DifferentError
from lightning_resume.format.threads import default_threads, for_each

T = TypeVar("T")
LINKED_BYTES = 2**20  # a smaller file is written in no time


class PreparedCheckpoint:
    """A checkpoint that is ready to be written. Its plain values are those of the moment at which it was prepared.

    Its tensors are read where they are, when they are written; after `copy_into` they may change before that.

    Attributes:
        path: the directory to be, absolute.
        num_bytes: size of all files but the index.
        image_bytes: what they take in an image, where each begins at a page.
    """

    def __init__(
        self,
        path: Path,
        draft: CheckpointIndex,
        encode: Callable[[], list[PlannedFile]],
        overwrite: bool,
        plans: PlanCache | None = None,
    ) -> None:
        """Use `prepare_checkpoint`."""
        self.path = path
        self._draft = draft
        self._encode: Callable[[], list[PlannedFile]] | None = encode
        self._overwrite = overwrite
        self._image: Image | None = None
        self._image_version = (0, 0)
        self._plans = plans
        self._take_files()

    def _take_files(self) -> None:
        """Encodes the state, and plans its files."""
        if self._encode is None:
            raise RuntimeError(f"the state of {os.fspath(self.path)!r} was let go of")
        with paused_collection():
            self._files = self._encode()
        self._plan_version = self._plans.version if self._plans else 0
        self.num_bytes = sum(file.num_bytes for file in self._files)
        self.image_bytes = sum(whole_pages(file.num_bytes) for file in self._files)

    def _despite_differences(self, action: Callable[[], T]) -> T:
        """Does something with the files. If tensors are not what a kept plan says, they are planned anew, once."""
        try:
            return action()
        except DifferentError:
            if self._plans is None:
                raise
            self._plans.drop()
            self._take_files()
            return action()

    def copy_into(self, image: Image, *, compare_later: bool = False) -> None:
        """Copies all data into the image, from which it will be written; whatever was in there is overwritten.

        A file whose bytes are found in the image already, where the save before had left them, will be linked from
        that checkpoint instead of written, if it is still there.

        Args:
            image: not used by a save that is not committed yet.
            compare_later: frozen files that were probably not written to are compared by `commit`; until it returns
                their tensors must not be resized. See `claims`.

        Raises:
            UnsupportedStateError: a value changed its size since it was prepared.
            MemoryError: there is no memory for an image.
        """
        self._require_own_state()
        self._despite_differences(lambda: self._copy(image, compare_later))
        self._image, self._image_version, self._encode = image, image.version, None
        if self._plans is not None:
            self._plans.release()

    def _copy(self, image: Image, compare_later: bool) -> None:
        with paused_collection():
            places = image.divide({file.name: file.num_bytes for file in self._files})
            kept, image.kept = image.kept, {}  # void, should the copying fail
            claimed = self._claim(kept, places, image.marks) if compare_later else {}
            files = [file for file in self._files if file.name not in claimed]
            contents = [(file.parts, places[file.name]) for file in files]
            compare = {number for number, file in enumerate(files) if file.name in kept}
            devices = self._devices()
            if devices:
                image.pin()
            with beside_training(devices):
                is_equal = copy_files(contents, compare=compare, non_blocking=bool(devices))
            if self._plans is not None:
                self._plans.require_distinct()
            known = [file.name for file, is_same in zip(files, is_equal, strict=True) if is_same]
            image.kept = {name: kept[name] for name in [*known, *claimed]}
            image.marks = {file.name: marks_of(file.parts) for file in self._files if file.is_frozen}
            for file in self._files:
                file.claim = claimed.get(file.name)
                file.image, file.parts = places[file.name].numpy().data, []

    def _claim(
        self, kept: Mapping[str, KeptFile], places: Mapping[str, torch.Tensor], marks: Mapping[str, Marks | None]
    ) -> dict[str, Claim]:
        """The frozen files that are taken for unchanged."""
        claims = {
            file.name: claim_unchanged(file.parts, places[file.name], marks.get(file.name))
            for file in self._files
            if file.is_frozen and file.name in kept
        }
        return {name: claim for name, claim in claims.items() if claim is not None}

    def _devices(self) -> set[torch.device]:
        return cuda_devices(part for file in self._files for part in file.parts)

    def _require_own_state(self) -> None:
        """Refuses to write the state of another moment."""
        if self._image is not None:
            if self._image.version != self._image_version:
                what = "was filled again before it was committed, or by the process that this one was forked from"
                raise RuntimeError(f"the image of {os.fspath(self.path)!r} {what}")
        elif self._plans is not None and self._plans.version != self._plan_version:
            raise RuntimeError(f"another state was prepared before {os.fspath(self.path)!r} was copied or committed")

    def commit(self, num_threads: int | None = None, kept: dict[str, KeptFile] | None = None) -> CheckpointIndex:
        """Writes the files and makes the directory appear at its path, whole and durable, or not at all.

        Args:
            num_threads: threads that hash, each beside two that copy and write; by default one for each core, up
                to four. One is enough in the background: two would take the training's cores from it.
            kept: where there is no image, what the last commit left in it: frozen files (see `prepare_checkpoint`)
                of the same digest are linked. Filled anew.

        Returns:
            The index, as it is on disk.

        Raises:
            CheckpointExistsError, CheckpointWriteError, UnsupportedStateError: as `write_checkpoint` says.
            StaleCopyError: what was to be compared later has changed; nothing is left, and the next copy will see it.
        """
        self._require_own_state()
        finish_training(self._devices())
        known = self._image.kept if self._image is not None else {} if kept is None else kept
        written: dict[str, KeptFile] = {}
        try:
            fill = functools.partial(self._fill, num_threads or default_threads(), known, written)
            write = functools.partial(commit_directory, self.path, fill, overwrite=self._overwrite)
            index = self._despite_differences(write)
        except ResumeError:
            raise
        except OSError as error:
            raise CheckpointWriteError(self.path, error) from error
        known.clear()
        known.update(written)
        self._encode = None
        if self._plans is not None and self._image is None:
            self._plans.release()
        return index

    def _fill(
        self, num_threads: int, known: dict[str, KeptFile], written: dict[str, KeptFile], directory: Path
    ) -> CheckpointIndex:
        linked: dict[str, FileEntry] = {}

        def link(file: PlannedFile) -> None:
            before = known[file.name]
            if file.claim is not None and not file.claim.holds():
                del known[file.name]
                raise StaleCopyError(f"frozen weights in {file.name!r} changed while {self.path.name} was saved")
            if file.has_contents(before.entry) and link_file(before, directory / file.name):
                linked[file.name] = before.entry

        for_each([file for file in self._files if file.name in known], link, num_threads)
        entries = write_files(directory, [file for file in self._files if file.name not in linked], num_threads)
        entries = {file.name: linked.get(file.name) or entries[file.name] for file in self._files}
        self._require_own_state()
        if self._plans is not None and self._image is None:
            self._plans.require_distinct()
        for name, entry in entries.items():
            if entry.num_bytes >= LINKED_BYTES:
                written[name] = keep_file(directory / name, entry, self.path / name)
        index, data = index_to_bytes(self._draft.with_files(entries))
        write_file(directory / INDEX_NAME, data)
        return index


def prepare_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    model_key: str = "state_dict",
    optimizer_key: str = "optimizer_states",
    rank_states: Sequence[Mapping[str, Any]] = (),
    counters: Mapping[str, int] | None = None,
    identity: Mapping[str, Any] | None = None,
    kind: str = "full",
    run_id: str | None = None,
    timeline: int = 0,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = 2**30,
    overwrite: bool = False,
    frozen: Collection[str] = (),
    plans: PlanCache | None = None,
) -> PreparedCheckpoint:
    """Encodes a state and plans its files; creates nothing. Arguments and errors are those of `write_checkpoint`.

    `frozen` names the model's tensors that are expected not to change from save to save. They get files of their own,
    which need not be written again. Whether they changed is found by their contents: a wrong name costs time only.
    `plans` is for a caller who saves again and again: with very many tensors, the next state is prepared in a fifth of
    the time. A checkpoint that was prepared with it has to be copied or written before the next one is prepared. Its
    tensors are looked at only then: where they are not what was planned, all of the state is encoded again.
    """
    target = _target(path)
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is none of {', '.join(KINDS)}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} is less than 1")
    require_little_endian()
    try:
        require_replaceable(target, overwrite)
    except ResumeError:
        raise
    except OSError as error:
        raise CheckpointWriteError(path, error) from error
    layout = Layout(model_key, optimizer_key, max_shard_bytes, frozenset(frozen))
    draft = CheckpointIndex(
        kind=kind,
        files={},
        counters=dict(counters or {}),
        identity=dict(identity or {}),
        metadata=dict(metadata or {}),
        versions=dict(_installed_versions()),
        run_id=run_id,
        timeline=timeline,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    index_to_bytes(draft.with_files({"state.json": FileEntry(0, "0" * 64)}))  # refuses what it cannot hold
    encode = functools.partial(encode_files, state, rank_states, layout, plans)
    return PreparedCheckpoint(target, draft, encode, overwrite, plans)


def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.name in ("", "..") or "\0" in str(target):
        raise ValueError(f"{os.fspath(path)!r} is no path for a checkpoint directory")
    return target.absolute()  # the process may change its directory while a thread writes


def require_little_endian() -> None:
    """Raises `UnsupportedSetupError` on a machine whose tensors do not lie in memory as they do in the files."""
    if sys.byteorder != "little":
        raise UnsupportedSetupError("a big-endian machine", "safetensors files are little-endian")


@functools.lru_cache(maxsize=1)
def _installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("lightning-resume", "lightning", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
