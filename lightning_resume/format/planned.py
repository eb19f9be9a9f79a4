"""The files that a checkpoint will have: planned from encoded state, copied into memory of their own, written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_resume.errors import UnsupportedStateError
from lightning_resume.format.blobs import Blob
from lightning_resume.format.durable import FileWriter, write_file
from lightning_resume.format.header import DTYPE_BYTES, build_header
from lightning_resume.format.index import FileEntry
from lightning_resume.format.strict_json import dump_json
from lightning_resume.format.verify import WEIGHT_MAP_NAME

# A quarter of what readers accept: names are counted in characters here, and one takes up to 12 bytes in the header.
HEADER_BUDGET_BYTES = 8_000_000
ENTRY_BYTES = 200  # what an entry takes in the header besides its name and shape, rounded up
MAX_SHARDS = 99_999


@dataclass(eq=False)
class PlannedFile:
    """One file that is to be written.

    Attributes:
        name: its name in the checkpoint directory.
        parts: its contents, in order: bytes, and data that is still where it was met.
        image: all of its bytes, once they were copied; from then on `parts` is not looked at.
    """

    name: str
    parts: list[bytes | Blob]
    image: memoryview | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return sum(part.num_bytes if isinstance(part, Blob) else len(part) for part in self.parts)

    def copy_into(self, memory: memoryview) -> None:
        """Copies all of the file's bytes to `memory`, of `num_bytes` bytes, which becomes its image."""
        end = 0
        for data in self.contents():
            begin, end = end, end + len(data)
            memory[begin:end] = data
        self.image = memory

    def contents(self) -> Iterator[bytes | memoryview]:
        """The file's bytes, piece after piece.

        Raises:
            UnsupportedStateError: a value changed its size since it was planned.
        """
        if self.image is not None:
            yield self.image
            return
        for part in self.parts:
            if not isinstance(part, Blob):
                yield part
                continue
            data = part.source()
            if len(data) != part.num_bytes:
                raise UnsupportedStateError(part.key_path, "it changed while it was saved", "Save a copy of it.")
            yield data

    def write(self, directory: Path) -> FileEntry:
        """Writes the file; it is durable when this returns.

        Args:
            directory: the directory that is to become the checkpoint.

        Returns:
            Size and digest.

        Raises:
            OSError: from the file system.
            UnsupportedStateError: as `contents` does.
        """

        def fill(writer: FileWriter) -> None:
            for data in self.contents():
                writer.write(data)

        return write_file(directory / self.name, fill)


def plan_group(group: str, blobs: Sequence[Blob], max_shard_bytes: int) -> list[PlannedFile]:
    """The files of a group.

    Args:
        group: "model", "optimizer", "state" or "rank-00000".
        blobs: named; with none of them a file without tensors is planned.
        max_shard_bytes: data bytes of a shard with more than one tensor.

    Raises:
        ValueError: there would be too many of them.
    """
    shards = plan_shards(blobs, max_shard_bytes) or [[]]
    if len(shards) > MAX_SHARDS:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} would make {len(shards)} shards, more than {MAX_SHARDS}")
    files: list[PlannedFile] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{group}.safetensors" if len(shards) == 1 else f"{group}-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(PlannedFile(name, _parts(shard)))
        weight_map.update((blob.name, name) for blob in shard)
    if group == "model" and len(shards) > 1:
        total = sum(blob.num_bytes for blob in blobs)
        text = dump_json({"metadata": {"total_size": total}, "weight_map": weight_map})
        files.append(PlannedFile(WEIGHT_MAP_NAME, [text]))
    return files


def _parts(blobs: Sequence[Blob]) -> list[bytes | Blob]:
    # Widest items first, so that each tensor is aligned to its item size without a hole, as the library does it too.
    ordered = sorted(blobs, key=lambda blob: -DTYPE_BYTES[blob.dtype])
    metadata = {"format": "pt"}
    for blob in ordered:
        metadata.update((alias, blob.name) for alias in blob.aliases if alias != "format")
    return [build_header([(blob.name, blob.dtype, blob.shape) for blob in ordered], metadata), *ordered]


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
