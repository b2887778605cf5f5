"""Parts of the built pages that their Markdown does not have: tables of the fields of models,
pictures, paths of files.

A line `Keys, types and defaults: [`MODEL`](FILE.py).` becomes a table, made from the sources, and a
line `Versions and commands: [the presets](FOLDER).` a table of the presets. Links to files of the
checkout, which the site does not have, become their paths.
"""

import ast
import json
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = ROOT / ".venvs" / "docs" / "checkout"
PICTURES = [*ROOT.glob("trainer/viewer/screenshots/*.png")]
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]*)(?:#[^)\s]*)?\)")
TABLE = re.compile(r"^Keys, types and defaults: \[`(\w+)`\]\((\.\./\S+)\.py\)\.$", re.MULTILINE)
PRESETS = re.compile(r"^Versions and commands: \[the presets\]\(\S+\)\.$", re.MULTILINE)
HEADING = "| key | type | default | |\n| --- | --- | --- | --- |"
TYPES = {
    "Path": "path",
    "bool": "boolean",
    "dict": "table",
    "float": "number",
    "int": "integer",
    "list": "array of text",
    "str": "text",
}
"""Name of a Python type -> the name by which the tables call it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures of the pages."""
    for picture in PICTURES:
        files.append(File.generated(config, picture.name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the tables, and name the path in the place of a link that leads out of the pages."""

    def path_of(target: str) -> str:
        return os.path.relpath(os.path.normpath(Path(config.docs_dir, target)), ROOT)

    def table(line: re.Match[str]) -> str:
        module = path_of(line[2]).replace("/", ".")
        rows = (
            option_rows()
            if line[1] == "RecorderOptions"
            else field_rows(package()[f"{module}.{line[1]}"])
        )
        return "\n".join([HEADING, *rows])

    def named(link: re.Match[str]) -> str:
        path = path_of(link[3])
        if link[1]:
            return f"![{link[2]}]({Path(path).name})"
        if link[2].startswith("`"):
            return f"`{path}`"
        return f"{link[2]} (`{path}`)"

    def presets(line: re.Match[str]) -> str:
        return "\n".join(
            ["| name | tested with | install |", "| --- | --- | --- |", *preset_rows()]
        )

    return OUTSIDE.sub(named, PRESETS.sub(presets, TABLE.sub(table, markdown)))


def preset_rows() -> Iterator[str]:
    """Yield a row for each preset of an agent program."""
    for file in sorted(ROOT.glob("recipes/harnesses/*.toml")):
        preset = tomllib.loads(file.read_text())
        yield row(preset["name"], preset["version"], f"`{preset['install']}`")


@cache
def package() -> griffe.Module:
    """Return the sources of rolltap, which are not imported: this environment has not its
    dependencies."""
    loaded = griffe.load("rolltap", search_paths=[CHECKOUT], allow_inspection=False)
    assert isinstance(loaded, griffe.Module)
    return loaded


def option_rows() -> Iterator[str]:
    """Yield a row for each option of the recorder. A type that is read from a text is a text
    there."""
    for name, field in package()["addons.options.RecorderOptions"].members.items():
        if is_field(field) and field.docstring is not None:
            kinds = kinds_of(field.annotation)
            if "BeforeValidator" in str(field.annotation):
                kinds = ["text"]
            _, default = key_and_default(name, field)
            yield row(f"rolltap_{name}", " or ".join(kinds), default, field.docstring.value)


def field_rows(model: griffe.Class) -> Iterator[str]:
    """Yield a row for each field of a model, with the fields of its bases after its own.

    Left out are a field with one value, which names the model, and fields of TRL, which have no
    text here.
    """
    seen = set()
    for each in [model, *model.mro()]:
        texts = attribute_texts(each)
        for name, field in each.members.items():
            if name in seen or not is_field(field):
                continue
            seen.add(name)
            kinds = [*dict.fromkeys(kinds_of(field.annotation))]
            text = field.docstring.value if field.docstring else texts.get(name)
            is_name = len(kinds) == 1 and kinds[0].startswith("`")
            if is_name or (text is None and model.name == "TraceGRPOConfig"):
                continue
            if text is None:
                raise PluginError(f"{each.path}.{name} has no docstring for the table of a page")
            key, default = key_and_default(name, field)
            yield row(key, " or ".join(kinds), default, text)


def is_field(member: griffe.Object) -> bool:
    """Return true for a public attribute with a type, not for a property."""
    return (
        member.is_attribute
        and member.annotation is not None
        and member.is_public
        and not member.has_labels("property")
    )


def attribute_texts(model: griffe.Class) -> dict[str, str]:
    """Return the section `Attributes` of a docstring."""
    if model.docstring is None:
        return {}
    for section in model.docstring.parse("google", warnings=False):
        if section.kind is griffe.DocstringSectionKind.attributes:
            return {each.name: each.description for each in section.value}
    return {}


def row(name: str, *others: str) -> str:
    """Return a line of a table."""
    cells = [f"`{name}`", *others]
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |"


def kinds_of(annotation: Any) -> list[str]:
    """Return the types of a field. None is not one of them: the key is left out."""
    match annotation:
        case griffe.ExprBinOp():
            return [*kinds_of(annotation.left), *kinds_of(annotation.right)]
        case griffe.ExprSubscript(left=griffe.ExprName(name="Literal"), slice=values):
            elements = values.elements if isinstance(values, griffe.ExprTuple) else [values]
            return [shown(ast.literal_eval(str(element))) for element in elements]
        case griffe.ExprSubscript(left=griffe.ExprName(name="Annotated"), slice=values):
            return kinds_of(values.elements[0])
        case griffe.ExprSubscript(left=griffe.ExprName(name="list" | "tuple"), slice=values):
            inner = values.elements[0] if isinstance(values, griffe.ExprTuple) else values
            return [f"array of {' or '.join(kinds_of(inner))}"]
        case griffe.ExprSubscript():
            return kinds_of(annotation.left)
        case griffe.ExprName(name=name) if name in TYPES:
            return [TYPES[name]]
        case griffe.ExprName():
            meant = annotation.resolved
            return ["table"] if meant is None or meant.is_class else kinds_of(meant.value)
    return []


def key_and_default(name: str, field: griffe.Attribute) -> tuple[str, str]:
    """Return the key of a field and its default, as a recipe writes them."""
    value = field.value
    if not (isinstance(value, griffe.ExprCall) and str(value.function) == "Field"):
        return name, shown_expression(value)
    arguments = {
        each.name: each.value for each in value.arguments if isinstance(each, griffe.ExprKeyword)
    }
    if "alias" in arguments:
        name = ast.literal_eval(arguments["alias"])
    if "default_factory" in arguments:
        return name, ""
    return name, shown_expression(arguments.get("default"))


def shown_expression(value: Any) -> str:
    """Return a default, `required` without one, and nothing if it is no literal."""
    if value is None:
        return "required"
    if isinstance(value, griffe.ExprName) and value.resolved is not None:
        value = value.resolved.value
    try:
        return shown(ast.literal_eval(str(value)))
    except ValueError:
        return ""


def shown(value: Any) -> str:
    """Return a value in TOML's words. None and what is empty is shown as nothing."""
    if value is None or value == "" or value == () or value == [] or value == {}:
        return ""
    if isinstance(value, dict):
        return f"`{{{', '.join(f'{key} = {json.dumps(each)}' for key, each in value.items())}}}`"
    return f"`{json.dumps(value)}`"
