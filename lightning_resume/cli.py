"""The command ``lightning-resume``: looks at checkpoints, and shows the demo.

Whatever needs torch is imported when a sub-command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Exact, crash-safe resume for PyTorch Lightning.

Add the callback to your Trainer, and pass ckpt_path="last":

    from lightning_resume import AtomicResumeCallback

    trainer = Trainer(callbacks=[AtomicResumeCallback("checkpoints", every_n_train_steps=500)])
    trainer.fit(model, datamodule=data, ckpt_path="last")
"""

EXAMPLES = """\
examples:
  lightning-resume demo                      kill a real job three times, and see that nothing is lost
  lightning-resume list checkpoints          which checkpoints are there, and which of them are good
  lightning-resume verify checkpoints        read every byte of them, and compare with the digests
"""

DEMO = """\
Trains a small convolutional net on scikit-learn's handwritten digits, twice, side by side: a baseline that is left
alone and does not have the callback, and a run with the callback that is killed (SIGKILL, workers included) at random
moments and started again each time as a new process, with another seed on purpose.

Then everything is compared bit by bit: weights, optimizer, schedule, random streams, and for every batch its items, its
loss and its learning rate. Expect less than a minute on two cores, and a largest difference of 0.0 in every row.

Writes resume-demo.json and, with matplotlib installed, resume-demo.png: both loss curves, one on top of the other.
"""

DEMO_EXAMPLES = """\
examples:
  lightning-resume demo
  lightning-resume demo --seed 7                     the same batches to die in each time
  lightning-resume demo --kills 5 --output-dir out   more kills, other folder
  lightning-resume demo --stock                      the same with Lightning's ModelCheckpoint: not exact
  lightning-resume demo --keep
  lightning-resume list resume-demo-work/interrupted/checkpoints    what the one before left behind

exit status: 0 the runs are bit-equal, 1 they are not, 2 the demo could not be carried out
"""

LIST = """\
Lists the checkpoints in a folder, oldest first, with what is left of unfinished saves. Reads each index and looks at
the sizes of the files, so it is quick however large they are; "verify" reads the files too.
"""

LIST_EXAMPLES = """\
examples:
  lightning-resume list checkpoints
  lightning-resume list checkpoints --json | python -m json.tool

exit status: 0, also when some are damaged; 2 when there is no such folder
"""

VERIFY = """\
Reads every file of the checkpoints and compares sizes and SHA-256 digests with their indexes. Changes nothing, and
runs no code from them. A PATH is one checkpoint, or a folder of checkpoints; what an unfinished save left in such a
folder is no fault, since resuming never looks at it.
"""

VERIFY_EXAMPLES = """\
examples:
  lightning-resume verify checkpoints/step-00000500
  lightning-resume verify run-*/checkpoints --json

exit status: 0 all good, 1 at least one is damaged, or a PATH has no checkpoint
"""


# attribute of CheckpointInfo and CheckpointIndex, heading; the reason is printed below the table
COLUMNS = {
    "status": "status",
    "kind": "kind",
    "global_step": "step",
    "current_epoch": "epoch",
    "batch_in_epoch": "batch",
    "num_bytes": "bytes",
    "path": "path",
    "reason": "reason",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line without the program's name; by default the process's own.

    Returns:
        The exit status, as each sub-command's ``--help`` tells it.

    Raises:
        SystemExit: The command line was wrong (status 2), or asked for help or the version (status 0).
    """
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-resume",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersion, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = _add_command(
        commands, "demo", _demo, "kill a real training job and see that nothing is lost", DEMO, DEMO_EXAMPLES
    )
    demo.add_argument(
        "--seed", type=int, help="of the job, and of the moments of the kills (default: a new one each time)"
    )
    demo.add_argument("--kills", type=_positive, default=3, metavar="N", help="how often to kill the job (default: 3)")
    demo.add_argument("--output-dir", type=Path, default=Path(), metavar="DIR", help="where to write (default: here)")
    demo.add_argument("--no-plot", dest="plot", action="store_false", help="draw no picture")
    demo.add_argument(
        "--stock", action="store_true", help="save with Lightning's ModelCheckpoint instead: see what is lost"
    )
    demo.add_argument("--keep", action="store_true", help="leave records and checkpoints in DIR/resume-demo-work")

    listing = _add_command(commands, "list", _list, "list the checkpoints in a folder", LIST, LIST_EXAMPLES)
    listing.add_argument("root", type=Path, metavar="ROOT", help="the folder: the callback's dirpath")
    listing.add_argument("--json", action="store_true", help="print JSON")

    verify = _add_command(commands, "verify", _verify, "read checkpoints and check every byte", VERIFY, VERIFY_EXAMPLES)
    verify.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a checkpoint, or a folder of checkpoints")
    verify.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


class _PrintVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"lightning-resume {version('lightning-resume')}")
        except PackageNotFoundError:
            print("lightning-resume, not installed: run from its source")
        parser.exit()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {number}")
    return number


def _demo(options: argparse.Namespace) -> int:
    if missing := [name for name in ("rich", "sklearn") if importlib.util.find_spec(name) is None]:
        print(f"The demo needs {' and '.join(missing)}: pip install 'lightning-resume[demo]'", file=sys.stderr)
        return 2
    from lightning_resume.demo.settings import DemoError, DemoSettings
    from lightning_resume.demo.show import show_demo

    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    settings = DemoSettings(seed=seed, num_kills=options.kills, stock=options.stock)
    try:
        report = show_demo(settings, options.output_dir, plot=options.plot, keep=options.keep)
    except (DemoError, OSError) as error:
        print(f"The demo could not be carried out: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the driver has ended both jobs
        print("stopped", file=sys.stderr)
        return 130
    return 0 if report["exact"] else 1


def _list(options: argparse.Namespace) -> int:
    from lightning_resume.catalog import scan_checkpoints
    from lightning_resume.errors import CheckpointError

    if not options.root.is_dir():
        print(f"There is no folder {str(options.root)!r}.", file=sys.stderr)
        return 2
    try:
        rows = [_row(info) for info in scan_checkpoints(options.root)]
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    _print_rows(rows, as_json=options.json)
    return 0


def _verify(options: argparse.Namespace) -> int:
    rows = [row for path in options.paths for row in _verify_path(path)]
    _print_rows(rows, as_json=options.json)
    return 0 if all(row["status"] == "good" for row in rows) else 1


def _verify_path(path: Path) -> list[dict[str, Any]]:
    """Verifies one checkpoint, or all that were committed to a folder; the result has at least one row."""
    from lightning_resume.catalog import scan_checkpoints
    from lightning_resume.errors import CheckpointError, CheckpointNotFoundError, IncompleteCheckpointError
    from lightning_resume.format.checkpoint import verify_checkpoint
    from lightning_resume.format.index import INDEX_NAME

    try:
        if path.is_dir() and not (path / INDEX_NAME).exists():
            infos = scan_checkpoints(path, verify=True)
            if rows := [_row(info) for info in infos if info.status in ("good", "corrupt")]:
                return rows
        return [_row(verify_checkpoint(path), path=str(path), status="good")]
    except CheckpointNotFoundError as error:
        return [_row(None, path=str(path), status="missing", reason=str(error))]
    except IncompleteCheckpointError as error:
        return [_row(None, path=str(path), status="incomplete", reason=str(error))]
    except CheckpointError as error:
        return [_row(None, path=str(path), status="corrupt", reason=str(error))]


def _row(source: object, **known: str) -> dict[str, Any]:
    """Returns what is printed of a checkpoint: its values by column, None where it has none."""
    values = {name: known.get(name, getattr(source, name, None)) for name in COLUMNS}
    return {**values, "path": str(values["path"]), "reason": values["reason"] or ""}


def _print_rows(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Prints a table, each fault below it; or JSON, with the same names as in the table's source."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = [list(COLUMNS.values())[:-1]]
    table += [[_cell(name, row[name]) for name in COLUMNS if name != "reason"] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)]
        print("  ".join([*cells, line[-1]]))
    for row in rows:
        if row["reason"]:
            print(f"\n{_cell('path', row['path'])}\n  " + str(row["reason"]).replace("\n", "\n  "))


def _cell(name: str, value: Any) -> str:
    """Returns a value as it stands in the table; a name that would disturb the terminal is quoted."""
    if value is None:
        return "-"
    text = f"{value:,}" if name == "num_bytes" else str(value)
    return text if text.isprintable() else repr(text)
