"""The layers: no package imports one of a higher layer, and no folder is missing from the distribution."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = [
    ["addons.errors"],
    ["addons.store", "addons.dialects"],
    ["addons.prompts", "addons.engine"],
    ["addons.endpoint"],
    ["addons"],
    ["trainer"],
    ["trainer.traces", "trainer.models"],
    ["trainer.engine"],
    ["trainer.rollouts", "trainer.runs", "trainer.grpo"],
    ["trainer.views"],
    ["trainer.exports", "trainer.training"],
    ["trainer.planning"],
    ["trainer.doctor"],
    ["rolltap"],
    ["trainer.commands"],
    ["trainer.cli"],
    ["__main__"],
]
"""Layers from the lowest to the highest. A package imports packages of lower layers and no other of its own layer.
`addons` and `trainer` are the modules directly in these folders. `rolltap` is the public page, the folder
`trainer/rolltap`."""
FILES = sorted(path for top in ("addons", "trainer") for path in (ROOT / top).rglob("*.py"))


def package_of(module: str) -> str:
    """Return the package of a module. Both names lack the first `rolltap.`, except for the public page `rolltap`."""
    top, *rest = module.split(".")
    if module == "trainer.rolltap.__main__":
        return "__main__"
    if top not in ("addons", "trainer") or rest[:1] == ["rolltap"]:
        return "rolltap"
    inside = bool(rest) and ((ROOT / top / rest[0]).is_dir() or rest[0] in ("cli", "errors"))
    return f"{top}.{rest[0]}" if inside else top


def imports(path: Path) -> set[str]:
    """Return the packages that a file imports, including imports within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {package_of(name.removeprefix("rolltap.")) for name in found if name.split(".")[0] == "rolltap"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_package_imports_a_higher_layer_or_its_own(path):
    package = package_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    layer = next(i for i, packages in enumerate(LAYERS) if package in packages)
    below = {lower for packages in LAYERS[:layer] for lower in packages}
    assert imports(path) <= below | {package}


@pytest.mark.parametrize("path", sorted((ROOT / "trainer" / "commands").glob("*.py")), ids=lambda path: path.stem)
def test_the_command_line_is_written_on_the_public_page(path):
    assert imports(path) <= {"rolltap", "trainer.commands", "trainer"}


def test_the_package_has_every_folder_of_the_tree():
    folders = {path.parent.relative_to(ROOT) for path in FILES} | {Path("recipes", "harnesses")}
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = {".".join(folder.parts).replace("recipes.", "") for folder in folders}
    expected = {f"rolltap.{name}" for name in names} - {"rolltap.trainer.rolltap"} | {"rolltap"}
    assert sorted(setup["packages"]) == sorted(expected)
