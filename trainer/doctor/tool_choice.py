"""The tool of a program that the scripted model calls: one that does no harm, with arguments that its schema allows."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rolltap.trainer.doctor.example import example

GREETING = "héllo from rolltap"
"""Text that the shell tool prints. Not ASCII: programs that write JSON again escape it otherwise."""
_COMMANDS = ("command", "cmd", "commands", "script", "shell_command")
"""Parameters of a shell tool that hold the command."""
_SHELLS = re.compile(r"bash|(power)?shell|sh|terminal")
"""A word in the name of a shell tool."""
_RUNS = re.compile(r"run|exec|execute|commands?|cmd")
"""The words of a shell tool's name that has none of `_SHELLS`."""
_LOOKS = re.compile(
    r"read|list|ls|get|search|find|view|show|look|lookup|glob|grep|inspect|describe|sum|multiply|calculate|echo"
)
"""The first word in the name of a tool that only looks, or computes."""
_THINGS = re.compile(
    r"web|internet|code|files?|directory|dir|folder|text|weather|forecast|current|date|time|calculator"
)
"""The words beside `_LOOKS` in such a name that begins with a noun, or is one."""
_ACTS = re.compile(
    r"write|edit|create|add|delete|remove|rm|update|insert|append|patch|replace|move|rename|send|post|tweet|submit|"
    r"publish|upload|pay|buy|sell|purchase|charge|refund|cancel|kill|stop|exit|close|shutdown|drop|reset|clear|merge|"
    r"finish|complet(e|ion)|done|final|spawn|(sub)?agent|task|delegate|transfer|handoff|deploy|install|commit|push|ask|"
    r"question|confirm|sleep|wait|schedule|enter|input|skill|and|or|then"
)
"""A word in the name of a tool that may change something, ask a person or end the session; or that a verb follows."""
_ENDS = re.compile(r"finish|submit|done|final_?answer|complete_?task|task_?complete|attempt_?completion", re.I)
"""The name of a tool with which a program ends."""
_TOLD = re.compile(r"message|text|result|output|(final_?)?answer|response|summary|reason|thoughts?|security_risk", re.I)
"""The parameters that such a tool may require."""

Tool = Mapping[str, Any]
"""A tool as the model sees it: `name`, and `parameters`, a JSON schema."""


def shell_call(tools: Sequence[Tool], command: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call that runs `command` in a shell, or None without such a tool.

    A shell tool has words for it and none for an act in its name, and a parameter for the command that is free text.
    """
    for tool in filter(_is_shell, tools):
        parameters = _parameters(tool)
        for name in _COMMANDS:
            schema = parameters["properties"].get(name)
            if not isinstance(schema, Mapping) or "enum" in schema:
                continue
            value: Any = command
            if str(schema.get("type")).lower() == "array":
                value = [command] if name == "commands" else ["sh", "-c", command]
            return tool["name"], {**_arguments(tool), name: value}
    return None


def harmless_call(tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call that a program can be asked for without harm, or None.

    It is of a shell tool, which prints `GREETING`, else of the first tool whose name says that it only looks. The tool
    is called where the program runs, with the user's files and accounts: one with a name that says less gets no call.
    """
    if call := shell_call(tools, f"echo '{GREETING}'"):
        return call
    return next(((tool["name"], _arguments(tool)) for tool in tools if _only_looks(tool)), None)


def ending_call(tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call with which a program ends its session, or None."""
    for tool in tools:
        arguments = _arguments(tool)
        if ends_session(tool["name"]) and all(_TOLD.fullmatch(name) for name in arguments):
            return tool["name"], arguments
    return None


def ends_session(name: str) -> bool:
    """Return True when a tool of this name ends the session of its program."""
    return _ENDS.fullmatch(name) is not None


def _arguments(tool: Tool) -> dict[str, Any]:
    arguments = example(_parameters(tool))
    return arguments if isinstance(arguments, dict) else {}


def _parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which is one of an object with `properties`."""
    schema = tool.get("parameters")
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    return {**schema, "type": "object", "properties": properties if isinstance(properties, Mapping) else {}}


def _is_shell(tool: Tool) -> bool:
    words = _words(tool)
    of_a_shell = any(map(_SHELLS.fullmatch, words)) or all(map(_RUNS.fullmatch, words))
    return bool(words) and of_a_shell and not any(map(_ACTS.fullmatch, words))


def _only_looks(tool: Tool) -> bool:
    words = _words(tool)
    begins = any(map(_LOOKS.fullmatch, words[:1]))
    known = all(_LOOKS.fullmatch(word) or _THINGS.fullmatch(word) for word in words)
    return bool(words) and (begins or known) and not any(map(_ACTS.fullmatch, words))


def _words(tool: Tool) -> list[str]:
    """Return the words of a tool's name in lower case, without the MCP server's: `mcp__fs__readFile` has two."""
    name = re.sub(r"^mcp__.+?__", "", tool["name"])
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
