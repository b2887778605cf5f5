"""Docstrings begin in plain words, with a noun or a verb, and give each attribute a line."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORBIDDEN = ("What", "Those")
"""First words with which a docstring does not name its subject."""
FILES = [
    path
    for folder in ("addons", "trainer", "recipes", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def docstrings(tree):
    """Yield the line and text of every string that stands alone: of a module, class, function or
    attribute."""
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


def fields_within_a_line(node):
    """Yield the fields of a class whose description does not begin a line of the class's
    docstring."""
    _, _, described = (ast.get_docstring(node) or "").partition("\nAttributes:\n")
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) if re.search(
                rf"[.;] {name}:(\s|$)", described, re.MULTILINE
            ):
                yield name


def test_the_description_of_each_attribute_begins_a_line():
    found = [
        f"{path.relative_to(ROOT)}: {node.name}.{name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for name in fields_within_a_line(node)
    ]
    assert not found, "give these attributes a line:\n" + "\n".join(found)
