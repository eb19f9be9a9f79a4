"""Watching a process from outside with strace, and killing it at one of its system calls."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

STRACE = shutil.which("strace")
FAMILIES = {
    "open": ("open", "openat"),
    "write": ("write", "pwrite64", "writev", "pwritev", "pwritev2"),
    "sync": ("fsync", "fdatasync"),
    "rename": ("rename", "renameat", "renameat2"),
    "unlink": ("unlink", "unlinkat", "rmdir"),
    "mkdir": ("mkdir", "mkdirat", "link", "linkat"),
}
_LINE = re.compile(r"(?P<pid>\d+) +(?:<\.\.\. )?(?P<name>\w+)(?: resumed>|\()(?P<rest>.*)")
_FD_PATH = re.compile(r"\d+<(?P<path>/[^>]*)>")
_TEXT = re.compile(r'"(?P<text>[^"]*)"')
_PR_SET_PTRACER = 0x59616D61


class Call(NamedTuple):
    """One system call under the watched folder.

    Attributes:
        name: of the system call.
        ordinal: which call of this name it is in its thread, counted from 1, also over calls elsewhere.
        path: what it works on.
        target: a rename's new name, or "".
        creates: whether it opens a new file.
    """

    name: str
    ordinal: int
    path: str
    target: str
    creates: bool


def traced(action: Callable[[], object], folder: Path, log: Path, *, kill_at: Call | None = None) -> list[Call]:
    """Does something in a forked process that strace looks at.

    Args:
        action: what to do; its process has begun before strace came, so that only what it does is seen.
        folder: only calls under it are listed.
        log: where strace may write.
        kill_at: strace kills the process when it enters this call, as known from an earlier trace.

    Returns:
        The calls, in order. A call in which another thread's came between stands where it began; a sync where it ended.

    Raises:
        AssertionError: the process did not end well (or was not killed where it should).
    """
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
            os.close(go)
            os.read(ready, 1)
            action()
            status = 0
        finally:
            os._exit(status)
    os.close(ready)
    wanted = [f"?{name}" for names in FAMILIES.values() for name in names]
    command = [str(STRACE), "-f", "-y", "-s", "0", "-o", str(log), "-e", f"trace={','.join(wanted)}", "-p", str(pid)]
    if kill_at is not None:
        command += ["-e", f"inject={kill_at.name}:signal=SIGKILL:when={kill_at.ordinal}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        attached = strace.stderr.readline() if strace.stderr else ""
        os.write(go, b"x")
        os.close(go)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        strace.wait(60)
    if "attached" not in attached:
        raise AssertionError(f"strace: {attached}")
    if status != (-9 if kill_at else 0):
        raise AssertionError(f"the process ended with {status}, not as {kill_at} wanted")
    return parse(log.read_text(errors="replace").splitlines(), os.fspath(folder))


def can_trace() -> str:
    """Why strace cannot be used here; "" if it can."""
    if STRACE is None or not sys.platform.startswith("linux"):
        return "strace is not installed"
    tried = subprocess.run([STRACE, "-f", "-o", os.devnull, "true"], capture_output=True, text=True, timeout=60)
    return "" if tried.returncode == 0 else f"strace may not trace here: {tried.stderr.strip()}"


def parse(lines: Sequence[str], folder: str) -> list[Call]:
    """The calls under a folder from strace's output."""
    calls: list[Call] = []
    counts: Counter[tuple[str, str]] = Counter()
    unfinished: dict[str, Call] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        pid, name, rest = match["pid"], match["name"], match["rest"]
        if f"<... {name} resumed>" in line:
            if pid in unfinished:
                calls.append(unfinished.pop(pid))
            continue
        counts[pid, name] += 1
        call = _call(name, counts[pid, name], rest)
        if not (call.path + os.sep).startswith(folder + os.sep):
            continue
        if "<unfinished ...>" in rest and name in FAMILIES["sync"]:
            unfinished[pid] = call
        else:
            calls.append(call)
    return calls


def _call(name: str, ordinal: int, rest: str) -> Call:
    arguments, _, _ = rest.rpartition(") ")
    opened = _FD_PATH.match(arguments or rest)
    texts = [match["text"] for match in _TEXT.finditer(arguments or rest)]
    if name in (*FAMILIES["write"], *FAMILIES["sync"]):
        texts = []
    base = opened["path"] if opened else ""
    path = os.path.join(base, texts[0]) if texts else base
    return Call(name, ordinal, path, texts[1] if len(texts) > 1 else "", "O_CREAT" in rest)
