"""What README and the examples show is run as it stands there."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_resume import AtomicResumeCallback

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(language: str) -> list[str]:
    """Returns README's fenced blocks in a language, in order."""
    text = (ROOT / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_every_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who has a `model` and a `data` and copies README's Python blocks from top to bottom gets no error."""
    monkeypatch.chdir(tmp_path)
    sources = blocks("python")
    namespace: dict[str, Any] = {"__name__": "readme", "model": BoringModel(), "data": BoringDataModule()}

    for number, source in enumerate(sources, start=1):
        exec(compile(source, f"README.md, python block {number}", "exec"), namespace)

    assert sources


def test_no_block_is_left_out() -> None:
    """Python is fenced as `python`, and nothing marks a block as not to be run."""
    text = (ROOT / "README.md").read_text()

    fences = set(re.findall(r"^```(\w*)[^\n]*\n(?=(?:from|import) \w)", text, flags=re.MULTILINE))

    assert fences <= {"python"}
    assert "no-test" not in text


def test_the_first_shell_block_is_the_two_lines() -> None:
    """Line 1 makes a venv, installs and runs the demo; line 2 installs the test extra and runs the tests."""
    first, second = blocks("sh")[0].splitlines()

    assert "-m venv" in first
    assert "lightning-resume demo" in first
    assert "test" in second
    assert "pytest" in second.split("&& ")[-1]
    assert all("-c .ci/constraints.txt" in line for line in (first, second))


@pytest.mark.parametrize("link", ["image", "file"])
def test_links_into_the_repository_lead_somewhere(link: str) -> None:
    """No picture and no file that README points at is missing."""
    text = (ROOT / "README.md").read_text()
    pattern = r"!\[[^\]]*\]\(([^)#\s]+)\)" if link == "image" else r"(?<!!)\[[^\]]*\]\(([^)#\s]+)\)"

    targets = [target for target in re.findall(pattern, text) if "://" not in target]

    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_runs(example: Path, tmp_path: Path) -> None:
    """An example runs from start to end, in an empty folder, and says so with exit status 0."""
    result = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=240)

    assert result.returncode == 0, result.stderr[-3000:]


def test_there_are_examples() -> None:
    """The test above does not pass because it finds nothing."""
    assert EXAMPLES


def test_every_argument_stands_in_the_table_with_its_default() -> None:
    """As the callback's signature has them, in its order."""
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)

    parameters = list(inspect.signature(AtomicResumeCallback).parameters.values())

    assert rows == [(parameter.name, repr(parameter.default)) for parameter in parameters]
