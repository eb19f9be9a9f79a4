"""All scenarios, for a program that loads one file by its path and looks for `SCENARIOS`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Under a name of its own: that program may have a module called `scenarios` already.
_NAME = "lightning_resume_scenarios"

_folder = Path(__file__).parent
_spec = importlib.util.spec_from_file_location(
    _NAME, _folder / "__init__.py", submodule_search_locations=[str(_folder)]
)
if _spec is None or _spec.loader is None:
    raise ImportError(f"no package at {_folder}")
_package = importlib.util.module_from_spec(_spec)
sys.modules[_NAME] = _package
_spec.loader.exec_module(_package)

SCENARIOS = _package.SCENARIOS
