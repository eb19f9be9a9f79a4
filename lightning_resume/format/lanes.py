"""Writing several files at once, each hashed on the way; memory and threads are bounded, and end with the call.

A lane is two threads: one gathers and hashes a block while the other writes the one before it. With one lane the files
follow each other. Where one file is most of the checkpoint, and there is a core to spare, a third thread gathers. A
checkpoint of a few MB is written without any thread.
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

MIN_BUFFERS = 3  # of a lane: one being filled, one being written, one between
NUM_BUFFERS = 4 * MIN_BUFFERS  # of two lanes together, and of four: 48 MiB; a thread may be late on a busy machine
DIRECT_BYTES = 2**20  # smaller files are left to the page cache
INLINE_BYTES = 4 * 2**20  # in all; below it a thread costs more than it saves


class Messages(Protocol):
    """What another thread has put there."""

    def get(self) -> Source | Block | None:
        """The next one; None: there are no more."""


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
    num_lanes = min(num_lanes, len(files))
    run = _Run(directory, files, max(MIN_BUFFERS, NUM_BUFFERS // max(2, num_lanes)))
    sizes = [file.num_bytes for file in files]
    if sum(sizes) < INLINE_BYTES:
        run.attempt(lambda: _hash_inline(run))
    else:
        # Taken before another lane can: the lane with the gatherer is this thread's.
        largest = run.pending.popleft() if num_lanes > 1 and sum(sizes) < 2 * max(sizes) else None
        lanes = [threading.Thread(target=_lane, args=(run,)) for _ in range(num_lanes - 1)]
        run.attempt(lambda: beside(lanes, lambda _: _lane(run, largest)))
    if run.failure is not None:
        raise run.failure
    return {file.name: run.entries[file.name] for file in files}


class _Run:
    """One call of `write_files`: what its threads share."""

    def __init__(self, directory: Path, files: Sequence[Source], max_buffers: int) -> None:
        self.directory, self.max_buffers = directory, max_buffers  # buffers of each lane
        self.pending = deque(sorted(files, key=lambda file: -file.num_bytes))
        self.entries: dict[str, FileEntry] = {}
        self.failure: BaseException | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        """Does something. A failure stops all threads of the run; the first one is the one that is told."""
        try:
            action()
        except BaseException as error:
            self.failure = self.failure or error


def _lane(run: _Run, largest: Source | None = None) -> None:
    """Gathers and hashes one file after the other, while another thread writes what was hashed.

    If it begins with the largest one, this thread gathers only, and a third one hashes.
    """
    has_gatherer = largest is not None
    to_write: queue.SimpleQueue[Source | Block | None] = queue.SimpleQueue()
    writer, hasher = _Writer(run), _Hasher(run, to_write.put)
    # Short: what lies in memory already takes no buffer, and one lane would take all files before the others begin.
    to_hash: queue.Queue[Source | Block | None] = queue.Queue(maxsize=2)

    def gather_beside(has_threads: bool) -> None:
        try:
            if has_threads:
                _gather_files(run, to_hash.put if has_gatherer else hasher.put, writer.take, largest)
            else:
                _hash_inline(run, largest)
        except BaseException as error:  # before the other threads are waited for
            run.failure = run.failure or error
        finally:
            to_hash.put(None)
            if not (has_threads and has_gatherer):
                to_write.put(None)  # there may be nobody to hand it on

    def hash_all() -> None:
        _work_off(run, to_hash, hasher.put)
        to_write.put(None)

    def write_all() -> None:
        _work_off(run, to_write, writer.put)
        writer.abandon()

    threads = [threading.Thread(target=write_all)]
    if has_gatherer:
        threads.append(threading.Thread(target=hash_all))
    run.attempt(lambda: beside(threads, gather_beside))


def _work_off(run: _Run, messages: Messages, put: Callable[[Source | Block], None]) -> None:
    """Takes what comes, until None does; also after a failure, since somebody may be waiting for a buffer."""
    while (message := messages.get()) is not None:
        run.attempt(functools.partial(put, message))


def _hash_inline(run: _Run, first: Source | None = None) -> None:
    writer = _Writer(run)
    try:
        _gather_files(run, _Hasher(run, writer.put).put, writer.take, first)
    finally:
        writer.abandon()


def _gather_files(
    run: _Run, put: Callable[[Source | Block], None], take: Callable[[], Buffer], first: Source | None = None
) -> None:
    while run.failure is None:
        try:
            file = first or run.pending.popleft()
        except IndexError:
            return
        first = None
        put(file)
        for block in file.blocks(take):
            put(block)
            if run.failure is not None:
                return


class _Hasher:
    """Takes the digests of files on their way.

    Args:
        run: gets a file's entry when all of it has passed.
        put: takes the messages next.
    """

    def __init__(self, run: _Run, put: Callable[[Source | Block], None]) -> None:
        self._run, self._put = run, put
        self._digest = hashlib.sha256()
        self._file: Source | None = None
        self._bytes_left = 0

    def put(self, message: Source | Block) -> None:
        """Hashes a block and hands it on, whatever happens: somebody may be waiting for its buffer."""
        try:
            if not isinstance(message, Block):
                self._digest, self._file, self._bytes_left = hashlib.sha256(), message, message.num_bytes
            elif self._run.failure is None:
                self._digest.update(message.data)
                self._bytes_left -= len(message.data)
            if self._file is not None and not self._bytes_left:
                self._run.entries[self._file.name] = FileEntry(self._file.num_bytes, self._digest.hexdigest())
        finally:
            self._put(message)


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
        if self._num_buffers < self._run.max_buffers and self._free.empty():
            self._num_buffers += 1
            return Buffer()
        return self._free.get()

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
