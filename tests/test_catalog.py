"""A folder of checkpoints: scanned without ever failing, ordered by number, pruned and cleaned without losing one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resume.catalog import (
    CheckpointInfo,
    clean_incomplete,
    newest_good,
    newest_verified,
    prune_checkpoints,
    scan_checkpoints,
    step_checkpoints,
    step_dirname,
    steps_of_run,
)
from lightning_resume.errors import CheckpointReadError
from lightning_resume.format import hidden
from lightning_resume.format.checkpoint import read_checkpoint, read_index, write_checkpoint


def save(path: Path, step: int, epoch: int = 0, batch: int = 0, **arguments: Any) -> Path:
    """Writes a small checkpoint."""
    counters = {"global_step": step, "current_epoch": epoch, "batch_in_epoch": batch}
    write_checkpoint(path, {"state_dict": {"w": torch.full((2,), step)}}, counters=counters, **arguments)
    return path


def statuses(root: Path, **arguments: Any) -> dict[str, str]:
    """Name → status of all that is in a folder."""
    return {info.path.name: info.status for info in scan_checkpoints(root, **arguments)}


def dead_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_name_of_a_steps_directory_is_padded() -> None:
    """Sorted by name it is sorted by step, for the first hundred million."""
    assert step_dirname(500) == "step-00000500"
    assert step_dirname(123456789) == "step-123456789"
    with pytest.raises(ValueError, match="negative"):
        step_dirname(-1)


def test_a_good_checkpoint_is_described(tmp_path: Path) -> None:
    """What a table or a decision needs, without reading any data."""
    path = save(tmp_path / "step-00000007", 7, 1, 3, kind="weights", run_id="r", timeline=2)

    (info,) = scan_checkpoints(tmp_path)

    assert info == CheckpointInfo(
        path=path,
        status="good",
        global_step=7,
        current_epoch=1,
        batch_in_epoch=3,
        num_bytes=read_index(path).num_bytes,
        kind="weights",
        run_id="r",
        timeline=2,
    )
    assert str(info) == "step-00000007: good"


def test_the_order_is_by_number_and_never_by_text_or_time(tmp_path: Path) -> None:
    """Also beyond the padding, and when an old directory was touched last."""
    for step in (100_000_000, 99_999_999, 3, 20):
        save(tmp_path / step_dirname(step), step)
    save(tmp_path / "b", 20, 1, 0)
    save(tmp_path / "a", 20, 1, 2)
    os.utime(tmp_path / step_dirname(3), (2**31, 2**31))

    infos = scan_checkpoints(tmp_path)

    assert [info.global_step for info in infos] == [3, 20, 20, 20, 99_999_999, 100_000_000]
    assert [info.path.name for info in infos[1:4]] == ["step-00000020", "b", "a"]
    assert newest_good(tmp_path).path.name == "step-100000000"


def test_a_run_that_went_back_is_ordered_by_its_timeline_first(tmp_path: Path) -> None:
    """Its newest checkpoint has a lower step number than those of the timeline that it left."""
    for step, timeline in ((4, 0), (8, 0), (5, 1), (6, 1)):
        save(tmp_path / step_dirname(step), step, timeline=timeline)

    infos = scan_checkpoints(tmp_path)

    assert [(info.timeline, info.global_step) for info in infos] == [(0, 4), (0, 8), (1, 5), (1, 6)]
    assert newest_good(tmp_path, verify=True) == infos[-1]


def test_a_folder_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    """A first start is no error."""
    assert scan_checkpoints(tmp_path / "none") == []
    assert newest_good(tmp_path / "none") is None
    assert clean_incomplete(tmp_path / "none") == []


def test_a_file_in_the_folders_place_is_told(tmp_path: Path) -> None:
    """The user meant something else."""
    (tmp_path / "f").write_text("x")

    with pytest.raises(CheckpointReadError) as caught:
        scan_checkpoints(tmp_path / "f")

    assert caught.value.path == str(tmp_path / "f")


def test_rubbish_gets_a_line_each_and_no_exception(tmp_path: Path) -> None:
    """Whatever lies in the folder, the good checkpoint is found."""
    save(tmp_path / "step-00000002", 2)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000010").write_text("a file")
    (tmp_path / "step-00000011").mkdir()
    (tmp_path / "step-00000011" / "index.json").write_bytes(b"\x00\xff\xfe")
    (tmp_path / "step-00000012").mkdir()
    (tmp_path / "step-00000012" / "index.json").mkdir()
    (tmp_path / "step-00000013").mkdir()
    (tmp_path / "step-00000013" / "index.json").write_text('{"schema": "lightning-resume/7"}')
    (tmp_path / "step-00000014").symlink_to("step-00000002")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mydata").mkdir()
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "index.json").write_text('{"shards": [1, 2]}')
    (tmp_path / ".hidden").mkdir()
    (tmp_path / os.fsdecode(b"\xff\xfe")).mkdir()
    (tmp_path / ".step-00000020.0123456789abcdef-999999.tmp").mkdir()
    (tmp_path / ".step-00000021.0123456789abcdef-999999.trash").mkdir()

    result = statuses(tmp_path)

    assert result == {
        "step-00000002": "good",
        "step-00000009": "incomplete",
        "step-00000010": "foreign",
        "step-00000011": "corrupt",
        "step-00000012": "corrupt",
        "step-00000013": "corrupt",
        "step-00000014": "foreign",
        "dangling": "foreign",
        "pipe": "foreign",
        "notes.txt": "foreign",
        "mydata": "foreign",
        "dataset": "foreign",
        ".hidden": "foreign",
        os.fsdecode(b"\xff\xfe"): "foreign",
        ".step-00000020.0123456789abcdef-999999.tmp": "incomplete",
        ".step-00000021.0123456789abcdef-999999.trash": "incomplete",
    }
    assert all(info.reason and "\n" not in info.reason for info in scan_checkpoints(tmp_path)[:-1])
    assert newest_good(tmp_path).global_step == 2


def test_an_unreadable_entry_gets_a_line(tmp_path: Path, monkeypatch: Any) -> None:
    """The system may refuse to list a directory; the others are looked at all the same."""
    save(tmp_path / "step-00000001", 1)
    save(tmp_path / "step-00000002", 2)
    real_listdir = os.listdir

    def listdir(path: Any) -> list[str]:
        if path == tmp_path / "step-00000002":
            raise PermissionError(13, "Permission denied")
        return real_listdir(path)

    monkeypatch.setattr(os, "listdir", listdir)

    infos = {info.path.name: info for info in scan_checkpoints(tmp_path)}

    assert infos["step-00000001"].status == "good"
    assert (infos["step-00000002"].status, infos["step-00000002"].reason) == (
        "corrupt",
        "cannot be looked at: Permission denied",
    )


def test_an_entry_that_vanishes_during_the_scan_gets_a_line(tmp_path: Path, monkeypatch: Any) -> None:
    """Another process prunes at the same time."""
    save(tmp_path / "step-00000001", 1)
    real_listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [*real_listdir(path), *["step-00000000"] * (path == tmp_path)])

    result = statuses(tmp_path)

    assert result == {"step-00000000": "incomplete", "step-00000001": "good"}


def test_a_checkpoint_that_is_pruned_while_it_is_looked_at_is_not_called_corrupt(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Otherwise a start beside another process's pruning would be refused."""
    path = save(tmp_path / "step-00000001", 1)
    real_stat = os.stat

    def stat_then_prune(name: Any, **keywords: Any) -> os.stat_result:
        if name == "model.safetensors" and path.exists():
            prune_checkpoints([path])
        return real_stat(name, **keywords)

    monkeypatch.setattr(os, "stat", stat_then_prune)

    (info,) = scan_checkpoints(tmp_path)

    assert (info.status, info.reason) == ("incomplete", "gone while it was looked at")


def test_the_quick_look_finds_a_wrong_size_and_the_full_one_a_flipped_bit(tmp_path: Path) -> None:
    """Sizes cost nothing; digests are compared when asked."""
    for step in (1, 2, 3):
        save(tmp_path / step_dirname(step), step)
    flipped, cut = tmp_path / step_dirname(2) / "model.safetensors", tmp_path / step_dirname(3) / "model.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\x77")
    cut.write_bytes(cut.read_bytes()[:-1])

    quick, full = statuses(tmp_path), statuses(tmp_path, verify=True)

    assert list(quick.values()).count("good") == 2
    assert full == {step_dirname(1): "good", step_dirname(2): "corrupt", step_dirname(3): "corrupt"}
    assert newest_good(tmp_path).global_step == 2
    assert newest_good(tmp_path, verify=True).global_step == 1
    reasons = {info.path.name: info.reason for info in scan_checkpoints(tmp_path, verify=True)}
    assert reasons[step_dirname(2)].startswith("model.safetensors: expected sha256 ")


def test_the_newest_is_chosen_among_the_kind_that_is_asked_for(tmp_path: Path) -> None:
    """A model-only save cannot be resumed from."""
    save(tmp_path / "step-00000001", 1)
    save(tmp_path / "step-00000002", 2, kind="weights")

    assert newest_good(tmp_path).global_step == 1
    assert newest_good(tmp_path, kind="weights").global_step == 2
    assert newest_good(tmp_path, kind=None).global_step == 2


def test_a_runs_steps_are_its_good_full_checkpoints_that_are_named_after_their_step(tmp_path: Path) -> None:
    """Not another run's, a ModelCheckpoint's, a model-only one, or one whose name says another step."""
    for step, arguments in ((2, {}), (9, {"timeline": 1}), (4, {"kind": "weights"}), (5, {"run_id": "other"})):
        save(tmp_path / step_dirname(step), step, **{"run_id": "run", **arguments})
    save(tmp_path / "best.ckpt", 6, run_id="run")
    save(tmp_path / step_dirname(8), 7, run_id="run")
    (save(tmp_path / step_dirname(3), 3, run_id="run") / "state.json").unlink()

    steps, run = step_checkpoints(tmp_path), steps_of_run(tmp_path, "run")

    assert [info.path.name for info in steps] == [step_dirname(step) for step in (2, 5, 9)]
    assert {place: info.path.name for place, info in run.items()} == {(0, 2): step_dirname(2), (1, 9): step_dirname(9)}


def test_the_newest_verified_one_is_found_behind_damaged_ones(tmp_path: Path) -> None:
    """A flipped bit is seen; with no good one there is none."""
    for step in (1, 2):
        save(tmp_path / step_dirname(step), step, run_id="run")
    file = tmp_path / step_dirname(2) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    run = steps_of_run(tmp_path, "run")

    assert newest_verified(run) == (0, 1)
    assert newest_verified({(0, 2): run[0, 2]}) is None


def test_a_checkpoint_without_counters_is_older_than_any_with(tmp_path: Path) -> None:
    """A plain loop need not count."""
    write_checkpoint(tmp_path / "z", {})
    save(tmp_path / "a", 0)

    assert [info.path.name for info in scan_checkpoints(tmp_path)] == ["z", "a"]
    assert newest_good(tmp_path).path.name == "a"


def test_pruning_deletes_what_it_is_given_and_nothing_else(tmp_path: Path) -> None:
    """Other files in the folder are not ours."""
    paths = [save(tmp_path / step_dirname(step), step) for step in (1, 2, 3)]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mydata").mkdir()

    pruned = prune_checkpoints(paths[:2])

    assert pruned == paths[:2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mydata", "notes.txt", "step-00000003"]


def test_pruning_renames_out_of_sight_first(tmp_path: Path, monkeypatch: Any) -> None:
    """A kill in mid-deletion leaves no half checkpoint under its name."""
    path = save(tmp_path / "step-00000001", 1)
    names: list[list[str]] = []
    real_unlink = os.unlink

    def unlink(file: Any) -> None:
        names.append(os.listdir(tmp_path))
        real_unlink(file)

    monkeypatch.setattr(os, "unlink", unlink)

    prune_checkpoints([path])

    assert names
    assert all(hidden.parse_hidden(name).kind == "trash" for listing in names for name in listing)


def test_a_checkpoint_that_is_gone_already_is_a_warning(tmp_path: Path) -> None:
    """Training does not die because a user tidied up; the rest is pruned."""
    path = save(tmp_path / "step-00000002", 2)

    with pytest.warns(UserWarning, match="gone already"):
        pruned = prune_checkpoints([tmp_path / "step-00000001", path])

    assert pruned == [path]
    assert list(tmp_path.iterdir()) == []


def test_a_failing_deletion_is_a_warning(tmp_path: Path, monkeypatch: Any) -> None:
    """The checkpoint is out of sight or still whole; what is left is cleaned up by the next process."""
    path = save(tmp_path / "step-00000001", 1)
    monkeypatch.setattr(os, "unlink", lambda file: (_ for _ in ()).throw(OSError(5, "Input/output error")))

    with pytest.warns(UserWarning, match="could not be deleted: .*Input/output error"):
        pruned = prune_checkpoints([path])

    assert pruned == []
    assert list(statuses(tmp_path).values()) == ["incomplete"]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_is_no_checkpoint_is_not_pruned(kind: str, tmp_path: Path) -> None:
    """A wrong path costs nothing."""
    path = tmp_path / "precious"
    if kind == "directory":
        path.mkdir()
        (path / "data").write_text("x")
    elif kind == "file":
        path.write_text("x")
    else:
        path.symlink_to(save(tmp_path / "step-00000001", 1))

    with pytest.warns(UserWarning, match="no checkpoint and was not deleted"):
        pruned = prune_checkpoints([path])

    assert pruned == []
    assert path.exists()


def test_an_incomplete_or_corrupt_step_directory_can_be_pruned(tmp_path: Path) -> None:
    """By name or by index it is ours."""
    (tmp_path / "step-00000001").mkdir()
    corrupt = save(tmp_path / "best", 2)
    (corrupt / "index.json").write_bytes(b"x")

    pruned = prune_checkpoints([tmp_path / "step-00000001", corrupt])

    assert len(pruned) == 2
    assert list(tmp_path.iterdir()) == []


def leave(root: Path, kind: str, pid: int, name: str = "step-00000009", token: str | None = None) -> Path:
    """What a killed process leaves: a hidden directory with a file in it."""
    own = hidden.hidden_path(root / name, "tmp").name
    token = token or hidden.parse_hidden(own).token
    path = root / f".{name}.{token}-{pid}.{kind}"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"half")
    return path


def test_cleaning_removes_what_dead_processes_left(tmp_path: Path) -> None:
    """Empty, half or full without an index: saves in flight and deletions, of this machine's dead processes."""
    good = save(tmp_path / "step-00000001", 1)
    pid = dead_pid()
    left = [
        leave(tmp_path, "tmp", pid),
        leave(tmp_path, "trash", pid, "step-00000002"),
        leave(tmp_path, "tmp", pid, "x"),
    ]
    (left[2] / "model.safetensors").unlink()

    cleaned = clean_incomplete(tmp_path)

    assert sorted(cleaned) == sorted(left)
    assert list(tmp_path.iterdir()) == [good]


def test_cleaning_leaves_what_a_live_process_is_writing(tmp_path: Path) -> None:
    """This process, or another one that is still running."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = hidden._process_start(process.pid)
        token = hidden._machine() + start + "00000000"
        mine, theirs = leave(tmp_path, "tmp", os.getpid()), leave(tmp_path, "tmp", process.pid, token=token)

        cleaned = clean_incomplete(tmp_path, stale_after=timedelta(0))

        assert cleaned == []
        assert mine.exists()
        assert theirs.exists()
    finally:
        process.communicate(b"\n")


def test_a_process_that_got_the_dead_ones_number_does_not_protect_its_leavings(tmp_path: Path) -> None:
    """In containers a restarted job has the same pid: when it started tells them apart."""
    token = hidden._machine() + "00000000" + "00000000"
    left = leave(tmp_path, "tmp", os.getpid(), token=token)

    cleaned = clean_incomplete(tmp_path)

    assert cleaned == [left]


def test_leavings_of_another_machine_are_removed_only_when_they_are_stale(tmp_path: Path) -> None:
    """Its processes cannot be asked; a pid that is dead here may be alive there."""
    token = "ffffffff" + "00000000" + "00000000"
    left = leave(tmp_path, "tmp", dead_pid(), token=token)

    early = clean_incomplete(tmp_path)
    late = clean_incomplete(tmp_path, stale_after=timedelta(0))

    assert (early, late) == ([], [left])


def test_the_machine_is_told_by_host_name_and_process_namespace() -> None:
    """Containers may share a host name and count their processes from one."""
    token = hidden.parse_hidden(hidden.hidden_path(Path("c"), "tmp").name).token

    assert len(token) == 24
    assert token[:8] == hidden._machine()
    assert token[:8] != hidden._digest(os.uname().nodename)
    assert token[8:16] == hidden._process_start(os.getpid())


@pytest.mark.parametrize(
    "name",
    [
        "step-00000009.tmp",
        ".step-00000009.tmp",
        ".step-00000009.7f3a-1.tmp",
        ".step-00000009.0123456789abcdef-1.tmp.bak",
        ".step-00000009.0123456789ABCDEF-1.tmp",
        ".step-00000009.0123456789abcdef-x.tmp",
        "..0123456789abcdef-1.tmp",
        "step-00000009.0123456789abcdef-1.trash",
        "notes.txt",
    ],
)
def test_cleaning_touches_no_other_names(name: str, tmp_path: Path) -> None:
    """Only names that this package gives."""
    (tmp_path / name).mkdir()

    cleaned = clean_incomplete(tmp_path, stale_after=timedelta(0))

    assert cleaned == []
    assert (tmp_path / name).exists()


def test_a_replaced_version_without_successor_counts_and_is_put_back(tmp_path: Path) -> None:
    """A kill between the two renames of an overwrite: the old checkpoint is the only one, and it is not lost."""
    save(tmp_path / "last", 5)
    old = tmp_path / f".last.0123456789abcdef-{dead_pid()}.old"
    (tmp_path / "last").rename(old)

    newest = newest_good(tmp_path, verify=True)
    direct = read_checkpoint(tmp_path / "last")
    clean_incomplete(tmp_path)

    assert newest.path == old
    assert torch.equal(direct["state_dict"]["w"], torch.full((2,), 5))
    assert statuses(tmp_path) == {"last": "good"}


def test_a_replaced_version_with_its_successor_is_removed(tmp_path: Path) -> None:
    """It is older, and out of sight already."""
    save(tmp_path / "last", 6)
    old = save(tmp_path / f".last.0123456789abcdef-{dead_pid()}.old", 5)

    before = statuses(tmp_path)
    clean_incomplete(tmp_path)

    assert before == {"last": "good", old.name: "incomplete"}
    assert statuses(tmp_path) == {"last": "good"}


def test_a_pruned_checkpoint_does_not_come_back_as_its_older_version(tmp_path: Path) -> None:
    """What was left of an overwrite goes with it."""
    path = save(tmp_path / "last", 6)
    save(tmp_path / f".last.0123456789abcdef-{dead_pid()}.old", 5)

    prune_checkpoints([path])

    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_cleaned_is_a_warning(tmp_path: Path, monkeypatch: Any) -> None:
    """The start of training does not fail because of leavings."""
    left = leave(tmp_path, "tmp", dead_pid())
    monkeypatch.setattr(os, "unlink", lambda file: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))

    with pytest.warns(UserWarning, match="could not be removed"):
        cleaned = clean_incomplete(tmp_path)

    assert cleaned == []
    assert left.exists()


def test_a_scan_changes_nothing_and_warns_of_nothing(tmp_path: Path) -> None:
    """Looking is free."""
    save(tmp_path / "step-00000001", 1)
    leave(tmp_path, "tmp", dead_pid())
    before = {str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scan_checkpoints(tmp_path, verify=True)
        newest_good(tmp_path, verify=True)

    assert {str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_catalog_works_without_torch(tmp_path: Path) -> None:
    """Listing and verifying are quick to start."""
    save(tmp_path / "step-00000003", 3)
    code = (
        "import sys, json; from lightning_resume.catalog import scan_checkpoints;"
        "infos = scan_checkpoints(sys.argv[1], verify=True);"
        "print(json.dumps([[str(i) for i in infos], [m for m in ('torch', 'numpy') if m in sys.modules]]))"
    )

    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )

    assert json.loads(result.stdout) == [["step-00000003: good"], []]
