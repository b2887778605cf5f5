"""The tool calls in the text of one region of a reply, and what each way of writing them needs before it is read.

All work is linear in the text. transformers' own parsers of tags and of strings with delimiters are not: each tag that
is not closed lets them search the rest of the text.
"""

import ast
import json
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rolltap.addons.dialects.model_call import Tool, ToolCall, parse_json, well_formed

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)
"""Errors of the parsers for text that they cannot read. Python's own has too little memory for deep nesting."""
Prepare = Callable[[str], str]
"""Text of a region -> text that transformers' parsers read in linear time. Raises `ValueError`."""


def sampled_call(name: str, arguments: Any) -> ToolCall:
    """Return a tool call with a new random id. Arguments that are text stay as they are."""
    text = arguments
    if not isinstance(arguments, str):
        text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", name=well_formed(name), arguments=well_formed(text))


def named_calls(value: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments in a parsed region. Raises `ValueError` for one that has none."""
    if not isinstance(value, list):
        value = [value]
    calls = []
    for each in value:
        function = each.get("function", each)
        name = function["name"]
        arguments = function["arguments" if "arguments" in function else "parameters"]
        if not isinstance(name, str) or not name:
            raise ValueError("the name of the tool is no text")
        if not isinstance(arguments, dict | str):
            raise ValueError("the arguments are no object")
        calls.append((name, arguments))
    return calls


def whole_tags(pattern: str) -> Prepare:
    """Return a function that refuses text which is not all tags: a tag that is not closed ends the search."""
    tag = re.compile(rf"\s*(?:{pattern})", re.DOTALL)

    def prepare(text: str) -> str:
        end = 0
        while text[end : end + 1]:
            found = tag.match(text, end)
            if found is None:
                break
            end = found.end()
        if text[end:].strip():
            raise ValueError("a part of the call is no argument")
        return text

    return prepare


def standard_json(delimiters: list[list[str]], *, unquoted_keys: bool) -> Prepare:
    """Return a function from JSON with other delimiters of strings, and keys without quotes, to JSON."""
    strings = [f"{re.escape(opening)}(.*?){re.escape(closing)}" for opening, closing in delimiters]
    key = r"(?<=[{,])(?P<key>\w+):" if unquoted_keys else "(?P<key>(?!))"
    pattern = re.compile("|".join([key, *strings]), re.DOTALL)

    def standard(found: re.Match[str]) -> str:
        if found["key"] is not None:
            return f'"{found["key"]}":'
        (text,) = [group for group in found.groups()[1:] if group is not None]
        return json.dumps(text)

    return lambda text: pattern.sub(standard, text)


_JSON_NAMES = {"true": True, "false": False, "null": None}


class _Names(ast.NodeTransformer):
    """Puts the values of JSON in place of their names."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_JSON_NAMES[node.id])


def python_calls(text: str) -> str:
    """Return the calls in a Python list of them as JSON. Texts may hold newlines. Raises `ValueError` and others."""
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


def read_untyped(arguments: dict[str, Any], tools: list[Tool], name: str) -> dict[str, Any]:
    """Return arguments, read as JSON those for which the tool's schema has no type of its own: `$ref`, `allOf`."""
    properties: Mapping[str, Any] = {}
    for tool in tools:
        if tool["function"]["name"] == name:
            parameters = tool["function"].get("parameters") or {}
            properties = parameters.get("properties") or {}
    read = {}
    for key, value in arguments.items():
        read[key] = value
        schema = properties.get(key, {"type": ""})
        if isinstance(value, str) and not {"type", "anyOf", "oneOf"} & schema.keys():
            with suppress(ValueError):
                read[key] = parse_json(value)
    return read
