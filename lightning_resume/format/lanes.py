"""Writing several files at once, each hashed on the way; memory and threads are bounded, and end with the call.

A lane is two threads: one gathers and hashes a block while the other writes the one before it. With one lane the files
follow each other. A checkpoint of a few MB is written without any thread.
"""

from __future__ import annotations

import functools
import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from lightning_resume.format.blocks import Block, Buffer
from lightning_resume.format.index import FileEntry
from lightning_resume.format.output import OutputFile
from lightning_resume.format.threads import beside

BUFFERS_PER_LANE = 3  # one being filled, one being written, one between: 48 MiB in four lanes
DIRECT_BYTES = 2**20  # smaller files are left to the page cache
INLINE_BYTES = 4 * 2**20  # in all; below it a thread costs more than it saves


class Source(Protocol):
    """A file that is to be written."""

    name: str
    num_bytes: int

    def blocks(self, take: Callable[[], Buffer]) -> Iterator[Block]:
        """Its bytes, in buffers from `take` where they do not lie in memory already."""


def write_files(directory: Path, files: Sequence[Source], num_lanes: int) -> dict[str, FileEntry]:
    """Writes files; all are durable when this returns. When it fails, nothing goes on in the background.

    Args:
        directory: where; none of the files may be there.
        files: what to write; the largest are begun first.
        num_lanes: files at a time; each is hashed by one thread.

    Returns:
        Name → size and digest, in the order of `files`.

    Raises:
        OSError: the first failure of the file system; the files are left in part.
        UnsupportedStateError: a value changed its size since it was planned.
    """
    run = _Run(directory, files)
    if sum(file.num_bytes for file in files) < INLINE_BYTES:
        run.attempt(lambda: _hash_inline(run))
    else:
        lanes = [threading.Thread(target=_lane, args=(run,)) for _ in range(min(num_lanes, len(files)) - 1)]
        run.attempt(lambda: beside(lanes, lambda _: _lane(run)))
    if run.failure is not None:
        raise run.failure
    return {file.name: run.entries[file.name] for file in files}


class _Run:
    """One call of `write_files`: what its threads share."""

    def __init__(self, directory: Path, files: Sequence[Source]) -> None:
        self.directory = directory
        self.pending = deque(sorted(files, key=lambda file: -file.num_bytes))
        self.entries: dict[str, FileEntry] = {}
        self.failure: BaseException | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        """Does something. A failure stops all threads of the run; the first one is the one that is told."""
        try:
            action()
        except BaseException as error:
            self.failure = self.failure or error


def _lane(run: _Run) -> None:
    """Hashes one file after the other while another thread writes them."""
    messages: queue.SimpleQueue[Source | Block | None] = queue.SimpleQueue()
    writer = _Writer(run)

    def hash_beside(has_thread: bool) -> None:
        try:
            if has_thread:
                _hash_files(run, messages.put, writer.take)
            else:
                _hash_inline(run)
        except BaseException as error:  # before the other thread is waited for
            run.failure = run.failure or error
        finally:
            messages.put(None)

    run.attempt(lambda: beside([threading.Thread(target=writer.work_off, args=(messages,))], hash_beside))


def _hash_inline(run: _Run) -> None:
    writer = _Writer(run)
    try:
        _hash_files(run, writer.put, writer.take)
    finally:
        writer.abandon()


def _hash_files(run: _Run, put: Callable[[Source | Block], None], take: Callable[[], Buffer]) -> None:
    while run.failure is None:
        try:
            file = run.pending.popleft()
        except IndexError:
            return
        digest = hashlib.sha256()
        put(file)
        for block in file.blocks(take):
            digest.update(block.data)
            put(block)
            if run.failure is not None:
                return
        run.entries[file.name] = FileEntry(file.num_bytes, digest.hexdigest())


class _Writer:
    """Creates, fills and finishes one file after the other; lends the buffers of its lane."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._num_buffers = 0
        self._file: OutputFile | None = None
        self._bytes_left = 0

    def take(self) -> Buffer:
        """A free buffer; waits for one where there are enough of them."""
        if self._num_buffers < BUFFERS_PER_LANE and self._free.empty():
            self._num_buffers += 1
            return Buffer()
        return self._free.get()

    def work_off(self, messages: queue.SimpleQueue[Source | Block | None]) -> None:
        """Takes what comes, until None does; also after a failure, since somebody may be waiting for a buffer."""
        while (message := messages.get()) is not None:
            self._run.attempt(functools.partial(self.put, message))
        self.abandon()

    def put(self, message: Source | Block) -> None:
        """Begins a file, or appends a block; finishes the file when nothing is left of it."""
        if isinstance(message, Block):
            try:
                if self._run.failure is None and self._file is not None:
                    self._file.write(message.data)
                    self._bytes_left -= len(message.data)
            finally:
                if message.buffer is not None:
                    self._free.put(message.buffer)
        elif self._run.failure is None:
            is_direct = message.num_bytes >= DIRECT_BYTES
            self._file = OutputFile(self._run.directory / message.name, is_direct=is_direct)
            self._bytes_left = message.num_bytes
        if self._file is not None and not self._bytes_left and self._run.failure is None:
            self._file.finish()
            self._file = None

    def abandon(self) -> None:
        """Closes the file that a failure left open."""
        if self._file is not None:
            self._file.abandon()
