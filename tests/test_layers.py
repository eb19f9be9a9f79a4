"""The table of layers: who may import whom."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_resume"
ROOT = Path(__file__).parents[1] / PACKAGE

# A house is a folder or a module of the package. It may import from the houses that stand behind it, and from itself.
BELOW_PLUGIN = {"catalog", "data", "errors", "format", "lock", "policy", "rng", "writer"}
LAYERS = {
    "errors": set(),
    "rng": {"errors"},
    "policy": {"errors"},
    "data": {"errors", "rng"},
    "format": {"errors"},
    "lock": {"errors", "format"},
    "catalog": {"errors", "format", "lock"},
    "writer": set(),
    "plugin": BELOW_PLUGIN,
    "demo": {"public names"},
    "cli": {"catalog", "demo", "errors", "format", "lock", "policy"},
    "__init__": BELOW_PLUGIN | {"plugin"},  # for type checkers only: test_public_names holds that nothing is loaded
    "__main__": {"cli"},
}
LIGHTNING_HOUSES = {"plugin", "demo"}
PRIVATE_STATE = {"averaging.py", "hooks.py", "loops.py", "metrics.py", "module_state.py"}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics"}
WITHOUT_TORCH = {"errors", "lock", "policy", "writer", "cli", "__init__", "__main__"}


def modules() -> list[Path]:
    """Returns every module of the package, relative to it."""
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def house_of(module: Path) -> str:
    """Returns the house that a module belongs to."""
    return module.parts[0].removesuffix(".py")


def imports_of(module: Path) -> Iterator[str]:
    """Yields the full dotted names that a module imports, at its top, in its functions and for type checking."""
    tree = ast.parse((ROOT / module).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = [PACKAGE, *module.parent.parts]
            start = [*package[: len(package) - node.level + 1]] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def houses_imported_by(module: Path) -> set[str]:
    """Returns the houses of the package that a module imports from; "public names" for the package itself."""
    houses = set()
    for name in imports_of(module):
        first, *rest = name.split(".")
        if first == PACKAGE:
            houses.add(rest[0] if rest and rest[0] in LAYERS else "public names")
    return houses


@pytest.mark.parametrize("module", modules(), ids=str)
def test_a_module_imports_only_from_the_layers_below(module: Path) -> None:
    """Imports point down: no module reaches for one that stands above or beside it."""
    house = house_of(module)

    imported = houses_imported_by(module)

    assert imported <= LAYERS[house] | {house}


@pytest.mark.parametrize("module", modules(), ids=str)
def test_only_the_plugin_and_the_demo_import_lightning(module: Path) -> None:
    """Lightning may change: only one house has to follow."""
    packages = {name.split(".")[0] for name in imports_of(module)}

    uses_lightning = bool(packages & LIGHTNING)

    assert not uses_lightning or house_of(module) in LIGHTNING_HOUSES


@pytest.mark.parametrize("module", [m for m in modules() if house_of(m) in WITHOUT_TORCH], ids=str)
def test_what_the_command_line_needs_does_not_import_torch(module: Path) -> None:
    """`lightning-resume --help` and an error class cost no second of start-up time."""
    packages = {name.split(".")[0] for name in imports_of(module)}

    assert "torch" not in packages


def test_the_table_has_no_cycle() -> None:
    """The table itself points down: every house stands on houses whose own foundations do not lead back to it."""
    placed: set[str] = {"public names"}

    while ready := {house for house, below in LAYERS.items() if house not in placed and below <= placed}:
        placed |= ready

    assert placed == {*LAYERS, "public names"}


def test_the_table_knows_every_house() -> None:
    """A new module at the top of the package needs a place in the table."""
    houses = {house_of(module) for module in modules()}

    assert houses <= set(LAYERS)


@pytest.mark.parametrize(
    "module", [m for m in modules() if house_of(m) in LIGHTNING_HOUSES and m.name not in PRIVATE_STATE], ids=str
)
def test_lightnings_private_state_is_touched_in_its_modules_only(module: Path) -> None:
    """What may break with the next Lightning stands in these modules: no other reads `trainer.something._private`."""
    attributes = [node for node in ast.walk(ast.parse((ROOT / module).read_text())) if isinstance(node, ast.Attribute)]

    private = {
        ast.unparse(node)
        for node in attributes
        if re.match("_(?!_|asdict$)", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }

    assert private == set()
