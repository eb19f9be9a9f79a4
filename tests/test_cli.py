"""The command `lightning-resume`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_resume import cli
from lightning_resume.format.checkpoint import write_checkpoint
from lightning_resume.format.migrate import saved_schema
from lightning_resume.format.migrations import SCHEMA
from lightning_resume.lock import FolderLock

SCHEMA_1 = Path(__file__).parent / "format" / "frozen" / "schema-1"


def write_steps(root: Path, *steps: int, **arguments: Any) -> None:
    """Writes a small checkpoint for each step."""
    for step in steps:
        counters = {"global_step": step, "current_epoch": 1, "batch_in_epoch": 2}
        state = {"state_dict": {"weight": torch.ones(3)}}
        write_checkpoint(root / f"step-{step:08d}", state, counters=counters, **arguments)


def damage(checkpoint: Path) -> None:
    """Flips the last byte of the checkpoint's weights."""
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


COMMANDS = ["demo", "list", "verify", "prune", "migrate"]


@pytest.mark.parametrize("arguments", [[], ["--help"], *[[command, "--help"] for command in COMMANDS]])
def test_help_is_answered_without_torch(arguments: list[str]) -> None:
    """Help comes at once, with an example, and imports neither torch nor numpy nor Lightning."""
    code = (
        "import sys\n"
        "from lightning_resume.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "finally:\n"
        "    print('loaded:', sorted({'torch', 'numpy', 'lightning'} & set(sys.modules)))\n"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    assert "examples:\n  lightning-resume " in result.stdout
    assert result.stdout.endswith("loaded: []\n")


def test_the_module_is_the_command() -> None:
    """`python -m lightning_resume` does the same as `lightning-resume`."""
    result = subprocess.run([sys.executable, "-m", "lightning_resume", "--version"], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("lightning-resume")


@pytest.mark.parametrize(
    "arguments",
    [["demo", "--kills", "0"], ["verify"], ["nonsense"], ["prune", "."], ["prune", ".", "--keep-last", "0"]],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line ends with status 2 and a line on how it is used."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: lightning-resume")


@pytest.mark.parametrize("missing", ["rich", "sklearn"])
def test_the_demo_names_the_extra_that_it_needs(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the demo's libraries the user is told the command that installs them."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))

    status = cli.main(["demo"])

    assert status == 2
    assert capsys.readouterr().err == f"The demo needs {missing}: pip install 'lightning-resume[demo]'\n"


def test_list_shows_the_checkpoints_in_the_order_of_their_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each checkpoint, ordered by the number of its step."""
    write_steps(tmp_path, 100, 20)

    status = cli.main(["list", str(tmp_path)])

    heading, *lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert heading.split() == ["status", "kind", "step", "epoch", "batch", "bytes", "path"]
    assert [line.split()[:5] for line in lines] == [
        ["committed", "full", "20", "1", "2"],
        ["committed", "full", "100", "1", "2"],
    ]
    assert [line.split()[-1] for line in lines] == [str(tmp_path / "step-00000020"), str(tmp_path / "step-00000100")]


def test_list_as_json_has_a_row_for_each_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints the same facts for a program."""
    write_steps(tmp_path, 20)

    status = cli.main(["list", str(tmp_path), "--json"])

    (row,) = json.loads(capsys.readouterr().out)
    assert status == 0
    assert row.pop("num_bytes") > 0
    assert row == {
        **{"status": "good", "kind": "full", "timeline": 0, "global_step": 20, "current_epoch": 1},
        **{"batch_in_epoch": 2, "run_id": None, "is_verified": False},
        **{"path": str(tmp_path / "step-00000020"), "reason": ""},
    }


def test_list_of_an_empty_folder_has_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without checkpoints is no error for `list`."""
    assert cli.main(["list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_list_refuses_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt folder is told as such, and not as one without checkpoints."""
    status = cli.main(["list", str(tmp_path / "checkpionts")])

    assert status == 2
    assert capsys.readouterr().err == f"There is no folder {str(tmp_path / 'checkpionts')!r}.\n"


@pytest.mark.parametrize("inside", ["ck", "lightning_logs/version_0/checkpoints"])
def test_list_of_the_folder_above_names_the_one_that_is_meant(
    inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing is ours, one line on stderr says where checkpoints are, if they are; JSON stays clean."""
    write_steps(tmp_path / "my run" / inside, 20)
    (tmp_path / "other" / "sub").mkdir(parents=True)
    folder = tmp_path / "my run" / inside

    statuses = [cli.main(["list", str(path), "--json"]) for path in (tmp_path / "my run", tmp_path / "other", folder)]

    captured = capsys.readouterr()
    assert statuses == [0, 0, 0]
    assert captured.err == (
        f"Nothing of this package is here, but checkpoints are in {str(folder)!r}: lightning-resume list '{folder}'\n"
    )
    assert json.loads(captured.out.partition("\n]")[0] + "]")[0]["status"] == "foreign"


def test_list_quotes_a_name_that_would_disturb_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder's name cannot send the terminal an escape sequence."""
    (tmp_path / "step-\x1b[2J").mkdir()

    cli.main(["list", str(tmp_path)])

    assert "\x1b" not in capsys.readouterr().out


def test_verify_of_good_checkpoints_ends_with_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint and a folder of checkpoints can both be verified."""
    write_steps(tmp_path, 20, 40)

    status = cli.main(["verify", str(tmp_path / "step-00000020"), str(tmp_path), "--json"])

    rows = json.loads(capsys.readouterr().out)
    assert status == 0
    assert [(row["status"], row["global_step"]) for row in rows] == [("good", 20), ("good", 20), ("good", 40)]


def test_verify_finds_a_flipped_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One damaged checkpoint among good ones: status 1, and the file is named."""
    write_steps(tmp_path, 20, 40)
    damage(tmp_path / "step-00000040")

    status = cli.main(["verify", str(tmp_path)])

    output = capsys.readouterr().out
    assert status == 1
    assert {line.split()[0]: line.split()[-1] for line in output.splitlines()[1:3]} == {
        "good": str(tmp_path / "step-00000020"),
        "corrupt": str(tmp_path / "step-00000040"),
    }
    assert "model.safetensors" in output


def test_list_does_not_read_the_files_that_verify_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`list` is quick: a flipped byte is for `verify` to find."""
    write_steps(tmp_path, 20)
    damage(tmp_path / "step-00000020")

    cli.main(["list", str(tmp_path), "--json"])
    (listed,) = json.loads(capsys.readouterr().out)
    cli.main(["verify", str(tmp_path / "step-00000020"), "--json"])
    (verified,) = json.loads(capsys.readouterr().out)

    assert [listed["status"], verified["status"]] == ["good", "corrupt"]
    assert [listed["is_verified"], verified["is_verified"]] == [False, False]


def test_only_what_was_read_to_the_last_byte_is_called_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table says "committed" before that, "good" after; JSON keeps its word, and says whether it was read."""
    write_steps(tmp_path, 20)
    words = []
    for command in ("list", "verify"):
        cli.main([command, str(tmp_path)])
        words.append(capsys.readouterr().out.splitlines()[1].split()[0])
        cli.main([command, str(tmp_path), "--json"])
        (row,) = json.loads(capsys.readouterr().out)
        words.append((row["status"], row["is_verified"]))

    assert words == ["committed", ("good", False), "good", ("good", True)]


def test_list_shows_how_much_lies_in_what_is_not_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A save that was cut short, and a damaged checkpoint, fill the disk like any other."""
    write_steps(tmp_path, 20)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step-00000020").iterdir()}
    (tmp_path / "step-00000020" / "state.json").write_bytes(b"x")
    (tmp_path / ".step-00000040.0123abcd-1.tmp").mkdir()
    (tmp_path / ".step-00000040.0123abcd-1.tmp" / "model.safetensors").write_bytes(b"half")

    cli.main(["list", str(tmp_path), "--json"])

    rows = {row["status"]: row["num_bytes"] for row in json.loads(capsys.readouterr().out)}
    assert rows == {
        "incomplete": 4,
        "corrupt": sum(sizes.values()) - sizes["index.json"] - sizes["state.json"] + 1,
    }


@pytest.mark.parametrize(("kind", "word"), [("none", "missing"), ("empty", "incomplete"), ("file", "missing")])
def test_verify_of_what_is_no_checkpoint_ends_with_status_1(
    kind: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path without a checkpoint does not pass for a good one."""
    path = tmp_path / "it"
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("text")

    status = cli.main(["verify", str(path), "--json"])

    (row,) = json.loads(capsys.readouterr().out)
    assert status == 1
    assert (row["path"], row["status"]) == (str(path), word)
    assert repr(str(path)) in row["reason"]


def test_verify_does_not_mind_what_an_unfinished_save_left(tmp_path: Path) -> None:
    """Resuming never looks at an uncommitted save, so it is no fault of the folder."""
    write_steps(tmp_path, 20)
    (tmp_path / "step-00000040").mkdir()
    (tmp_path / "step-00000040" / "model.safetensors").write_bytes(b"half")

    assert cli.main(["verify", str(tmp_path)]) == 0


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What was printed as JSON."""
    return json.loads(capsys.readouterr().out)


def test_the_commands_work_without_torch(tmp_path: Path) -> None:
    """Looking at checkpoints, pruning and migrating are quick to start."""
    write_steps(tmp_path, 20, 40)
    shutil.copytree(SCHEMA_1, tmp_path / "old")
    folder = str(tmp_path)
    commands = [["list", folder], ["verify", folder], ["migrate", folder], ["prune", folder, "--keep-last", "1"]]
    code = (
        "import sys\n"
        "from lightning_resume.cli import main\n"
        f"statuses = [main(command) for command in {commands!r}]\n"
        "print(statuses, sorted({'torch', 'numpy', 'lightning'} & set(sys.modules)))\n"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert result.stdout.splitlines()[-1:] == ["[0, 0, 0, 0] []"], result.stderr


def test_list_ends_with_status_1_when_one_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script sees it; what an unfinished save has left is no damage."""
    write_steps(tmp_path, 20, 40)
    (tmp_path / "step-00000060").mkdir()
    first = cli.main(["list", str(tmp_path)])
    (tmp_path / "step-00000040" / "state.json").write_text("x")

    second = cli.main(["list", str(tmp_path)])

    assert (first, second) == (0, 1)
    assert "state.json: expected" in capsys.readouterr().out


def test_list_tells_timelines_and_runs_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that went back, and another run in the same folder; the lock is nothing to list."""
    write_steps(tmp_path, 40, run_id="a")
    write_steps(tmp_path, 20, run_id="b", timeline=1)
    (tmp_path / ".lock").write_text("{}")

    cli.main(["list", str(tmp_path)])

    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["status", "kind", "timeline", "step", "epoch", "batch", "bytes", "run", "path"]
    assert [(line.split()[2], line.split()[3], line.split()[7]) for line in lines] == [
        ("0", "40", "a"),
        ("1", "20", "b"),
    ]


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_terminal_gets_the_same_facts_with_and_without_rich(
    has_rich: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rich makes the table more colourful, and says nothing more."""
    write_steps(tmp_path, 20, 40)
    damage(tmp_path / "step-00000040")
    find_spec = importlib.util.find_spec
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "300"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" and not has_rich else find_spec(name)
    )

    status = cli.main(["verify", str(tmp_path)])

    output = capsys.readouterr().out
    words = re.sub("\x1b\\[[0-9;]*m", "", output).split()
    assert status == 1
    assert ("\x1b[" in output) is has_rich
    assert words[:6] == ["status", "kind", "step", "epoch", "batch", "bytes"]
    assert {"good", "corrupt", "20", str(tmp_path / "step-00000040")} <= set(words)
    assert "sha256" in words


@pytest.mark.parametrize("has_rich", [True, False])
def test_verify_shows_on_a_terminal_how_far_it_is(
    has_rich: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, so that what is printed stays clean; JSON too."""
    write_steps(tmp_path, 20, 40)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" and not has_rich else find_spec(name)
    )

    cli.main(["verify", str(tmp_path), "--json"])

    captured = capsys.readouterr()
    assert "verifying step-00000040" in captured.err or (has_rich and "verifying" in captured.err)
    assert [row["status"] for row in json.loads(captured.out)] == ["good", "good"]


def test_verify_of_a_path_that_is_not_there_names_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The remedy can be typed where the mistake was made."""
    write_steps(tmp_path / "my runs", 20)

    status = cli.main(["verify", str(tmp_path / "my runs" / "nothing" / "step-1")])

    last = capsys.readouterr().out.splitlines()[-1]
    assert status == 1
    assert last.strip() == f"See which checkpoints there are: lightning-resume list '{tmp_path / 'my runs'}'"


def test_prune_deletes_all_but_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one run; everything else in the folder stays."""
    write_steps(tmp_path, 5, run_id="other")
    write_steps(tmp_path, 10, 20, 30, 100, run_id="mine")
    write_steps(tmp_path, 25, run_id="mine", kind="weights")
    (tmp_path / "notes.txt").write_text("mine")

    status = cli.main(["prune", str(tmp_path), "--keep-last", "1", "--archive-every", "20", "--json"])

    rows = rows_of(capsys)
    assert status == 0
    assert [(row["global_step"], row["action"]) for row in rows] == [
        (10, "deleted"),
        (20, "kept"),
        (30, "deleted"),
        (100, "kept"),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        *[f"step-{step:08d}" for step in (5, 20, 25, 100)],
        "notes.txt",
    }


def test_prune_of_a_named_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--run-id`; a run that has none there is told."""
    write_steps(tmp_path, 5, 6, run_id="other")
    write_steps(tmp_path, 10, 20, run_id="mine")

    status = cli.main(["prune", str(tmp_path), "--keep-last", "1", "--run-id", "other", "--json"])
    wrong = cli.main(["prune", str(tmp_path), "--keep-last", "1", "--run-id", "nobody"])

    assert (status, wrong) == (0, 1)
    assert "'nobody' has no good checkpoint" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (6, 10, 20)]


def test_a_dry_run_deletes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It tells what would be deleted, also while a training writes there."""
    write_steps(tmp_path, 10, 20)

    with FolderLock(tmp_path):
        status = cli.main(["prune", str(tmp_path), "--keep-last", "1", "--dry-run"])

    heading, *lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert heading.split()[:2] == ["action", "status"]
    assert [line.split()[:2] for line in lines] == [["to", "delete"], ["kept", "good"]]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_last_good_one_is_never_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest ones are damaged in a way that only a full verification sees."""
    write_steps(tmp_path, 10, 20, 30, 40)
    damage(tmp_path / "step-00000030")
    damage(tmp_path / "step-00000040")

    status = cli.main(["prune", str(tmp_path), "--keep-last", "1", "--json"])

    rows = rows_of(capsys)
    assert status == 0
    assert [(row["global_step"], row["action"], row["status"], row["is_verified"]) for row in rows] == [
        (10, "deleted", "good", False),
        (20, "kept", "good", True),
        (30, "deleted", "corrupt", False),
        (40, "kept", "corrupt", False),
    ]


def test_with_no_good_one_nothing_is_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is damaged may still be of use to somebody."""
    write_steps(tmp_path, 10, 20, run_id="r")
    damage(tmp_path / "step-00000010")
    damage(tmp_path / "step-00000020")

    status = cli.main(["prune", str(tmp_path), "--keep-last", "1"])

    assert status == 1
    assert "'r' has no good checkpoint" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 2


def test_with_only_bad_ones_nothing_is_pruned_and_it_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a look at the indexes shows that they are bad: status 1, each with what is wrong with it."""
    write_steps(tmp_path, 10)
    (tmp_path / "step-00000010" / "index.json").write_text("{")
    (tmp_path / "step-00000020").mkdir()
    (tmp_path / ".step-00000030.0123abcd-1.tmp").mkdir()

    status = cli.main(["prune", str(tmp_path), "--keep-last", "1"])

    captured = capsys.readouterr()
    first, *lines = captured.err.splitlines()
    assert (status, captured.out) == (1, "")
    assert first == f"Nothing was pruned in {str(tmp_path)!r}: it has no good checkpoint of a step, and 2 bad."
    assert [line.split(",")[0] for line in lines] == [
        "  step-00000010: corrupt",
        "  step-00000020: incomplete",
        f"Look at them with: lightning-resume verify {tmp_path}",
    ]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_a_training_writes_to_is_not_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lock's owner is named; a dead one's lock does not count."""
    write_steps(tmp_path, 10, 20)
    with FolderLock(tmp_path):
        refused = cli.main(["prune", str(tmp_path), "--keep-last", "1"])
    (tmp_path / ".lock").write_text('{"pid": 1}')

    status = cli.main(["prune", str(tmp_path), "--keep-last", "1"])

    assert (refused, status) == (1, 0)
    assert "another process saves its checkpoints there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


def test_one_that_cannot_be_deleted_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 1, and the reason."""
    write_steps(tmp_path, 10, 20)

    def unlink(*arguments: Any, **keywords: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", unlink)

    status = cli.main(["prune", str(tmp_path), "--keep-last", "1", "--json"])

    rows = rows_of(capsys)
    assert status == 1
    assert [row["action"] for row in rows] == ["failed", "kept"]
    assert "Permission denied" in rows[0]["reason"]


@pytest.mark.parametrize("command", [["list"], ["prune", "--keep-last", "1"]])
def test_an_empty_folder_is_no_error_and_a_missing_one_is(command: list[str], tmp_path: Path) -> None:
    """Status 0, and 2."""
    statuses = [cli.main([command[0], str(folder), *command[1:]]) for folder in (tmp_path, tmp_path / "none")]

    assert statuses == [0, 2]


def test_migrate_rewrites_old_ones_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the newest schema are left alone; a folder and a checkpoint can both be given."""
    shutil.copytree(SCHEMA_1, tmp_path / "step-00000003")
    write_steps(tmp_path, 20)
    (tmp_path / "notes.txt").write_text("mine")

    first = cli.main(["migrate", str(tmp_path), "--json"])
    rows = rows_of(capsys)
    second = cli.main(["migrate", str(tmp_path / "step-00000003"), "--json"])

    assert (first, second) == (0, 0)
    assert [(row["global_step"], row["action"], row["status"]) for row in rows] == [
        (3, "migrated", "good"),
        (20, "kept", "good"),
    ]
    assert [row["action"] for row in rows_of(capsys)] == ["kept"]
    assert saved_schema(tmp_path / "step-00000003") == SCHEMA
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000003", "step-00000020"]


def test_migrate_leaves_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, the reason, and not a byte changed; the others are migrated."""
    for name in ("bad", "good"):
        shutil.copytree(SCHEMA_1, tmp_path / name)
    (tmp_path / "bad" / "state.json").write_bytes(b"x" * (tmp_path / "bad" / "state.json").stat().st_size)

    status = cli.main(["migrate", str(tmp_path), "--json"])
    none = cli.main(["migrate", str(tmp_path / "none")])

    rows = json.loads(capsys.readouterr().out.partition("\n]")[0] + "]")
    assert (status, none) == (1, 1)
    assert {Path(row["path"]).name: (row["action"], row["status"]) for row in rows} == {
        "bad": ("failed", "corrupt"),
        "good": ("migrated", "good"),
    }
    assert saved_schema(tmp_path / "bad") == "lightning-resume/1"


def test_migrate_on_a_full_disk_leaves_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is good as before, and the reason is told."""
    shutil.copytree(SCHEMA_1, tmp_path / "c")

    def mkdir(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "mkdir", mkdir)

    status = cli.main(["migrate", str(tmp_path / "c"), "--json"])

    (row,) = rows_of(capsys)
    assert status == 1
    assert (row["status"], row["action"]) == ("good", "failed")
    assert "No space left on device" in row["reason"]


def test_migrate_refuses_a_folder_that_a_training_writes_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for one checkpoint in it."""
    shutil.copytree(SCHEMA_1, tmp_path / "c")

    with FolderLock(tmp_path):
        statuses = [cli.main(["migrate", str(path)]) for path in (tmp_path, tmp_path / "c")]

    assert statuses == [1, 1]
    assert "another process saves its checkpoints there" in capsys.readouterr().err
    assert saved_schema(tmp_path / "c") == "lightning-resume/1"
