"""Errors carry facts, say what to do, and cross process boundaries."""

from __future__ import annotations

import errno
import pickle
import re
from typing import Any

import pytest

from lightning_resume import errors

EIO = OSError(errno.EIO, "Input/output error")
FULL = OSError(errno.ENOSPC, "No space left on device")

EXAMPLES = [
    errors.ResumeError("cannot"),
    errors.CheckpointError("runs/c", "cannot read 'runs/c'"),
    errors.CheckpointNotFoundError("runs/c"),
    errors.CheckpointExistsError("runs/c"),
    errors.CheckpointReadError("runs/c", "state.json", EIO),
    errors.CheckpointReadError("runs/c", None, EIO),
    errors.CheckpointWriteError("runs/c", FULL),
    errors.IncompleteCheckpointError("runs/c"),
    errors.IncompleteCheckpointError("runs/c", ["step-00000001", "step-00000002"]),
    errors.CorruptCheckpointError("runs/c", "state.json", "3 bytes", "2 bytes"),
    errors.UnsafePathError("runs/c", "../x"),
    errors.SchemaError("runs/c", "lightning-resume/9", ["lightning-resume/1"]),
    errors.NoGoodCheckpointError("runs/c", ["a: corrupt", "b: corrupt"]),
    errors.StateMismatchError("seed", 1, 2, "Use seed 1."),
    errors.MissingStateError("random stream 'numpy'"),
    errors.DataChangedError("length", 32, 36),
    errors.WorldSizeError(2, 1),
    errors.ModelMismatchError(["a"], ["b"], {"c": ((1,), (2,))}),
    errors.WeightsOnlyError("runs/c"),
    errors.UnsupportedStateError("callbacks.x", "there is no exact encoding for the type a.B"),
    errors.UnsupportedSetupError("strategy FSDP", "its state is sharded", "Use strategy='ddp'."),
    errors.FolderLockedError("runs", "host", 12, "2024-01-02T03:04:05+00:00", "r"),
    errors.FolderLockedError("runs"),
    errors.BackgroundSaveError("runs/c", "disk full"),
]


def all_classes() -> set[type]:
    """Every error class of the module."""
    found = (value for value in vars(errors).values() if isinstance(value, type))
    return {value for value in found if issubclass(value, errors.ResumeError)}


def test_the_examples_leave_no_class_out() -> None:
    """The tests below hold for every error."""
    assert {type(example) for example in EXAMPLES} == all_classes()


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_all_its_facts(error: Any) -> None:
    """Ranks and worker processes send errors to each other."""
    error.note = "kept"

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert getattr(again, "errno", None) == getattr(error, "errno", None)
    assert again.args == error.args


@pytest.mark.parametrize(
    "error", [e for e in EXAMPLES if isinstance(e, errors.CheckpointError)], ids=lambda error: type(error).__name__
)
def test_an_error_about_a_checkpoint_names_its_path_in_repr(error: errors.CheckpointError) -> None:
    """A space or a line break in a path is seen."""
    assert error.path == "runs/c"
    assert "'runs/c'" in str(error)


@pytest.mark.parametrize("error", EXAMPLES[2:], ids=lambda error: type(error).__name__)
def test_a_message_is_a_headline_and_something_to_do(error: errors.ResumeError) -> None:
    """What cannot be done first; a full sentence last (where there is a remedy to give)."""
    lines = str(error).split("\n")

    assert re.match("cannot |the checkpoint ", lines[0])
    if type(error) is not errors.MissingStateError:
        assert len(lines) >= 2
        assert re.fullmatch(r"[A-Z].*\.", lines[-1])


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (errors.CheckpointNotFoundError("c"), FileNotFoundError),
        (errors.CheckpointExistsError("c"), FileExistsError),
        (errors.CheckpointReadError("c", None, EIO), OSError),
        (errors.CheckpointWriteError("c", FULL), OSError),
        (errors.UnsupportedStateError("a", "b"), TypeError),
        (errors.MissingStateError("a"), errors.StateMismatchError),
        (errors.DataChangedError("a", 1, 2), errors.StateMismatchError),
        (errors.WorldSizeError(1, 2), errors.StateMismatchError),
        (errors.ModelMismatchError(), errors.StateMismatchError),
        (errors.WeightsOnlyError("c"), errors.StateMismatchError),
        (errors.BackgroundSaveError("c"), errors.CheckpointError),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, Exception) else item.__name__,
)
def test_an_error_is_also_what_python_programs_expect(error: Exception, base: type) -> None:
    """`except FileNotFoundError` and `except TypeError` go on working."""
    assert isinstance(error, base)
    assert isinstance(error, errors.ResumeError)


def test_the_errno_of_the_operating_system_is_kept() -> None:
    """A full disk can be told from a broken one."""
    assert errors.CheckpointWriteError("c", FULL).errno == errno.ENOSPC
    assert errors.CheckpointReadError("c", None, EIO).errno == errno.EIO
    assert errors.CheckpointNotFoundError("c").errno == errno.ENOENT
    assert errors.CheckpointExistsError("c").errno == errno.EEXIST
    assert "Free some space" in str(errors.CheckpointWriteError("c", FULL))


def test_the_two_sides_stand_on_aligned_lines() -> None:
    """The eye compares them."""
    lines = str(errors.StateMismatchError("batch_size", 4, 8, "Use 4.")).split("\n")

    assert lines == ["cannot resume exactly: batch_size differs", "  saved:   4", "  current: 8", "Use 4."]


def test_a_corrupt_file_is_told_with_both_sides() -> None:
    """Path, file, what should be there, what is there."""
    error = errors.CorruptCheckpointError("runs/c", "state.json", "sha256 aa", "sha256 bb")

    assert (error.file, error.expected, error.found) == ("state.json", "sha256 aa", "sha256 bb")
    assert str(error).split("\n")[1:3] == ["  expected: sha256 aa", "  found:    sha256 bb"]


def test_a_model_mismatch_lists_names_and_shapes() -> None:
    """Missing, unexpected and mismatched, each on its side; a long list is cut."""
    error = errors.ModelMismatchError(["new"], ["old"], {"w": ((2,), (3,))})
    long = errors.ModelMismatchError([f"layer{n}" for n in range(100)])

    assert (error.missing, error.unexpected, error.mismatched) == (("new",), ("old",), {"w": ((2,), (3,))})
    assert "  saved:   only here: old; w (2,)\n  current: only here: new; w (3,)" in str(error)
    assert "(100 in all)" in str(long)
    assert len(str(long)) < 500


def test_changed_data_names_the_argument_that_lets_it_pass() -> None:
    """The remedy is the real argument."""
    assert 'allow=("data_changed",)' in str(errors.DataChangedError("length", 32, 36))
    assert "Start 2 processes." in str(errors.WorldSizeError(2, 1))


def test_no_good_checkpoint_lists_what_was_found() -> None:
    """The user sees at once what is wrong with each."""
    error = errors.NoGoodCheckpointError("runs", [f"step-{n}: corrupt" for n in range(30)])

    assert error.entries[29] == "step-29: corrupt"
    assert "none of its 30 checkpoints is good" in str(error)
    assert str(error).count("corrupt") == 10
