"""A save that fails or is killed at any file operation leaves whole checkpoints only, and never fewer good ones."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resume.catalog import clean_incomplete, newest_good, prune_checkpoints, scan_checkpoints
from lightning_resume.errors import CheckpointExistsError, CheckpointNotFoundError, CheckpointWriteError
from lightning_resume.format import blocks, contained, lanes, output, planned, prepared
from lightning_resume.format.checkpoint import read_checkpoint, verify_checkpoint, write_checkpoint
from lightning_resume.format.hidden import parse_hidden
from lightning_resume.format.image import Image
from lightning_resume.format.prepared import prepare_checkpoint

SIZE = 50
SHARD_BYTES = 200
OPERATIONS = ("open", "write", "fsync", "close", "mkdir", "link", "rename", "unlink", "rmdir")


def state(value: float) -> dict[str, Any]:
    """A state in which every kind of file occurs, and which says by its values which save it is of."""
    return {
        "state_dict": {"a": torch.full((SIZE,), value), "b": torch.full((SIZE,), -value)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.full((9,), value)}}}],
        "epoch": value,
    }


def save(path: Path, value: float, **arguments: Any) -> None:
    """Writes such a state, the model in two shards."""
    write_checkpoint(path, state(value), rank_states=[{"r": torch.ones(1)}], max_shard_bytes=SHARD_BYTES, **arguments)


@pytest.fixture(params=["one by one", "in lanes"])
def each_way(request: Any, monkeypatch: Any) -> None:
    """Small checkpoints are written without threads; the others in lanes, past the page cache, block by block."""
    if request.param == "in lanes":
        monkeypatch.setattr(sys.modules[__name__], "SIZE", 2500)
        monkeypatch.setattr(sys.modules[__name__], "SHARD_BYTES", 10_000)
        monkeypatch.setattr(lanes, "INLINE_BYTES", 0)
        monkeypatch.setattr(lanes, "DIRECT_BYTES", 1)
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)


def value_of(path: Path) -> float:
    """Which save a checkpoint is of; it is whole, or an error passes."""
    verify_checkpoint(path)
    result = read_checkpoint(path, rank=0)
    values = {result["epoch"], *result["state_dict"]["a"].tolist(), *(-result["state_dict"]["b"]).tolist()}
    (value,) = values
    return float(value)


@contextmanager
def intercepted(before: Callable[[int, str, tuple[Any, ...]], None]) -> Iterator[list[tuple[str, Any]]]:
    """Calls `before(number, operation, arguments)` ahead of every file operation, and lists them."""
    real = {name: getattr(os, name) for name in OPERATIONS}
    calls: list[tuple[str, Any]] = []
    lock = threading.Lock()

    def wrap(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with lock:
                calls.append((name, arguments))
                number = len(calls)
            before(number, name, arguments)
            return real[name](*arguments, **keywords)

        return call

    try:
        for name in OPERATIONS:
            setattr(os, name, wrap(name))
        yield calls
    finally:
        for name in OPERATIONS:
            setattr(os, name, real[name])


def record(path: Path, **arguments: Any) -> list[tuple[str, Any]]:
    """The file operations of one undisturbed save."""
    with intercepted(lambda number, name, arguments: None) as calls:
        save(path, 2.0, **arguments)
    return calls


def fail_at(target: int, number: int, code: int) -> Callable[[int, str, tuple[Any, ...]], None]:
    """Makes the n-th operation fail, and with it all later ones that would write (as on a full disk)."""

    def before(current: int, name: str, arguments: tuple[Any, ...]) -> None:
        if current == target or (code == errno.ENOSPC and current > target and name in ("write", "mkdir")):
            raise OSError(code, os.strerror(code))

    return before


def killed_child(action: Callable[[], None], at: int, *, half: bool = False) -> int:
    """Runs an action in a forked process that dies just ahead of its n-th file operation; returns its exit status."""

    def before(current: int, name: str, arguments: tuple[Any, ...]) -> None:
        if current == at:
            if half and name == "write":
                with suppress(OSError):  # unbuffered, it takes whole pages only
                    posix_write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os._exit(137)

    posix_write = os.write
    pid = os.fork()
    if pid == 0:
        try:
            with intercepted(before):
                action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.usefixtures("each_way")
def test_the_ladder_of_a_save(tmp_path: Path) -> None:
    """Each file fsynced, the index last; then the hidden directory, one rename, the parent; nothing is deleted."""
    steps: list[tuple[str, str]] = []

    def note(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "fsync":
            steps.append((name, Path(os.readlink(f"/proc/self/fd/{arguments[0]}")).name))
        elif name in ("rename", "unlink", "rmdir", "link"):
            steps.append((name, Path(arguments[-1]).name))

    with intercepted(note) as calls:
        save(tmp_path / "c", 1.0)
    files = [name for _, name in steps[:-3]]
    temp = next(Path(arguments[0]).name for name, arguments in calls if name == "mkdir")

    assert [step for step, _ in steps[:-3]] == ["fsync"] * len(files)
    assert sorted(files) == sorted(path.name for path in (tmp_path / "c").iterdir())
    assert files[-1] == "index.json"
    assert steps[-3:] == [("fsync", temp), ("rename", "c"), ("fsync", tmp_path.name)]


def test_the_hidden_directory_stands_beside_the_target(tmp_path: Path) -> None:
    """A rename across file systems would be a copy; its name tells whose it is."""
    calls = record(tmp_path / "deep" / "c")

    made = [Path(arguments[0]) for name, arguments in calls if name == "mkdir"]
    hidden = parse_hidden(made[-1].name)

    assert made[0] == tmp_path / "deep"
    assert made[-1].parent == tmp_path / "deep"
    assert hidden is not None
    assert (hidden.name, hidden.pid, hidden.kind) == ("c", os.getpid(), "tmp")


def test_nothing_is_deleted_before_its_successor_is_durable(tmp_path: Path) -> None:
    """Overwriting: the old one goes aside, the new one comes, the parent is fsynced, then the old one is deleted."""
    save(tmp_path / "c", 1.0)

    calls = record(tmp_path / "c", overwrite=True)
    names = [name for name, _ in calls]
    renames = [number for number, name in enumerate(names) if name == "rename"]

    assert [parse_hidden(Path(calls[number][1][1]).name) is not None for number in renames] == [True, False, True]
    assert "fsync" in names[renames[1] : renames[2]]
    assert "fsync" in names[renames[2] : names.index("unlink")]
    assert value_of(tmp_path / "c") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_failure_at_any_file_operation_leaves_the_last_checkpoint_and_no_half_one(code: int, tmp_path: Path) -> None:
    """The error is typed and keeps errno; the target is absent or whole; the previous checkpoint is whole."""
    total = len(record(tmp_path / "measure"))
    save(tmp_path / "step-00000001", 1.0)
    outcomes = set()

    for number in range(1, total + 1):
        target = tmp_path / f"step-{number + 1:08d}"
        with intercepted(fail_at(number, total, code)), pytest.raises(CheckpointWriteError) as caught:
            save(target, 2.0)
        outcomes.add(target.exists())

        assert caught.value.errno == code
        assert isinstance(caught.value, OSError)
        assert isinstance(caught.value.__cause__, OSError)
        assert repr(str(target)) in str(caught.value)
        assert not target.exists() or value_of(target) == 2.0
    assert value_of(tmp_path / "step-00000001") == 1.0
    assert outcomes == {False, True}  # True: only the last fsync, of the parent, failed
    assert {info.status for info in scan_checkpoints(tmp_path)} <= {"good", "incomplete"}


@pytest.mark.usefixtures("each_way")
def test_a_failed_save_removes_its_hidden_directory(tmp_path: Path) -> None:
    """A disk that is full stays as full as it was, and the next save at the same path succeeds."""
    total = len(record(tmp_path / "measure"))

    for number in range(2, total - 2):
        with intercepted(fail_at(number, total, errno.EIO)), pytest.raises(CheckpointWriteError):
            save(tmp_path / "c", 1.0)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["measure"]
    save(tmp_path / "c", 1.0)

    assert value_of(tmp_path / "c") == 1.0


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("half", [False, True], ids=["between", "in mid-write"])
def test_a_kill_at_any_file_operation_leaves_the_last_checkpoint_whole(half: bool, tmp_path: Path) -> None:
    """A new process finds the newest whole checkpoint, never a half one; what is left over can be cleaned up."""
    total = len(record(tmp_path / "measure"))
    whole = set()

    for number in range(1, total + 1):
        root = tmp_path / str(number)
        save(root / "step-00000001", 1.0, counters={"global_step": 1})

        status = killed_child(lambda root=root: save(root / "step-00000002", 2.0, counters={"global_step": 2}), number)
        newest = newest_good(root, verify=True)

        assert status == 137
        assert newest is not None
        assert value_of(newest.path) == float(newest.global_step)
        assert value_of(root / "step-00000001") == 1.0
        whole.add(newest.global_step)
        clean_incomplete(root)
        assert {path.name for path in root.iterdir()} <= {"step-00000001", "step-00000002"}
        assert all(info.status == "good" for info in scan_checkpoints(root))
    assert whole == {1, 2}


@pytest.mark.usefixtures("each_way")
def test_a_kill_at_any_file_operation_of_an_overwrite_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """At the path itself, with nobody cleaning up: also between the two renames the old one can be read there."""
    save(tmp_path / "measure", 1.0)
    calls = record(tmp_path / "measure", overwrite=True)
    seen = set()
    between = []

    for number in range(1, len(calls) + 1):
        root = tmp_path / str(number)
        save(root / "last", 1.0)

        status = killed_child(lambda root=root: save(root / "last", 2.0, overwrite=True), number)
        value = value_of(root / "last")
        good = [info for info in scan_checkpoints(root, verify=True) if info.status == "good"]

        assert status == 137
        assert [value_of(info.path) for info in good] == [value]
        if not (root / "last").exists():
            between.append(number)
        clean_incomplete(root)
        assert [path.name for path in root.iterdir()] == ["last"]
        assert value_of(root / "last") == value
        seen.add(value)
    assert seen == {1.0, 2.0}
    assert len(between) == 1


@pytest.mark.usefixtures("each_way")
def test_a_failure_at_any_file_operation_of_an_overwrite_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """With an error instead of a kill the process goes on: the path reads as before, or as new."""
    save(tmp_path / "measure", 1.0)
    total = len(record(tmp_path / "measure", overwrite=True))
    seen = set()

    for number in range(1, total + 1):
        path = tmp_path / str(number)
        save(path, 1.0)
        failed = False
        try:
            with intercepted(fail_at(number, total, errno.EIO)):
                save(path, 2.0, overwrite=True)
        except CheckpointWriteError:
            failed = True
        seen.add((failed, value_of(path)))

    assert seen == {(True, 1.0), (True, 2.0), (False, 2.0)}  # in turn: before, at the parent's fsync, while tidying


def save_twice(root: Path) -> None:
    """Saves by way of an image, then again: what is frozen is linked."""
    place, frozen = Image(), {"a": torch.ones(50), "b": torch.ones(50)}
    for step in (1, 2):
        value = {"state_dict": {**frozen, "c": torch.full((9,), float(step))}, "step": step}
        target = root / f"step-{step:08d}"
        checkpoint = prepare_checkpoint(target, value, frozen=frozen, counters={"global_step": step})
        checkpoint.copy_into(place)
        checkpoint.commit()


@pytest.mark.parametrize("is_kill", [True, False], ids=["kill", "EIO"])
def test_a_save_that_links_can_end_at_any_file_operation(is_kill: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """Killed or failing: what was committed is whole, the frozen file is one for both, a refused link is no failure."""
    monkeypatch.setattr(planned, "FROZEN_BYTES", 1)
    monkeypatch.setattr(prepared, "LINKED_BYTES", 1)
    with intercepted(lambda number, name, arguments: None) as calls:
        save_twice(tmp_path / "measure")
    names = [name for name, _ in calls]
    first = names.index("rename") + 4  # the parent's fsync is over
    newest = set()

    for number in range(first, len(names) + 1):
        root = tmp_path / str(number)
        if is_kill:
            assert killed_child(lambda root=root: save_twice(root), number) == 137
        else:
            with intercepted(fail_at(number, len(names), errno.EIO)), suppress(CheckpointWriteError):
                save_twice(root)
        found = newest_good(root, verify=True)

        assert found is not None
        assert read_checkpoint(found.path)["step"] == found.global_step
        assert verify_checkpoint(root / "step-00000001")
        newest.add(found.global_step)
    assert names.count("link") == 2  # the frozen shard, and the weight map
    assert newest == {1, 2}


def test_an_overwrite_after_a_cut_short_one_keeps_no_older_version(tmp_path: Path) -> None:
    """Left-over versions never come back once there is a newer one."""
    save(tmp_path / "measure", 1.0)
    calls = record(tmp_path / "measure", overwrite=True)
    rename = [number for number, (name, _) in enumerate(calls, 1) if name == "rename"]
    for kill_at in (rename[1], rename[2]):
        root = tmp_path / str(kill_at)
        save(root / "last", 1.0)
        killed_child(lambda root=root: save(root / "last", 2.0, overwrite=True), kill_at)

        save(root / "last", 3.0, overwrite=True)

        assert value_of(root / "last") == 3.0
        assert not any((parse_hidden(path.name) or ("",) * 4)[3] == "old" for path in root.iterdir())


@pytest.mark.usefixtures("each_way")
def test_short_writes_are_continued(tmp_path: Path) -> None:
    """The system may take fewer bytes than it was given."""
    real_write = os.write
    try:
        os.write = lambda fd, data: real_write(fd, data[:7])
        save(tmp_path / "c", 1.0)
    finally:
        os.write = real_write

    assert value_of(tmp_path / "c") == 1.0


@pytest.mark.usefixtures("each_way")
def test_a_write_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    """Never an endless loop."""
    real_write = os.write
    try:
        os.write = lambda fd, data: 0
        with pytest.raises(CheckpointWriteError, match="took no data") as caught:
            save(tmp_path / "c", 1.0)
    finally:
        os.write = real_write

    assert caught.value.errno == errno.EIO


@pytest.mark.usefixtures("each_way")
def test_a_signal_in_mid_save_is_no_failure(tmp_path: Path) -> None:
    """A handler that returns lets every file operation go on."""
    signals = []
    before = signal.signal(signal.SIGUSR1, lambda *arguments: signals.append(arguments))
    try:
        with intercepted(lambda number, name, arguments: os.kill(os.getpid(), signal.SIGUSR1)):
            save(tmp_path / "c", 1.0)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert signals
    assert value_of(tmp_path / "c") == 1.0


def test_a_disk_that_is_full_in_the_middle_of_a_file_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """While several files are being written, the first failure stops all of them, and no thread goes on."""
    real_write, written = os.write, []

    def write(fd: int, data: memoryview) -> int:
        written.append(len(data))
        if sum(written) > 40 * 2**20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(fd, data)

    value = {"state_dict": {str(n): torch.full((2**22,), float(n)) for n in range(6)}}
    threads = threading.active_count()
    monkeypatch.setattr(os, "write", write)

    with pytest.raises(CheckpointWriteError) as caught:
        write_checkpoint(tmp_path / "c", value, max_shard_bytes=2**25)

    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == threads


@pytest.mark.parametrize("refused_at", ["the switch", "the first write", "a later write"])
def test_a_file_system_without_unbuffered_writing_is_no_obstacle(
    refused_at: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Some say so when asked, some only when data comes: that file is then written through the page cache."""
    real_write, real_set, writes = os.write, output.OutputFile._set_direct, []

    def write(fd: int, data: memoryview) -> int:
        writes.append(is_direct := bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if is_direct and (refused_at == "the first write" or writes.count(True) == 3):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_write(fd, data)

    def set_direct(file: output.OutputFile, is_direct: bool) -> bool:
        return False if is_direct and refused_at == "the switch" else real_set(file, is_direct)

    probe = output.OutputFile(tmp_path / "probe", is_direct=True)
    probe.abandon()
    if not probe._is_direct:
        pytest.skip("this file system has no unbuffered writing")
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(output.OutputFile, "_set_direct", set_direct)
    value = {"state_dict": {"a": torch.arange(5 * 2**20 + 1)}}

    write_checkpoint(tmp_path / "c", value)

    assert torch.equal(read_checkpoint(tmp_path / "c")["state_dict"]["a"], value["state_dict"]["a"])
    assert (True in writes) == (refused_at != "the switch")
    assert False in writes


@pytest.mark.parametrize("room", range(5))
def test_without_room_for_threads_a_save_goes_on(room: int, tmp_path: Path, monkeypatch: Any) -> None:
    """At the end of the interpreter, or of a process's limit, none or not all of them can be started."""
    real, num_started = threading.Thread.start, 0

    def start(thread: threading.Thread) -> None:
        nonlocal num_started
        num_started += 1
        if num_started > room:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    value = {"state_dict": {str(n): torch.full((2**20,), float(n)) for n in range(6)}}

    write_checkpoint(tmp_path / "c", value, max_shard_bytes=2**23)

    assert torch.equal(read_checkpoint(tmp_path / "c")["state_dict"]["5"], torch.full((2**20,), 5.0))


@pytest.mark.parametrize("block", [0, 1, 5])
def test_a_failure_while_hashing_ends_the_save_and_its_threads(block: int, tmp_path: Path, monkeypatch: Any) -> None:
    """The threads before and behind it do not wait for each other for ever."""
    before, num_hashed = set(threading.enumerate()), 0

    class Digest:
        def update(self, data: memoryview) -> None:
            nonlocal num_hashed
            num_hashed += 1
            if num_hashed > block:
                raise MemoryError("no memory for a digest")

    monkeypatch.setattr(lanes, "hashlib", types.SimpleNamespace(sha256=Digest))
    checkpoint = prepare_checkpoint(tmp_path / "c", {"state_dict": {"a": torch.ones(2**24)}})

    with pytest.raises(MemoryError, match="no memory for a digest"):
        checkpoint.commit(1)

    assert set(threading.enumerate()) <= before
    assert not (tmp_path / "c").exists()


def test_a_file_system_that_cannot_fsync_directories_is_no_obstacle(tmp_path: Path) -> None:
    """EINVAL for a directory is passed over; for a file it is an error."""
    import stat as stat_module

    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        if stat_module.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real_fsync(fd)

    try:
        os.fsync = fsync
        save(tmp_path / "new" / "c", 1.0)
    finally:
        os.fsync = real_fsync

    assert value_of(tmp_path / "new" / "c") == 1.0


def test_linking_is_not_needed(tmp_path: Path, monkeypatch: Any) -> None:
    """Some systems have no right to it, some file systems no support."""

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(os, "link", refuse)

    save(tmp_path / "c", 1.0)
    save(tmp_path / "c", 2.0, overwrite=True)

    assert value_of(tmp_path / "c") == 2.0


def test_reading_works_where_files_cannot_be_opened_relative_to_a_directory(tmp_path: Path, monkeypatch: Any) -> None:
    """Windows has no such call."""
    save(tmp_path / "c", 1.0)
    monkeypatch.setattr(contained, "HAS_DIR_FD", False)

    assert value_of(tmp_path / "c") == 1.0


@pytest.mark.usefixtures("each_way")
def test_an_interrupt_removes_the_hidden_directory(tmp_path: Path) -> None:
    """Ctrl-C in mid-save passes on, and leaves nothing behind."""

    def interrupt(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if number == 8:
            raise KeyboardInterrupt

    with intercepted(interrupt), pytest.raises(KeyboardInterrupt):
        save(tmp_path / "c", 1.0)

    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    """It can be caught as FileExistsError too; the remedy names the argument."""
    save(tmp_path / "c", 1.0)

    with pytest.raises(CheckpointExistsError, match="overwrite=True") as caught:
        save(tmp_path / "c", 2.0)

    assert isinstance(caught.value, FileExistsError)
    assert value_of(tmp_path / "c") == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_no_checkpoint_is_never_replaced(overwrite: bool, tmp_path: Path) -> None:
    """A wrong path must not cost the user's files."""
    (tmp_path / "mydata").mkdir()
    (tmp_path / "mydata" / "precious.txt").write_text("x")

    with pytest.raises(CheckpointExistsError) as caught:
        save(tmp_path / "mydata", 1.0, overwrite=overwrite)

    assert caught.value.path == str(tmp_path / "mydata")
    assert (tmp_path / "mydata" / "precious.txt").read_text() == "x"


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    """Lightning's own checkpoints are files; a name may be taken over from one."""
    (tmp_path / "last.ckpt").write_text("old")

    with pytest.raises(CheckpointExistsError) as caught:
        save(tmp_path / "last.ckpt", 1.0)
    save(tmp_path / "last.ckpt", 2.0, overwrite=True)

    assert caught.value.found == "a file"
    assert value_of(tmp_path / "last.ckpt") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_replacing_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    """Deletion never follows a link."""
    save(tmp_path / "real", 1.0)
    (tmp_path / "last").symlink_to("real")

    save(tmp_path / "last", 2.0, overwrite=True)

    assert value_of(tmp_path / "real") == 1.0
    assert value_of(tmp_path / "last") == 2.0
    assert not (tmp_path / "last").is_symlink()


def test_an_empty_directory_may_be_filled_when_asked(tmp_path: Path) -> None:
    """A launcher may have made it."""
    (tmp_path / "c").mkdir()

    save(tmp_path / "c", 1.0, overwrite=True)

    assert value_of(tmp_path / "c") == 1.0


def test_of_several_writers_at_one_path_one_wins_whole(tmp_path: Path) -> None:
    """The others are told that something is there; nothing is mixed, nothing is left over."""
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def write(value: float) -> None:
        barrier.wait()
        try:
            save(tmp_path / "c", value)
        except CheckpointExistsError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(float(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(errors) == 3
    assert value_of(tmp_path / "c") in (0.0, 1.0, 2.0, 3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("path", ["", ".", "..", "/", "a/.."])
def test_a_path_without_a_name_is_a_wrong_argument(path: str) -> None:
    """There is no place beside it to write to first."""
    with pytest.raises(ValueError, match="no path for a checkpoint"):
        write_checkpoint(path, {})


def test_an_unknown_kind_is_a_wrong_argument(tmp_path: Path) -> None:
    """Told before anything is created."""
    with pytest.raises(ValueError, match="kind='half'"):
        write_checkpoint(tmp_path / "c", {}, kind="half")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["epoch=1-step=3.ckpt", "Grüße", "with space", "x" * 150])
def test_any_file_name_can_be_a_checkpoints(name: str, tmp_path: Path) -> None:
    """Lightning chooses names of its own."""
    save(tmp_path / name, 1.0)
    save(tmp_path / name, 2.0, overwrite=True)

    assert value_of(tmp_path / name) == 2.0
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_relative_path_is_taken_from_where_the_process_is(tmp_path: Path, monkeypatch: Any) -> None:
    """As any path."""
    monkeypatch.chdir(tmp_path)

    write_checkpoint("c", {"a": 1})

    assert read_checkpoint(str(tmp_path / "c")) == read_checkpoint("c") == {"a": 1}


@pytest.mark.parametrize("overwrite", [True, False], ids=["replaced", "pruned"])
def test_a_reader_whose_checkpoint_goes_away_reads_the_next_one_or_finds_none(
    overwrite: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """Another process may overwrite or prune in the middle of a read: the result is never mixed, nor called corrupt."""
    save(tmp_path / "c", 1.0)
    real_fdopen, opened = os.fdopen, []

    def fdopen(*arguments: Any, **keywords: Any) -> Any:
        opened.append(arguments)
        if len(opened) == 12:
            save(tmp_path / "c", 2.0, overwrite=True) if overwrite else prune_checkpoints([tmp_path / "c"])
        return real_fdopen(*arguments, **keywords)

    monkeypatch.setattr(os, "fdopen", fdopen)

    if overwrite:
        assert read_checkpoint(tmp_path / "c")["epoch"] == 2.0
    else:
        with pytest.raises(CheckpointNotFoundError) as caught:
            read_checkpoint(tmp_path / "c")
        assert caught.value.path == str(tmp_path / "c")
    assert len(opened) >= 12


def test_a_process_can_read_while_another_overwrites_again_and_again(tmp_path: Path) -> None:
    """Each read gives one save, whole."""
    save(tmp_path / "c", 0.0)
    stop = threading.Event()

    def overwrite() -> None:
        value = 1.0
        while not stop.is_set():
            save(tmp_path / "c", value, overwrite=True)
            value += 1

    thread = threading.Thread(target=overwrite)
    thread.start()
    try:
        values = [float(read_checkpoint(tmp_path / "c")["epoch"]) for _ in range(30)]
    finally:
        stop.set()
        thread.join()

    assert values == sorted(values)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
