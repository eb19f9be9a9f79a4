"""The command ``lightning-resume``: looks at checkpoints, tidies them up, and shows the demo.

Whatever is slow to import is imported when a sub-command runs, so that ``--help`` answers at once; torch by the demo
only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_resume.cli import texts

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line without the program's name; by default the process's own. Without a sub-command
            the help is printed.

    Returns:
        The exit status, as each sub-command's ``--help`` tells it.

    Raises:
        SystemExit: The command line was wrong (status 2), or asked for help or the version (status 0).
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 0
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-resume",
        description=texts.DESCRIPTION,
        epilog=texts.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=None)
    parser.add_argument("--version", action=_PrintVersion, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    _add_looking(commands)
    _add_changing(commands)
    return parser


_Commands = argparse._SubParsersAction


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    summary = "kill a real training job and see that nothing is lost"
    demo = _add_command(commands, "demo", _demo, summary, texts.DEMO, texts.DEMO_EXAMPLES)
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


def _add_looking(commands: _Commands[argparse.ArgumentParser]) -> None:
    summary = "list the checkpoints in a folder"
    listing = _add_command(commands, "list", _list, summary, texts.LIST, texts.LIST_EXAMPLES)
    listing.add_argument("root", type=Path, metavar="FOLDER", help="the callback's dirpath")
    listing.add_argument("--json", action="store_true", help="print JSON")

    summary = "read checkpoints and check every byte"
    verify = _add_command(commands, "verify", _verify, summary, texts.VERIFY, texts.VERIFY_EXAMPLES)
    verify.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a checkpoint, or a folder of checkpoints")
    verify.add_argument("--json", action="store_true", help="print JSON")


def _add_changing(commands: _Commands[argparse.ArgumentParser]) -> None:
    summary = "delete old checkpoints of a run"
    prune = _add_command(commands, "prune", _prune, summary, texts.PRUNE, texts.PRUNE_EXAMPLES)
    prune.add_argument("root", type=Path, metavar="FOLDER", help="the callback's dirpath")
    prune.add_argument("--keep-last", type=_positive, required=True, metavar="K", help="so many newest ones stay")
    prune.add_argument(
        "--archive-every", type=_positive, metavar="N", help="the first at or after each multiple of N steps stays"
    )
    prune.add_argument("--run-id", metavar="ID", help="whose checkpoints (default: the newest one's run)")
    prune.add_argument("--dry-run", action="store_true", help="delete nothing")
    prune.add_argument("--json", action="store_true", help="print JSON")

    summary = "rewrite checkpoints of an older schema"
    migrate = _add_command(commands, "migrate", _migrate, summary, texts.MIGRATE, texts.MIGRATE_EXAMPLES)
    migrate.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a checkpoint, or a folder of checkpoints")
    migrate.add_argument("--json", action="store_true", help="print JSON")


def _add_command(
    commands: _Commands[argparse.ArgumentParser],
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


def _demo(options: argparse.Namespace) -> int:
    from lightning_resume.cli.demonstrate import demonstrate

    return demonstrate(options)


def _list(options: argparse.Namespace) -> int:
    from lightning_resume.cli.look import list_folder

    return list_folder(options.root, as_json=options.json)


def _verify(options: argparse.Namespace) -> int:
    from lightning_resume.cli.look import verify_paths

    return verify_paths(options.paths, as_json=options.json)


def _prune(options: argparse.Namespace) -> int:
    from lightning_resume.cli.change import prune_folder

    return prune_folder(
        options.root,
        keep_last=options.keep_last,
        archive_every=options.archive_every,
        run_id=options.run_id,
        dry_run=options.dry_run,
        as_json=options.json,
    )


def _migrate(options: argparse.Namespace) -> int:
    from lightning_resume.cli.change import migrate_paths

    return migrate_paths(options.paths, as_json=options.json)


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
