"""Families of models: the marks of their replies, and the tool calls in the text between two marks.

All work is linear in the text. transformers' own parsers of tags and of strings with delimiters are not: each tag that
is not closed lets them search the rest of the text.
"""

import ast
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rolltap.addons.dialects.call import Tool, ToolCall, parse_json, well_formed

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


def standard_json(opening: str, closing: str) -> Prepare:
    """Return a function from JSON with other delimiters of strings, and keys without quotes, to JSON."""
    string = f"{re.escape(opening)}(?P<string>.*?){re.escape(closing)}"
    pattern = re.compile(rf"(?<=[{{,])(?P<key>\w+):|{string}", re.DOTALL)

    def standard(found: re.Match[str]) -> str:
        if found["key"] is not None:
            return f'"{found["key"]}":'
        return json.dumps(found["string"])

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


class Family:
    """A family of models that write replies by one response template. Raises `ValueError` for one that is none.

    `ends` are tokens that end a turn; `past_end` is the one that a chat template may write in their place.
    """

    def __init__(
        self,
        name: str,
        template: Mapping[str, Any],
        ends: Sequence[str] = (),
        past_end: str = "",
    ) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.name = name
        self.ends = ends
        self.past_end = past_end
        fields = {key: dict(value) for key, value in template["fields"].items()}
        calls = fields["tool_calls"]
        self._has_tags = calls.get("content") == "xml-inline"
        self._prepare = _prepared(calls)
        self.template = load_response_template({**template, "fields": fields})

    def begun_by(self, prompt_end: str) -> str:
        """Return the beginning of the reply that a prompt has written."""
        if self.template.start_anchor_re.search(prompt_end) is None:
            return ""
        begun: str = self.template.truncate_past_last_anchor(prompt_end)
        return begun

    def read_calls(self, opening: str, content: str, closing: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """Return the calls in the content of a region and its marks. O(length of the content).

        Raises one of `UNREADABLE` when one of them cannot be read.
        """
        from transformers.utils.chat_parsing.response_parser import parse_response

        region = opening + self._prepare(content) + closing
        # arguments that are written as plain text get the types of their tool; those in JSON have types
        typing = list(tools) if self._has_tags else None
        parsed = parse_response(region, self.template, prefix="", tools=typing)
        calls = []
        for name, arguments in named_calls(parsed["tool_calls"]):
            if typing is not None:
                arguments = read_untyped(arguments, typing, name)
            calls.append(sampled_call(name, arguments))
        return calls


def _prepared(calls: dict[str, Any]) -> Prepare:
    """Return what the text of a call needs before transformers' parser reads it. Changes the field, in place."""
    arguments = calls.get("content_args", {})
    match calls.get("content", "text"):
        case "python-calls":
            calls["content"] = "json"
            return python_calls
        case "xml-inline":
            return whole_tags(arguments.get("tag_pattern", ""))
        case "json" if "string_delims" in arguments:
            [[opening, closing]] = arguments["string_delims"]
            calls["content_args"] = {}
            return standard_json(opening, closing)
    return str
