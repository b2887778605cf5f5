"""The layers: no folder imports one of a higher layer, and the distribution has every folder."""

import ast
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

LAYERS = [
    ["addons.errors", "addons.concurrency"],
    ["addons.hosts", "addons.options", "addons.secret"],
    ["addons.dialects", "trainer.engine.in_vllm", "trainer.boxes.inside"],
    ["addons.store"],
    ["trainer", "trainer.models"],
    ["addons.engine", "addons.prompts", "trainer.tasks", "trainer.traces"],
    ["addons.endpoint", "trainer.engine", "trainer.runs.suspicions"],
    ["trainer.runs", "trainer.runs.exports"],
    ["addons.recorder", "trainer.runs.views", "trainer.training.step"],
    ["addons.proxy", "trainer.boxes"],
    ["trainer.boxes.containers", "trainer.boxes.remote"],
    ["addons", "trainer.boxes.choose", "trainer.judges", "trainer.viewer"],
    ["trainer.boxes.far_side", "trainer.rollouts"],
    ["trainer.nodes", "trainer.reruns", "trainer.service"],
    ["trainer.doctor", "trainer.checks", "trainer.training"],
    ["trainer.training.plan"],
    ["trainer.public"],
    ["trainer.cli"],
    ["__main__"],
]
"""Layers of folders from the lowest to the highest. A folder imports folders of lower layers and no
other of its own. The files directly in a folder are in its layer, but for `LEAVES`.
The packages of one API belong to `addons.dialects`."""
LEAVES = {
    ROOT / "addons" / f"{name}.py": f"addons.{name}"
    for name in ("errors", "concurrency", "hosts", "options", "secret", "recorder")
}
LEAVES[ROOT / "trainer" / "boxes" / "choose.py"] = "trainer.boxes.choose"
"""Files with a layer of their own."""
FILES = sorted(path for top in ("addons", "trainer") for path in (ROOT / top).rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the name with which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[:2] == ("trainer", "public"):
        parts = parts[2:]
    return ".".join(part for part in ("rolltap", *parts) if part != "__init__")


MODULES = {module_of(path): path for path in FILES}


def folder_of(path: Path) -> str:
    """Return the folder of a file as the layers name it."""
    name = ".".join(path.relative_to(ROOT).parent.parts)
    if path.stem == "__main__":
        return "__main__"
    return LEAVES.get(path) or ("addons.dialects" if name.startswith("addons.dialects") else name)


def imported(path: Path) -> set[Path]:
    """Return the files that a file imports, also within functions. The packages around them are
    left out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                each = (f"{module}.{alias.name}" for alias in names)
                found.update(MODULES.get(name) or MODULES.get(module) for name in each)
            case ast.Import(names=names):
                found.update(MODULES.get(alias.name) for alias in names)
    return {file for file in found if file and file.name != "__init__.py"} - {path}


ARROWS = [(path, other) for path in FILES for other in imported(path)]
"""Pairs of files: one that imports, and the other."""


def test_no_folder_imports_a_higher_layer_or_its_own():
    layer = {}
    for number, folders in enumerate(LAYERS):
        layer.update(dict.fromkeys(folders, number))
    wrong = []
    for path, other in ARROWS:
        own = folder_of(path)
        theirs = folder_of(other)
        if own != theirs and layer[own] <= layer[theirs]:
            wrong.append(f"{path.relative_to(ROOT)} imports {other.relative_to(ROOT)}")
    assert not wrong


def test_no_files_import_each_other_in_a_circle():
    sorter = TopologicalSorter()
    for path, other in ARROWS:
        sorter.add(path, other)
    sorter.prepare()


def test_the_recorder_imports_nothing_of_the_trainer():
    for path, other in ARROWS:
        if path.is_relative_to(ROOT / "addons"):
            assert other.is_relative_to(ROOT / "addons"), path


def test_the_command_line_is_written_on_the_public_page():
    allowed = {"trainer.public", "trainer.cli", "trainer", "addons.errors"}
    for path, other in ARROWS:
        if path.parent == ROOT / "trainer" / "cli":
            assert folder_of(other) in allowed, path


def test_no_folder_has_more_than_fourteen_files():
    sizes = Counter(path.parent for path in FILES if path.name != "__init__.py")
    ((folder, most),) = sizes.most_common(1)
    assert most <= 14, folder


def test_the_package_has_every_folder_of_the_tree():
    folders = {path.parent.relative_to(ROOT) for path in FILES} | {Path("recipes", "harnesses")}
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = {".".join(folder.parts).replace("recipes.", "") for folder in folders}
    expected = {f"rolltap.{name}" for name in names} - {"rolltap.trainer.public"} | {"rolltap"}
    assert sorted(setup["packages"]) == sorted(expected)
