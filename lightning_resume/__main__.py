"""``python -m lightning_resume`` is the command ``lightning-resume``."""

from __future__ import annotations

import sys

from lightning_resume.cli import main

if __name__ == "__main__":
    sys.exit(main())
