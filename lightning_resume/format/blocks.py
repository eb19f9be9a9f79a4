"""A file's bytes in large pieces that unbuffered writing takes: at page addresses, all but the last of one size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_resume.format.gather import Part, copy_parts, part_bytes, part_data
from lightning_resume.format.memory import map_memory

BLOCK_BYTES = 4 * 2**20  # a multiple of the page


class Buffer:
    """Memory for one block, at the beginning of a page; its pages become real when they are first written."""

    def __init__(self) -> None:
        self.tensor = map_memory(BLOCK_BYTES)
        self.array = self.tensor.numpy()


class Block(NamedTuple):
    """A piece of a file.

    Attributes:
        data: its bytes.
        buffer: the buffer that they lie in, free again once they are written; None: they lie in the image.
    """

    data: memoryview
    buffer: Buffer | None


def image_blocks(image: memoryview) -> Iterator[Block]:
    """The blocks of a file whose bytes lie in memory already."""
    for begin in range(0, len(image), BLOCK_BYTES):
        yield Block(image[begin : begin + BLOCK_BYTES], None)


def gathered_blocks(parts: Sequence[Part], take: Callable[[], Buffer]) -> Iterator[Block]:
    """The blocks of a file whose parts are still where they were met.

    Args:
        parts: its contents.
        take: gives a free buffer; may wait for one.

    Raises:
        UnsupportedStateError: a value changed its size since it was planned.
    """
    buffer = take()
    begin = end = 0  # of what was noted for this buffer, but not yet copied
    noted: list[Part] = []
    for part in parts:
        num_bytes = part_bytes(part)
        if num_bytes <= BLOCK_BYTES - end:
            noted.append(part)
            end += num_bytes
            continue
        copy_parts(noted, buffer.tensor[begin:end])
        noted = []
        data = np.frombuffer(part_data(part), np.uint8)
        done = 0
        while done < num_bytes:
            if end == BLOCK_BYTES:
                yield Block(buffer.array.data[:end], buffer)
                buffer, end = take(), 0
            count = min(BLOCK_BYTES - end, num_bytes - done)
            np.copyto(buffer.array[end : end + count], data[done : done + count])
            done, end = done + count, end + count
        begin = end
    copy_parts(noted, buffer.tensor[begin:end])
    yield Block(buffer.array.data[:end], buffer)
