"""Families of models: the marks of their replies (`families.toml`), and their tool calls.

A response template says where the parts of a reply begin and end (transformers 5.23,
utils/chat_parsing). A tokenizer may bring its own.

All work is linear in the text. transformers' own parsers of tags and of strings with delimiters are
not: each tag that is not closed lets them search the rest of the text.
"""

import ast
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from rolltap.addons.dialects.call import Tool, ToolCall
from rolltap.addons.dialects.json_values import parse_json, well_formed

UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    SyntaxError,
    RecursionError,
    MemoryError,
)
"""Errors of the parsers for text that they cannot read.

Python's own has too little memory for deep nesting.
"""
_THINK = {
    "open_pattern": r"\A\s{0,99}(?:<think>|(?=</think>))",
    "close_pattern": r"</think>\s{0,99}",
}
"""The end alone is that of empty reasoning, which some prompts open."""


class Family:
    """A family of models that write replies by one response template.

    `ends` are tokens that end a turn; `past_end` is the one that a chat template may write in their
    place. Raises one of `UNREADABLE` for a template that is none.
    """

    def __init__(
        self,
        name: str | None,
        template: Mapping[str, Any],
        ends: Sequence[str] = (),
        past_end: str = "",
    ) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.name = name
        self.ends = ends
        self.past_end = past_end
        self._calls = template["fields"]["tool_calls"]
        self._kind = self._calls.get("content")
        # what `_standard_call` returns for them is JSON
        calls = dict(self._calls)
        if self._kind == "python-calls":
            calls["content"] = "json"
        if "string_delims" in calls.get("content_args", {}):
            calls["content_args"] = {}
        fields = {**template["fields"], "tool_calls": calls}
        self.template = load_response_template({**template, "fields": fields})

    def read_calls(
        self,
        opening: str,
        content: str,
        closing: str,
        tools: Sequence[Tool],
    ) -> list[ToolCall]:
        """Return the calls in the content of a region and its marks, without ids. O(its length).

        Raises one of `UNREADABLE` when one of them cannot be read.
        """
        from transformers.utils.chat_parsing.response_parser import parse_response

        # arguments that are plain text get the types of their tool; those in JSON have types
        typing = None
        if self._kind == "xml-inline":
            typing = list(tools)
        region = opening + self._standard_call(content) + closing
        found = parse_response(region, self.template, prefix="", tools=typing)["tool_calls"]
        if not isinstance(found, list):
            found = [found]
        calls = []
        for each in found:
            function = each.get("function", each)
            name = function["name"]
            arguments = function.get("arguments", function.get("parameters"))
            if not isinstance(name, str) or not name:
                raise ValueError("the name of the tool is no text")
            if isinstance(arguments, dict):
                if typing is not None:
                    _read_untyped(arguments, typing, name)
                arguments = json.dumps(arguments, ensure_ascii=False)
            if not isinstance(arguments, str):
                raise ValueError("the arguments are no object")
            calls.append(ToolCall("", well_formed(name), well_formed(arguments)))
        return calls

    def _standard_call(self, content: str) -> str:
        """Return the content of a call in a form that transformers reads in linear time."""
        arguments = self._calls.get("content_args", {})
        match self._kind:
            case "python-calls":
                return _python_calls(content)
            case "xml-inline":
                _require_tags(content, arguments["tag_pattern"])
            case "json" if "string_delims" in arguments:
                [[opening, closing]] = arguments["string_delims"]
                return _standard_json(content, opening, closing)
        return content


def _require_tags(text: str, pattern: str) -> None:
    """Raise `ValueError` unless all of a text is tags. A tag that is not closed ends the search."""
    tag = re.compile(rf"\s*(?:{pattern})", re.DOTALL)
    end = 0
    while found := tag.match(text, end):
        end = found.end()
    if text[end:].strip():
        raise ValueError("a part of the call is no argument")


def _standard_json(text: str, opening: str, closing: str) -> str:
    """Return JSON for a text with other delimiters of strings, and keys without quotes."""
    string = f"{re.escape(opening)}(?P<string>.*?){re.escape(closing)}"

    def standard(found: re.Match[str]) -> str:
        if found["key"] is not None:
            return f'"{found["key"]}":'
        return json.dumps(found["string"])

    return re.sub(rf"(?<=[{{,])(?P<key>\w+):|{string}", standard, text, flags=re.DOTALL)


_LONGEST_PYTHON = 32_768
"""Characters. Python's parser takes 0.1 s for so many, in which nobody else runs."""
_JSON_NAMES = {"true": True, "false": False, "null": None}


class _Names(ast.NodeTransformer):
    """Puts the values of JSON in place of their names."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_JSON_NAMES[node.id])


def _python_calls(text: str) -> str:
    """Return the calls in a Python list of them as JSON. Texts may hold newlines."""
    if len(text) > _LONGEST_PYTHON:
        raise ValueError(f"it has more than {_LONGEST_PYTHON} characters")
    (statement,) = ast.parse(text.strip().replace("\n", "\\n")).body
    calls = []
    for call in statement.value.elts:  # type: ignore[attr-defined]
        if call.args:
            raise ValueError("an argument has no name")
        arguments = {}
        for word in call.keywords:
            arguments[word.arg] = ast.literal_eval(_Names().visit(word.value))
        calls.append({"name": ast.unparse(call.func), "arguments": arguments})
    return json.dumps(calls)


def _read_untyped(arguments: dict[str, Any], tools: list[Tool], name: str) -> None:
    """Read as JSON the arguments whose schema has no type of its own: `$ref`, `allOf`."""
    properties: Mapping[str, Any] = {}
    for tool in tools:
        if tool["function"]["name"] == name:
            parameters = tool["function"].get("parameters") or {}
            properties = parameters.get("properties") or {}
    for key, schema in properties.items():
        value = arguments.get(key)
        typed = not isinstance(schema, dict) or {"type", "anyOf", "oneOf"} & schema.keys()
        if isinstance(value, str) and not typed:
            with suppress(ValueError):
                arguments[key] = parse_json(value)


@cache
def families() -> dict[str, Family]:
    """Return the families of `families.toml` by name."""
    path = Path(__file__).with_name("families.toml")
    found = {}
    for name, family in tomllib.loads(path.read_text("utf-8")).items():
        ends = family.pop("ends")
        past_end = family.pop("past_end", "")
        end = "|".join(map(re.escape, ends))
        content = {"close_pattern": rf"(?:{end})\s{{0,99}}"}
        family["fields"] = {"reasoning_content": _THINK, "content": content, **family["fields"]}
        calls = family["fields"]["tool_calls"]
        if "(?P<name>" in calls.get("open_pattern", ""):
            calls["transform"] = {"function": {"name": "{name}", "arguments": "{content}"}}
        if "tag_pattern" in calls.get("content_args", {}):
            calls["content"] = "xml-inline"
            calls["content_args"]["value_parser"] = {"name": "text", "args": {"strip": False}}
        found[name] = Family(name, family, ends, past_end)
    return found


@cache
def plain() -> Family:
    """Return the family, without a name, whose replies are text.

    The prompt or the model may open reasoning.
    """
    fields = {
        "reasoning_content": _THINK,
        "content": {},
        "tool_calls": {"open_pattern": "(?!)"},
    }
    return Family(None, {"start_anchor_pattern": r"(?=<think>\s*\Z)", "fields": fields})
