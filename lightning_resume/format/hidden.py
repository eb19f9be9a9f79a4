"""Names of the hidden siblings of a checkpoint, and whether the process that made one is still alive.

``.NAME.<hex>-<pid>.tmp`` is a save in flight, ``.old`` a version that is being replaced, ``.trash`` one being deleted.
The hex digits are three groups of eight: the machine (host name and process namespace), the moment at which the writing
process started, and a random number. A pid alone would not do: containers share host names and begin at the same pid.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["tmp", "old", "trash"]

_PATTERN = re.compile(
    r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{8,})-(?P<pid>[0-9]{1,10})\.(?P<kind>tmp|old|trash)", re.DOTALL
)
_TOKEN_CHARS = 24


class HiddenName(NamedTuple):
    """What a hidden name says.

    Attributes:
        name: of the checkpoint that it stands beside.
        token: hex digits: machine, start of the process, random.
        pid: of the process that made it.
        kind: "tmp", "old" or "trash".
    """

    name: str
    token: str
    pid: int
    kind: str


def hidden_path(target: Path, kind: Kind) -> Path:
    """A new, unique hidden path beside `target`, made by this process. Draws from no random stream of the program."""
    token = process_token() + os.urandom(4).hex()
    return target.with_name(f".{_escaped(target.name)}.{token}-{os.getpid()}.{kind}")


def parse_hidden(name: str) -> HiddenName | None:
    """Reads a hidden name; None for any other name."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return None
    return HiddenName(_unescaped(match["name"]), match["token"], int(match["pid"]), match["kind"])


def _escaped(name: str) -> str:
    """A name without `ckpt_`: Lightning takes all digits in such a name for the number of a checkpoint under SLURM."""
    return name.replace("%", "%25").replace("ckpt_", "ckpt%5F")


def _unescaped(name: str) -> str:
    return name.replace("ckpt%5F", "ckpt_").replace("%25", "%")


def hidden_siblings(target: Path, kind: Kind) -> list[Path]:
    """The hidden paths of one kind that stand beside `target`, sorted by name; none if the parent is not there."""
    try:
        names = os.listdir(target.parent)
    except OSError:
        return []
    parsed = ((name, parse_hidden(name)) for name in sorted(names))
    return [target.with_name(name) for name, is_ in parsed if is_ and is_.name == target.name and is_.kind == kind]


def is_abandoned(path: Path, hidden: HiddenName, stale_after: timedelta) -> bool:
    """Whether nobody works on a hidden path any more.

    Its process is dead, or, if it ran on another machine (or in another container) and cannot be asked,
    nothing in the directory has changed for `stale_after`.
    """
    if len(hidden.token) != _TOKEN_CHARS:
        return not _is_alive(hidden.pid)
    ended = has_ended(hidden.pid, hidden.token[:16])
    return time.time() - _last_change(path) > stale_after.total_seconds() if ended is None else ended


def process_token() -> str:
    """Sixteen hex digits that tell this process from any other with the same pid: its machine, and when it started."""
    return _machine() + _process_start(os.getpid())


def has_ended(pid: int, token: str) -> bool | None:
    """Whether the process that had this `process_token` has ended; None where it cannot be asked."""
    if token[:8] != _machine() or os.name == "nt":  # on Windows asking a process by signal would end it
        return None
    return not _is_alive(pid) or _process_start(pid) != token[8:16]


def _last_change(path: Path) -> float:
    try:
        stats = [os.lstat(path)]
        if path.is_dir():
            stats += [entry.stat(follow_symlinks=False) for entry in os.scandir(path)]
    except OSError:  # it is changing under our eyes
        return time.time()
    return max(max(stat.st_mtime, stat.st_ctime) for stat in stats)  # a rename moves only the second


def _is_alive(pid: int) -> bool:
    if os.name == "nt" or not 0 < pid < 2**31:
        return os.name == "nt"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@lru_cache(maxsize=1)
def _machine() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")
    return _digest(f"{host}|{namespace}")


def _process_start(pid: int) -> str:
    """Digest of the boot and the clock tick at which a process started; of nothing where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        is_zombie = after_name[0] in "ZX"  # dead, only not yet collected by its parent
        return _digest("" if is_zombie else f"{boot}|{after_name[19]}")  # fields 3 and 22 of the file
    except (OSError, IndexError):
        return _digest("")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
