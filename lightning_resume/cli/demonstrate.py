"""``lightning-resume demo``."""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys


def demonstrate(options: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status."""
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
