"""The files that a checkpoint will have: planned from encoded state, copied into memory of their own, written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from lightning_resume.format.blobs import Blob
from lightning_resume.format.blocks import Block, Buffer, gathered_blocks, image_blocks
from lightning_resume.format.claims import Claim
from lightning_resume.format.gather import Part, part_bytes
from lightning_resume.format.header import DTYPE_BYTES, build_header
from lightning_resume.format.index import FileEntry
from lightning_resume.format.strict_json import dump_json
from lightning_resume.format.verify import WEIGHT_MAP_NAME

# A quarter of what readers accept: names are counted in characters here, and one takes up to 12 bytes in the header.
HEADER_BUDGET_BYTES = 8_000_000
ENTRY_BYTES = 200  # what an entry takes in the header besides its name and shape, rounded up
MAX_SHARDS = 99_999
BALANCED_BYTES = 64 * 2**20
FROZEN_BYTES = 8 * 2**20


@dataclass(eq=False, slots=True)
class PlannedFile:
    """One file that is to be written.

    Attributes:
        name: its name in the checkpoint directory.
        parts: its contents, in order: bytes, and data that is still where it was met.
        num_bytes: its size.
        is_frozen: whether its contents are expected not to change from save to save.
        image: all of its bytes, once they were copied; from then on `parts` is not looked at.
        claim: that they were there before, where that is still to be seen.
    """

    name: str
    parts: list[Part]
    num_bytes: int
    is_frozen: bool = False
    image: memoryview | None = None
    claim: Claim | None = None

    @classmethod
    def of(cls, name: str, parts: list[Part], *, is_frozen: bool = False) -> PlannedFile:
        """A file of these parts."""
        return cls(name, parts, sum(map(part_bytes, parts)), is_frozen)

    def has_contents(self, entry: FileEntry) -> bool:
        """Whether the file, of which an earlier version is known, is still the same.

        With an image that was compared; otherwise frozen files are hashed, and all others are taken to have changed.
        """
        if entry.num_bytes != self.num_bytes:
            return False
        if self.image is not None:
            return True
        if not self.is_frozen:
            return False
        buffer, digest = Buffer(), hashlib.sha256()
        for block in self.blocks(lambda: buffer):
            digest.update(block.data)
        return digest.hexdigest() == entry.sha256

    def blocks(self, take: Callable[[], Buffer]) -> Iterator[Block]:
        """The file's bytes, block after block; see `gathered_blocks`."""
        return image_blocks(self.image) if self.image is not None else gathered_blocks(self.parts, take)


def plan_group(
    group: str, blobs: Sequence[Blob], max_shard_bytes: int, frozen: Collection[str] = ()
) -> list[PlannedFile]:
    """The files of a group.

    Args:
        group: "model", "optimizer", "state" or "rank-00000".
        blobs: named; with none of them a file without tensors is planned.
        max_shard_bytes: data bytes of a shard with more than one tensor. All but the model's trained tensors are cut
            into shards of a sixteenth of the group, though of no less than 64 MiB: each is hashed by one thread.
        frozen: names of tensors that are expected not to change. From 8 MiB on they are kept apart, in files that
            need not be written again.

    Raises:
        ValueError: there would be too many of them.
    """
    balanced_bytes = min(max_shard_bytes, max(BALANCED_BYTES, sum(blob.num_bytes for blob in blobs) // 16))
    apart = [blob for blob in blobs if blob.name in frozen] if frozen else []
    if sum(blob.num_bytes for blob in apart) < FROZEN_BYTES or len(apart) == len(blobs):
        apart = []
    frozen_shards = plan_shards(apart, balanced_bytes)
    others = [blob for blob in blobs if blob.name not in frozen] if apart else blobs
    shards = frozen_shards + plan_shards(others, max_shard_bytes if group == "model" else balanced_bytes) or [[]]
    if len(shards) > MAX_SHARDS:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} would make {len(shards)} shards, more than {MAX_SHARDS}")
    files: list[PlannedFile] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{group}.safetensors" if len(shards) == 1 else f"{group}-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(PlannedFile.of(name, _parts(shard), is_frozen=number <= len(frozen_shards)))
        weight_map.update((blob.name, name) for blob in shard)
    if group == "model" and len(shards) > 1:
        total = sum(blob.num_bytes for blob in blobs)
        text = dump_json({"metadata": {"total_size": total}, "weight_map": weight_map})
        files.append(PlannedFile.of(WEIGHT_MAP_NAME, [text]))
    return files


def _parts(blobs: Sequence[Blob]) -> list[Part]:
    # Widest items first, so that each tensor is aligned to its item size without a hole, as the library does it too.
    ordered = sorted(blobs, key=lambda blob: -DTYPE_BYTES[blob.dtype])
    metadata = {"format": "pt"}
    for blob in ordered:
        metadata.update((alias, blob.name) for alias in blob.aliases or () if _is_readable(alias))
    return [build_header([(blob.name, blob.dtype, blob.shape) for blob in ordered], metadata), *ordered]


def _is_readable(alias: str) -> bool:
    """Whether any reader can have it in a header; what is tied stands in ``state.json`` in any case."""
    return alias != "format" and not any("\ud800" <= char <= "\udfff" for char in alias)


def plan_shards(blobs: Sequence[Blob], max_shard_bytes: int) -> list[list[Blob]]:
    """Cuts blobs into shards, in order, each with at least one and of at most `max_shard_bytes` if it has more."""
    shards: list[list[Blob]] = []
    num_bytes = header_bytes = 0
    for blob in blobs:
        entry_bytes = ENTRY_BYTES + len(blob.name) + 20 * len(blob.shape)
        is_full = num_bytes + blob.num_bytes > max_shard_bytes or header_bytes + entry_bytes > HEADER_BUDGET_BYTES
        if not shards or is_full:
            shards.append([])
            num_bytes = header_bytes = 0
        shards[-1].append(blob)
        num_bytes += blob.num_bytes
        header_bytes += entry_bytes
    return shards
