"""Examples that users copy need public names alone."""

import json
import re

import pytest

from tests.conftest import ROOT
from tests.readme.blocks import SITE

PROGRAMS = [
    *(ROOT / "recipes" / "service").glob("*.py"),
    ROOT / "recipes" / "quickstart" / "run.py",
]
NOTEBOOKS = [*(ROOT / "recipes" / "notebook").glob("*.ipynb")]
PAGES = [*(SITE / "pages").glob("*.md")]
PRIVATE = re.compile(r"^\s*(?:from|import) (rolltap\.(?!errors\b|types\b)[\w.]+)", re.MULTILINE)


def source_of(path):
    """Return the text of a page or a program, and of a notebook its code."""
    text = path.read_text()
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("path", PROGRAMS + NOTEBOOKS + PAGES, ids=lambda path: path.name)
def test_a_recipe_imports_no_private_module(path):
    assert PRIVATE.findall(source_of(path)) == []


@pytest.mark.parametrize(
    "line", ["from rolltap.trainer.names import Version", "    import rolltap.addons.errors"]
)
def test_a_private_module_is_found(line):
    assert PRIVATE.findall(line)
