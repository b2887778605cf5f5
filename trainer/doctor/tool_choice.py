"""The tool of a program that the scripted model calls: one that does no harm, with arguments that
its schema allows."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

GREETING = "héllo from rolltap"
"""Text that the shell tool prints. Not ASCII: programs that write JSON again escape it
otherwise."""
_COMMANDS = ("command", "cmd", "commands", "script", "shell_command")
"""Parameters of a shell tool that hold the command."""
_SHELLS = re.compile(r"bash|(power)?shell|sh|terminal")
"""A word in the name of a shell tool."""
_RUNS = re.compile(r"run|exec|execute|commands?|cmd")
"""The words of a shell tool's name that has none of `_SHELLS`."""
_LOOKS = re.compile(
    r"read|list|ls|get|search|find|view|show|look|lookup|glob|grep|inspect|describe|sum|multiply|"
    r"calculate|echo"
)
"""The first word in the name of a tool that only looks, or computes."""
_THINGS = re.compile(
    r"web|internet|code|files?|directory|dir|folder|text|weather|forecast|current|date|time|"
    r"calculator"
)
"""The words beside `_LOOKS` in such a name that begins with a noun, or is one."""
_ACTS = re.compile(
    r"write|edit|create|add|delete|remove|rm|update|insert|append|patch|replace|move|rename|send|"
    r"post|tweet|submit|publish|upload|pay|buy|sell|purchase|charge|refund|cancel|kill|stop|exit|"
    r"close|shutdown|drop|reset|clear|merge|finish|complet(e|ion)|done|final|spawn|(sub)?agent|"
    r"task|delegate|transfer|handoff|deploy|install|commit|push|ask|question|confirm|sleep|wait|"
    r"schedule|enter|input|skill|and|or|then"
)
"""A word in the name of a tool that may change something, ask a person or end the session; or that
a verb follows."""
_ENDS = re.compile(
    r"finish|submit|done|final_?answer|complete_?task|task_?complete|attempt_?completion",
    re.I,
)
"""The name of a tool with which a program ends."""
_TOLD = re.compile(
    r"message|text|result|output|(final_?)?answer|response|summary|reason|thoughts?|security_risk",
    re.I,
)
"""The parameters that such a tool may require."""

Tool = Mapping[str, Any]
"""A tool as the model sees it: `name`, and `parameters`, a JSON schema."""


def shell_call(tools: Sequence[Tool], command: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call that runs `command` in a shell, or None without
    such a tool.

    A shell tool has words for it and none for an act in its name, and a parameter for the command
    that is free text.
    """
    for tool in filter(_is_shell, tools):
        match tool.get("parameters"):
            case {"properties": dict(properties)}:
                for name in _COMMANDS:
                    schema = properties.get(name)
                    if isinstance(schema, dict) and "enum" not in schema:
                        value: str | list[str] = command
                        if schema.get("type") == "array":
                            value = [command] if name == "commands" else ["sh", "-c", command]
                        return tool["name"], {**_arguments(tool), name: value}
    return None


def harmless_call(
    tools: Sequence[Tool],
    name: str | None = None,
) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call that a program can be asked for without harm, or
    None.

    It is of a shell tool, which prints `GREETING`, else of the first tool whose name says that it
    only looks. The tool is called where the program runs, with the user's files and accounts: one
    with a name that says less gets no call, unless a person has chosen it by `name`.
    """
    tools = [tool for tool in tools if name in (None, tool["name"])]
    if call := shell_call(tools, f"echo '{GREETING}'"):
        return call
    for tool in tools:
        if name or _only_looks(tool):
            return tool["name"], _arguments(tool)
    return None


def ending_call(tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call with which a program ends its session, or
    None."""
    for tool in tools:
        arguments = _arguments(tool)
        if ends_session(tool["name"]) and all(_TOLD.fullmatch(name) for name in arguments):
            return tool["name"], arguments
    return None


def ends_session(name: str) -> bool:
    """Return True when a tool of this name ends the session of its program."""
    return _ENDS.fullmatch(name) is not None


def _arguments(tool: Tool) -> dict[str, Any]:
    try:
        arguments = example(tool["parameters"])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return {}  # the parameters are no schema
    return arguments if isinstance(arguments, dict) else {}


def _is_shell(tool: Tool) -> bool:
    words = _words(tool)
    if not words or any(map(_ACTS.fullmatch, words)):
        return False
    return any(map(_SHELLS.fullmatch, words)) or all(map(_RUNS.fullmatch, words))


def _only_looks(tool: Tool) -> bool:
    words = _words(tool)
    if not words or any(map(_ACTS.fullmatch, words)):
        return False
    known = all(_LOOKS.fullmatch(word) or _THINGS.fullmatch(word) for word in words)
    return known or _LOOKS.fullmatch(words[0]) is not None


def _words(tool: Tool) -> list[str]:
    """Return the words of a tool's name in lower case, without its server or plugin:
    `mcp__fs__read`, `P-get_x`."""
    name = re.sub(r"^(mcp__.+?__|\w+-(?=[a-z]+_\w+$))", "", tool["name"])
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


_WORD = "hello"
"""A text of which a schema says nothing."""
_PLACES = ("path", "file", "dir", "folder", "cwd")
"""Parts of the name of a property that is a place in the workspace."""
_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "uri": "https://example.org/",
    "email": "nobody@example.org",
    "uuid": "00000000-0000-0000-0000-000000000000",
}
_MOST_CHARACTERS = 4096
_MOST_ITEMS = 256
"""Limits of a text and a list for which a schema wants more. A list within another value has
fewer."""
_DEEPEST = 16
"""Nested values and references that are followed. Only a schema that has no finite value has
more."""


def example(
    schema: Any,
    name: str = "",
    root: Any = None,
    depth: int = 0,
) -> Any:
    """Return a small value of a JSON schema: only what is required, the first of several choices.

    `name` is the property that the value is for. References (`#/...`) are resolved in `root`, by
    default the schema. Patterns are not followed: a text that needs one may not match. Raises an
    error of any kind for what is no schema.
    """
    root = schema if root is None else root
    if schema is True or depth > _DEEPEST:
        return _WORD

    def within(part: Any, of: str = name) -> Any:
        return example(part, of, root, depth + 1)

    for part in schema.get("allOf", ()):
        schema = _both(schema, _resolved(part, root))
    for key in ("const", "default"):
        if schema.get(key) is not None:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    if "$ref" in schema:
        return within(_resolved(schema, root))
    for key in ("anyOf", "oneOf"):
        if choices := schema.get(key):
            others = [choice for choice in choices if choice.get("type") != "null"]
            return within({**schema, key: None, **(others or choices)[0]})
    match _type(schema):
        case "object":
            properties = schema.get("properties", {})
            required = schema.get("required", ())
            return {key: within(properties.get(key, True), key) for key in required}
        case "array":
            size = min(schema.get("minItems", 0), max(1, _MOST_ITEMS >> 2 * depth))
            return [within(schema.get("items", True))] * size
        case "integer":
            return int(_number(schema))
        case "number":
            return _number(schema)
        case "boolean":
            return False
        case "null":
            return None
    return _text(schema, name)


def _both(schema: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of the values that match two."""
    both = {**schema, **other}
    required = [*schema.get("required", ()), *other.get("required", ())]
    if required:
        both["required"] = required
        both["properties"] = {**schema.get("properties", {}), **other.get("properties", {})}
    return both


def _text(schema: Mapping[str, Any], name: str) -> str:
    text = _WORD
    if any(place in name.lower() for place in _PLACES):
        text = "."
    text = _FORMATS.get(schema.get("format", ""), text)
    text = text.ljust(min(schema.get("minLength", 0), _MOST_CHARACTERS), "o")
    return text[: schema.get("maxLength")]


def _type(schema: Mapping[str, Any]) -> str:
    """Return the first type that a schema allows, null last. Guessed when it has none."""
    guessed = "string"
    if "properties" in schema or "required" in schema:
        guessed = "object"
    elif "items" in schema:
        guessed = "array"
    kinds = schema.get("type", guessed)
    if isinstance(kinds, str):
        return kinds
    for kind in kinds:
        if kind != "null":
            return str(kind)
    return "null"


def _resolved(schema: Any, root: Any) -> Any:
    """Return the part of `root` to which a local reference points, or a schema without a
    reference."""
    found = schema
    if reference := schema.get("$ref"):
        found = root
        for step in reference.removeprefix("#").strip("/").split("/"):
            found = found[step.replace("~1", "/").replace("~0", "~")] if step else found
    return found


def _number(schema: Mapping[str, Any]) -> int | float:
    """Return the number next to 1 within the bounds of a schema."""
    least: int | float = max(1, schema.get("minimum", 1), schema.get("exclusiveMinimum", 0) + 1)
    most: int | float = min(
        schema.get("maximum", least),
        schema.get("exclusiveMaximum", least + 1) - 1,
    )
    return min(least, most)
