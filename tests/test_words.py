"""Docstrings begin in plain words: with a noun or a verb."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORBIDDEN = ("What", "Those")
"""First words with which a docstring does not name its subject."""
FILES = [path for folder in ("addons", "trainer", "recipes", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


def docstrings(tree):
    """Yield the line and text of every string that stands alone: of a module, class, function or attribute."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def test_no_docstring_begins_with_a_forbidden_word():
    found = [
        f"{path.relative_to(ROOT)}:{line}: begins with {first[1]!r}: {text.strip().splitlines()[0]}"
        for path in FILES
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if (first := re.match(r"\s*(\w+)", text)) and first[1] in FORBIDDEN
    ]
    assert not found, "begin these docstrings with a noun or a verb:\n" + "\n".join(found)
