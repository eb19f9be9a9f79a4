"""Every error that this package raises on purpose.

::

    ResumeError
    ├ CheckpointError(path)
    │ ├ CheckpointNotFoundError(path)                          also FileNotFoundError
    │ ├ CheckpointExistsError(path)                            also FileExistsError
    │ ├ CheckpointReadError(path, file)                        also OSError
    │ ├ CheckpointWriteError(path)                             also OSError
    │ ├ IncompleteCheckpointError(path)                        never committed
    │ ├ CorruptCheckpointError(path, file, expected, found)
    │ ├ UnsafePathError(path, file)
    │ ├ SchemaError(path, found, supported)
    │ └ NoGoodCheckpointError(path, entries)                   checkpoints, but no good one
    ├ StateMismatchError(field, saved, current)                a sound checkpoint of another run
    │ ├ MissingStateError(field)
    │ ├ DataChangedError(field, saved, current)
    │ ├ WorldSizeError(saved, current)
    │ ├ ModelMismatchError(missing, unexpected, mismatched)
    │ └ WeightsOnlyError(path)
    ├ UnsupportedStateError(key_path, reason)                  also TypeError
    ├ UnsupportedSetupError(setup)
    ├ FolderLockedError(folder, host, pid, since)              another writer
    └ BackgroundSaveError(path)                                the failed save as __cause__

A message has up to three parts: what cannot be done; the two sides on aligned lines; one thing that the user can do.
The facts are attributes. All of them can be pickled, because they cross process boundaries. No torch is imported here.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any


class ResumeError(Exception):
    """Anything that stops a save or a resume; `str()` is a message for the user."""

    def __init__(self, message: str) -> None:
        """Keeps the message."""
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        """The message, also where a base class (OSError) would format its own."""
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the facts; the constructor, whose arguments differ from class to class, is not run again."""
        return _rebuild, (type(self), self.message, dict(self.__dict__), getattr(self, "errno", None))


def _rebuild(cls: type[ResumeError], message: str, facts: dict[str, Any], number: int | None) -> ResumeError:
    error = cls.__new__(cls)
    error.args = (message,)
    error.__dict__.update(facts)
    if isinstance(error, OSError):
        error.errno = number
    return error


MAX_PART_CHARS = 2000  # of a message: a file of a stranger may hold texts of any length


def _text(headline: str, sides: Mapping[str, object] | None = None, remedy: str | None = None) -> str:
    lines = [_short(headline)]
    sides = sides or {}
    width = max(map(len, sides), default=0) + 1
    for label, value in sides.items():
        lines.append(f"  {label + ':':<{width}} {_short(value if isinstance(value, str) else repr(value))}")
    if remedy:
        lines.append(_short(remedy))
    return "\n".join(lines)


def _short(text: str, limit: int = MAX_PART_CHARS) -> str:
    """The text, cut where it is too long for a message, without what cannot be printed (lone surrogates)."""
    text = text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _listed(names: Collection[object], limit: int = 10) -> str:
    shown = ", ".join(str(name) for name in list(names)[:limit])
    return shown + (f", … ({len(names)} in all)" if len(names) > limit else "") if names else "none"


class CheckpointError(ResumeError):
    """A checkpoint on disk cannot be read or written.

    Attributes:
        path: the checkpoint directory (or the folder of checkpoints), as a str.
    """

    def __init__(self, path: str | os.PathLike[str], message: str) -> None:
        """Keeps the path."""
        super().__init__(message)
        self.path = os.fspath(path)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint directory at the path.

    Attributes:
        found: what is there instead.
    """

    def __init__(self, path: str | os.PathLike[str], found: str = "nothing") -> None:
        """Formats the message."""
        remedy = "Look at the folder with scan_checkpoints(), or start without a checkpoint."
        sides = {"expected": "a checkpoint directory", "found": found}
        super().__init__(path, _text(f"cannot read the checkpoint {os.fspath(path)!r}: it is not there", sides, remedy))
        self.errno, self.filename = errno.ENOENT, self.path
        self.found = found


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Something is already at the path, and it may not be replaced.

    Attributes:
        found: what is there.
    """

    def __init__(self, path: str | os.PathLike[str], found: str = "a checkpoint") -> None:
        """Formats the message."""
        replaceable = found == "a checkpoint"
        remedy = "Pass overwrite=True to replace it." if replaceable else "Choose another path."
        headline = f"cannot write the checkpoint {os.fspath(path)!r}: {found} is there"
        super().__init__(path, _text(headline, None, remedy))
        self.errno, self.filename = errno.EEXIST, self.path
        self.found = found


class CheckpointReadError(CheckpointError, OSError):
    """The operating system failed to read a file of the checkpoint; that says nothing about its contents.

    `errno` is that of the operating system's error, which is the `__cause__`.

    Attributes:
        file: name of the file inside the checkpoint, or None for the directory.
    """

    def __init__(self, path: str | os.PathLike[str], file: str | None, error: OSError) -> None:
        """Formats the message."""
        what = f"{file} in the checkpoint" if file else "the checkpoint"
        reason = error.strerror or str(error)
        super().__init__(path, _text(f"cannot read {what} {os.fspath(path)!r}: {reason}", None, _REMEDY_READ))
        self.errno, self.filename = error.errno, self.path
        self.file = file


_REMEDY_READ = "Check the permissions and the disk; the checkpoint itself was not changed."


class CheckpointWriteError(CheckpointError, OSError):
    """The operating system failed while a checkpoint was written; whatever was there before is still whole.

    `errno` is that of the operating system's error, which is the `__cause__`.
    """

    def __init__(self, path: str | os.PathLike[str], error: OSError) -> None:
        """Formats the message."""
        reason = error.strerror or str(error)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space" if full else "Check the disk and the permissions of the folder"
        remedy += "; earlier checkpoints are untouched."
        super().__init__(path, _text(f"cannot write the checkpoint {os.fspath(path)!r}: {reason}", None, remedy))
        self.errno, self.filename = error.errno, self.path


class IncompleteCheckpointError(CheckpointError):
    """The directory was never committed: it has no index; or it is not one checkpoint, but a folder of them.

    Attributes:
        inside: names of the committed checkpoints in the directory, the newest last.
    """

    def __init__(self, path: str | os.PathLike[str], inside: Sequence[str] = ()) -> None:
        """Formats the message."""
        path = os.fspath(path)
        if inside:
            headline = f"cannot read the checkpoint {path!r}: it is a folder of checkpoints, not one of them"
            found = f"{len(inside)} checkpoint{'s' if len(inside) > 1 else ''} in it"
            newest = os.path.join(path, inside[-1])
            remedy = f"Pass the newest, {newest!r}, or another one of them; "
            remedy += 'fit(ckpt_path="last") takes the newest good one in the callback\'s dirpath.'
        else:
            headline = f"cannot read the checkpoint {path!r}: it was never finished"
            found, remedy = "a directory without it", "Resume from another checkpoint."
        super().__init__(path, _text(headline, {"expected": "index.json", "found": found}, remedy))
        self.inside = tuple(inside)


class CorruptCheckpointError(CheckpointError):
    """What is on disk is not what was written.

    Attributes:
        file: name of the file inside the checkpoint.
        expected: what should be there, cut where it is too long for a message.
        found: what is there, likewise.
    """

    def __init__(self, path: str | os.PathLike[str], file: str, expected: str, found: str) -> None:
        """Formats the message."""
        expected, found = _short(expected), _short(found)
        headline = f"cannot read the checkpoint {os.fspath(path)!r}: {file} is not what was saved"
        remedy = "Resume from an earlier checkpoint, or copy this one again from a good source."
        super().__init__(path, _text(headline, {"expected": expected, "found": found}, remedy))
        self.file = file
        self.expected = expected
        self.found = found


class UnsafePathError(CheckpointError):
    """The checkpoint names, or is, a file that could lead out of its directory.

    Attributes:
        file: the offending name.
        reason: what is wrong with it.
    """

    def __init__(self, path: str | os.PathLike[str], file: str, reason: str = "a plain file name was expected") -> None:
        """Formats the message."""
        headline = f"cannot read the checkpoint {os.fspath(path)!r}: unsafe file {_short(repr(file), 1000)}, {reason}"
        super().__init__(path, _text(headline, None, "It was not opened. Do not use a checkpoint of unknown origin."))
        self.file = file
        self.reason = reason


class SchemaError(CheckpointError):
    """The checkpoint was written in a schema that this version does not know.

    Attributes:
        found: its schema string.
        supported: the schema strings that can be read.
    """

    def __init__(self, path: str | os.PathLike[str], found: str, supported: Sequence[str]) -> None:
        """Formats the message."""
        headline = f"cannot read the checkpoint {os.fspath(path)!r}: its schema is unknown"
        sides = {"found": found, "supported": ", ".join(supported)}
        remedy = "Install the version of lightning-resume that wrote it, or a newer one."
        super().__init__(path, _text(headline, sides, remedy))
        self.found = found
        self.supported = tuple(supported)


class NoGoodCheckpointError(CheckpointError):
    """A folder holds checkpoints, but not one that can be resumed from.

    Attributes:
        entries: what was found, one text (or object with a useful `str`) each.
    """

    def __init__(self, path: str | os.PathLike[str], entries: Sequence[object]) -> None:
        """Formats the message."""
        headline = f"cannot resume from {os.fspath(path)!r}: none of its {len(entries)} checkpoints is good"
        lines = [f"  {entry}" for entry in entries[:10]]
        remedy = "Mend or move them away; training does not start from scratch over them."
        super().__init__(path, "\n".join([headline, *lines, remedy]))
        self.entries = tuple(entries)


class StateMismatchError(ResumeError):
    """The checkpoint is sound, but it belongs to another run than the one that wants to resume.

    Attributes:
        field: what differs.
        saved: its value in the checkpoint.
        current: its value in this run.
        remedy: what the user can do, or None.
    """

    def __init__(
        self, field: str, saved: Any, current: Any, remedy: str | None = None, *, cannot: str = "resume exactly"
    ) -> None:
        """Formats the message; `cannot` is what was wanted."""
        self._keep(field, saved, current, remedy, f"cannot {cannot}: {field} {_differs(field)}")

    def _keep(self, field: str, saved: Any, current: Any, remedy: str | None, headline: str) -> None:
        ResumeError.__init__(self, _text(headline, {"saved": saved, "current": current}, remedy))
        self.field = field
        self.saved = saved
        self.current = current
        self.remedy = remedy


def _differs(field: str) -> str:
    """The verb that goes with a field: names of arguments (`num_workers`) are one thing, whatever they end with."""
    noun = re.split(" of | that | after |, ", field)[0]
    return "differ" if noun.endswith("s") and not noun.endswith("ss") and "_" not in noun else "differs"


class MissingStateError(StateMismatchError):
    """The checkpoint lacks a part that an exact resume needs."""

    def __init__(self, field: str, remedy: str | None = None, *, cannot: str = "resume exactly") -> None:
        """Formats the message; `cannot` is what was wanted."""
        self._keep(field, "absent", "needed", remedy, f"cannot {cannot}: the checkpoint has no {field}")


class DataChangedError(StateMismatchError):
    """The data set, or the way it is read, is not that of the save."""

    def __init__(self, field: str, saved: Any, current: Any, remedy: str | None = None) -> None:
        """Formats the message."""
        remedy = remedy or 'Use the data of the save, or pass allow=("data_changed",) to go on with other data.'
        self._keep(field, saved, current, remedy, f"cannot resume exactly: the data changed ({field})")


class WorldSizeError(StateMismatchError):
    """The checkpoint was saved by another number of processes."""

    def __init__(self, saved: int, current: int, remedy: str | None = None) -> None:
        """Formats the message."""
        remedy = remedy or f"Start {saved} process{'es' if saved != 1 else ''}."
        headline = "cannot resume exactly: the number of processes differs"
        self._keep("world_size", saved, current, remedy, headline)


class ModelMismatchError(StateMismatchError):
    """The model's state dict is not that of the save.

    Attributes:
        missing: names that the checkpoint lacks.
        unexpected: names that only the checkpoint has.
        mismatched: name → (saved, current) description of those that differ, say in shape.
    """

    def __init__(
        self,
        missing: Collection[str] = (),
        unexpected: Collection[str] = (),
        mismatched: Mapping[str, tuple[object, object]] | None = None,
        remedy: str | None = None,
    ) -> None:
        """Formats the message."""
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = dict(mismatched or {})
        saved = [f"only here: {_listed(self.unexpected)}"] if self.unexpected else []
        current = [f"only here: {_listed(self.missing)}"] if self.missing else []
        if self.mismatched:
            saved.append(_listed([f"{name} {pair[0]}" for name, pair in self.mismatched.items()]))
            current.append(_listed([f"{name} {pair[1]}" for name, pair in self.mismatched.items()]))
        remedy = remedy or "Build the model as it was at the save."
        headline = "cannot resume exactly: the model is not the one that was saved"
        self._keep("state_dict", "; ".join(saved) or "-", "; ".join(current) or "-", remedy, headline)


class WeightsOnlyError(StateMismatchError):
    """A model-only save was given where a full one is needed.

    Attributes:
        path: the checkpoint's path, as a str.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Formats the message."""
        self.path = os.fspath(path)
        headline = f"cannot resume from {self.path!r}: it is a model-only save"
        remedy = "Resume from a full one, or only load the weights with read_checkpoint(path, keys={'state_dict'})."
        self._keep("kind", "weights", "full", remedy, headline)


class UnsupportedStateError(ResumeError, TypeError):
    """A value has no exact encoding, so the save (or load) stops before it changes anything.

    Attributes:
        key_path: where the value is, for example ``optimizer_states.0.state.3.exp_avg``.
        reason: why it cannot be encoded.
    """

    def __init__(self, key_path: str, reason: str, remedy: str | None = None) -> None:
        """Formats the message."""
        remedy = remedy or "Turn it into plain values and tensors, or teach its class with register_type()."
        super().__init__(
            _text(f"cannot save or load {_short(key_path or 'the state', 300)!r} exactly: {reason}", None, remedy)
        )
        self.key_path = key_path
        self.reason = reason


class UnsupportedSetupError(ResumeError):
    """A strategy, loader, option or machine with which no exact resume is possible.

    Attributes:
        setup: what it is.
        reason: why it cannot be exact.
        remedy: what the user can do, or None.
    """

    def __init__(self, setup: str, reason: str | None = None, remedy: str | None = None) -> None:
        """Formats the message."""
        headline = f"cannot resume exactly with {setup}" + (f": {reason}" if reason else "")
        super().__init__(_text(headline, None, remedy))
        self.setup = setup
        self.reason = reason
        self.remedy = remedy


class FolderLockedError(ResumeError):
    """Another process writes checkpoints to the folder.

    Attributes:
        folder: the folder, as a str.
        host: the machine of that process, or None if it did not say who it is; so are the others.
        pid: its number.
        since: moment at which it took the folder, ISO 8601 in UTC.
        run_id: of its run.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        host: str | None = None,
        pid: int | None = None,
        since: str | None = None,
        run_id: str | None = None,
    ) -> None:
        """Formats the message."""
        self.folder, self.host, self.pid, self.since, self.run_id = os.fspath(folder), host, pid, since, run_id
        headline = f"cannot write to {self.folder!r}: another process saves its checkpoints there"
        sides = {"held by": f"process {pid} on {host}, since {since}" if pid is not None else "a process unknown"}
        remedy = "End that process, or pass another dirpath; once it has ended, the folder is free by itself."
        super().__init__(_text(headline, sides, remedy))


class BackgroundSaveError(CheckpointError):
    """A save in the background failed; what went wrong is the `__cause__`.

    Attributes:
        reason: first line of what went wrong, or None.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str | None = None) -> None:
        """Formats the message."""
        headline = f"the checkpoint {os.fspath(path)!r} was not written" + (f": {reason}" if reason else "")
        super().__init__(path, _text(headline, None, "Earlier checkpoints are untouched."))
        self.reason = reason
