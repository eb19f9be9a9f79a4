"""The names that `lightning_resume` exports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lightning_resume

PROMISED = {
    "AtomicCheckpointIO",
    "AtomicResumeCallback",
    "CheckpointIndex",
    "CheckpointInfo",
    "FastForwardSampler",
    "RNGState",
    "ResumableLoader",
    "ResumeError",
    "migrate_checkpoint",
    "read_checkpoint",
    "register_type",
    "scan_checkpoints",
    "verify_checkpoint",
    "write_checkpoint",
}


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter and returns what it printed."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_the_names_are_sorted_and_stand_once() -> None:
    """`__all__` can be read and compared."""
    names = list(lightning_resume.__all__)

    assert names == sorted(set(names))


def test_the_documented_names_are_exported() -> None:
    """What the documentation names is there."""
    names = set(lightning_resume.__all__)

    assert names >= PROMISED


@pytest.mark.parametrize("name", lightning_resume.__all__)
def test_every_exported_name_can_be_imported(name: str) -> None:
    """`from lightning_resume import NAME` works, and `dir` shows the name."""
    value = getattr(lightning_resume, name)

    assert value is not None
    assert name in dir(lightning_resume)


def test_every_error_is_exported() -> None:
    """Whoever wants to catch an error can name it."""
    from lightning_resume import errors

    classes = {name for name, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.ResumeError)}

    assert classes <= set(lightning_resume.__all__)


def test_importing_the_package_imports_neither_torch_nor_lightning() -> None:
    """The import is free until a name is used."""
    code = "import sys, lightning_resume; print(sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)))"

    assert run_python(code) == "[]"


def test_the_errors_and_the_catalog_are_imported_without_torch() -> None:
    """A tool that lists checkpoints or catches errors does not wait for torch."""
    code = (
        "import sys; from lightning_resume import CorruptCheckpointError, scan_checkpoints;"
        " print('torch' in sys.modules)"
    )

    assert run_python(code) == "False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name is told as such, as in any module."""
    with pytest.raises(AttributeError, match="AtomicResumeCallbak"):
        _ = lightning_resume.AtomicResumeCallbak
