"""The tool of a program that the scripted model calls: one that does no harm, with arguments that its schema allows."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rolltap.trainer.doctor.example import example

GREETING = "héllo from rolltap"
"""Text that the shell tool prints. Not ASCII: programs that write JSON again escape it otherwise."""
_COMMANDS = ("command", "cmd", "commands", "script", "shell_command")
"""Parameters of a shell tool that hold the command."""
_SHELLS = re.compile(r"bash|(power)?shell|sh|exec|execute|run|terminal|commands?|cmd")
"""A word in the name of a shell tool."""
_READS = re.compile(
    r"read|list|ls|get|search|find|view|show|look|lookup|glob|grep|fetch|query|count|current|check|inspect|add|sum|"
    r"multiply|calculat(e|or)|compute|weather|time|date|echo"
)
"""A word in the name of a tool that only looks, or computes."""
_ACTS = re.compile(
    r"write|edit|create|delete|remove|update|insert|append|patch|replace|move|rename|send|post|submit|publish|upload|"
    r"pay|buy|cancel|kill|stop|exit|finish|complet(e|ion)|done|final|spawn|(sub)?agent|task|delegate|transfer|handoff|"
    r"deploy|install|commit|push|ask|question|confirm|sleep|wait|schedule|enter|input|skill"
)
"""A word in the name of a tool that may change something outside of the program, ask a person or end the session."""
_ENDS = re.compile(r"finish|submit|done|final_?answer|complete_?task|task_?complete|attempt_?completion", re.I)
"""The name of a tool with which a program ends."""

Tool = Mapping[str, Any]
"""A tool as the model sees it: `name`, and `parameters`, a JSON schema."""


def shell_call(tools: Sequence[Tool], command: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call that runs `command` in a shell, or None without such a tool.

    A shell tool has a word for it in its name, and a parameter for the command that is free text.
    """
    for tool in tools:
        parameters = _parameters(tool)
        for name in _COMMANDS:
            schema = (parameters.get("properties") or {}).get(name)
            if not (_has(tool, _SHELLS) and isinstance(schema, Mapping)) or "enum" in schema:
                continue
            value: Any = command
            if str(schema.get("type")).lower() == "array":
                value = [command] if name == "commands" else ["sh", "-c", command]
            return tool["name"], {**example(parameters), name: value}
    return None


def harmless_call(tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call that a program can be asked for without harm, or None.

    In this order: a shell tool, which prints `GREETING`; a tool whose name says that it only looks; one whose name says
    nothing of it. A tool whose name says that it acts is never called.
    """
    if call := shell_call(tools, f"echo '{GREETING}'"):
        return call
    quiet = [tool for tool in tools if not _has(tool, _ACTS)]
    for tool in sorted(quiet, key=lambda tool: not _has(tool, _READS)):  # stable: the first of equals
        return tool["name"], example(_parameters(tool))
    return None


def ending_call(tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the arguments of a call with which a program ends its session, or None."""
    for tool in tools:
        if _ENDS.fullmatch(tool["name"]):
            return tool["name"], example(_parameters(tool))
    return None


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool.get("parameters")
    return {"type": "object", **parameters} if isinstance(parameters, Mapping) else {"type": "object"}


def _has(tool: Tool, word: re.Pattern[str]) -> bool:
    """Return True when a word of a tool's name matches. `run_shell_command` and `mcp__fs-readFile` have several."""
    return any(word.fullmatch(part.lower()) for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", tool["name"]))
