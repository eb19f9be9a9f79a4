"""`python -m benchmarks`: see `saving`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import saving, tables


def main() -> int:
    """Measures, prints the tables and writes what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=saving.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small states, few rounds")
    parser.add_argument("--rounds", type=int, help="turns of each contender (default: 7)")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--picture", type=Path, help="draw them to this file")
    parser.add_argument("--from-json", type=Path, help="print and draw the figures of an earlier run")
    parser.add_argument("--markdown", action="store_true", help="print the tables that README shows instead of all")
    options = parser.parse_args()
    report = json.loads(options.from_json.read_text()) if options.from_json else saving.run(options)
    print(tables.as_markdown(report) if options.markdown else tables.as_text(report))
    if options.json:
        saving.write(report, options.json)
    if options.picture:
        from benchmarks.picture import draw

        draw(report, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
