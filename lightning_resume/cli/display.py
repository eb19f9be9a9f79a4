"""Tables and progress: by rich on a terminal where it is installed, as plain text otherwise, or as JSON."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]

# attribute of CheckpointInfo and CheckpointIndex, heading; the reason is printed below the table
COLUMNS = {
    "action": "action",
    "status": "status",
    "kind": "kind",
    "timeline": "timeline",
    "global_step": "step",
    "current_epoch": "epoch",
    "batch_in_epoch": "batch",
    "num_bytes": "bytes",
    "run_id": "run",
    "path": "path",
}
_STYLES = {"good": "green", "corrupt": "red", "missing": "red", "failed": "red"}


def row_of(source: object, **known: Any) -> Row:
    """What is printed of a checkpoint: the values of its info or index, None where it has none."""
    names = [*COLUMNS, "reason"]
    is_verified = bool(known.get("is_verified", False))
    values = {name: known.get(name, getattr(source, name, None)) for name in names}
    if values["action"] is None:
        del values["action"]
    return {**values, "is_verified": is_verified, "path": str(values["path"]), "reason": values["reason"] or ""}


def print_rows(rows: Sequence[Row], *, as_json: bool) -> None:
    """Prints a table, each fault below it; or JSON, with the same names as in the table's source."""
    if as_json:
        print(json.dumps(list(rows), indent=2))
        return
    names = _columns(rows)
    cells = [[_cell(name, _shown(name, row)) for name in names] for row in rows]
    console = _console("stdout")
    if console is None:
        _print_plain([COLUMNS[name] for name in names], cells)
    else:
        _print_rich(console, names, cells)
    for row in rows:
        if row["reason"]:
            print(f"\n{_cell('path', row['path'])}\n  " + str(row["reason"]).replace("\n", "\n  "))


def _shown(name: str, row: Row) -> Any:
    """What the table says: good is only what was read to its last byte, and before that it is committed."""
    is_unread = name == "status" and row["status"] == "good" and not row["is_verified"]
    return "committed" if is_unread else row[name]


def _columns(rows: Sequence[Row]) -> list[str]:
    """Those that tell something: timelines where a run went back, runs where there is more than one."""
    names = [name for name in COLUMNS if name != "action" or any(name in row for row in rows)]
    if not any(row["timeline"] for row in rows):
        names.remove("timeline")
    if len({row["run_id"] for row in rows if row["run_id"] is not None}) < 2:
        names.remove("run_id")
    return names


def _print_plain(headings: list[str], cells: list[list[str]]) -> None:
    table = [headings, *cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        padded = [cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)]
        print("  ".join([*padded, line[-1]]))


def _print_rich(console: Any, names: list[str], cells: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for name in names:
        table.add_column(COLUMNS[name], justify="left" if name == "path" else "right", overflow="fold")
    for line in cells:
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in line))
    console.print(table)


def _cell(name: str, value: Any) -> str:
    """A value as it stands in the table; a name that would disturb the terminal is quoted."""
    if value is None:
        return "-"
    text = f"{value:,}" if name == "num_bytes" else str(value)
    return text if text.isprintable() else repr(text)


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[str, int], None]]:
    """Shows on stderr how far a long work is; nothing where that is no terminal.

    Args:
        what: is done.
        total_bytes: of all files.

    Yields:
        A function that is told which checkpoint comes next, and how many bytes the one before it had.
    """
    console = _console("stderr")
    if console is None:
        is_shown = sys.stderr.isatty()
        yield lambda name, num_bytes: _print_step(what, name) if is_shown and name else None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda name, num_bytes: bar.update(task, advance=num_bytes, description=f"{what} {_cell('path', name)}")


def _print_step(what: str, name: str) -> None:
    print(f"{what} {_cell('path', name)}", file=sys.stderr)


def _console(stream: str) -> Any | None:
    """Rich's console on a terminal; None where rich is not installed, or a program reads what is printed."""
    if importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    console = Console(stderr=stream == "stderr", markup=False, emoji=False, highlight=False)
    return console if console.is_terminal else None
