"""The command `lightning-resume`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_resume import cli
from lightning_resume.format.checkpoint import write_checkpoint


def write_steps(root: Path, *steps: int) -> None:
    """Writes a small checkpoint for each step."""
    root.mkdir(exist_ok=True)
    for step in steps:
        counters = {"global_step": step, "current_epoch": 1, "batch_in_epoch": 2}
        write_checkpoint(root / f"step-{step:08d}", {"state_dict": {"weight": torch.ones(3)}}, counters=counters)


def damage(checkpoint: Path) -> None:
    """Flips the last byte of the checkpoint's weights."""
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["list", "--help"], ["verify", "--help"]])
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


@pytest.mark.parametrize("arguments", [[], ["demo", "--kills", "0"], ["verify"], ["nonsense"]])
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
    assert [line.split()[:5] for line in lines] == [["good", "full", "20", "1", "2"], ["good", "full", "100", "1", "2"]]
    assert [line.split()[-1] for line in lines] == [str(tmp_path / "step-00000020"), str(tmp_path / "step-00000100")]


def test_list_as_json_has_a_row_for_each_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints the same facts for a program."""
    write_steps(tmp_path, 20)

    status = cli.main(["list", str(tmp_path), "--json"])

    (row,) = json.loads(capsys.readouterr().out)
    assert status == 0
    assert row.pop("num_bytes") > 0
    assert row == {
        **{"status": "good", "kind": "full", "global_step": 20, "current_epoch": 1, "batch_in_epoch": 2},
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
