"""The tool calls of a session, of any harness -> the commands that it ran and the tools that it used."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rolltap.trainer.rollouts.suspicions.shell import (
    INTERPRETERS,
    SHELLS,
    Words,
    commands,
    commands_of_code,
    is_code,
    program,
    written_files,
)

_TEXTS = frozenset(
    {
        *("content", "contents", "file_text", "new_string", "new_str", "old_string", "old_str", "newString"),
        *("oldString", "newText", "oldText", "insert_text", "text", "patch", "diff", "description", "explanation"),
        *("thought", "reasoning", "prompt", "message", "query", "plan", "todos", "title", "summary", "justification"),
        *("pattern", "regex", "instruction", "goal", "response", "answer"),
    }
)
"""Keys of arguments whose text is written, searched for or told: it is no command and no path."""
_PATCH = "*** Begin Patch"
_ADDED = re.compile(r"^\*\*\* (?:Add|Update) File: (.+)$", re.MULTILINE)
_DEEPEST = 20
"""Most levels of lists and objects in arguments that are read."""
_PATHS = ("file_path", "path", "filePath", "absolute_path", "filename", "file")


@dataclass(slots=True)
class Acts:
    """The deeds of a session's tool calls, as far as their arguments say them.

    Attributes:
        commands: Simple commands, each a list of words. The path of a tool for files is the command `open PATH`.
        tools: Names of the tools, one for each call.
        written: Name of a file without its folder -> the text that was last written to it.
    """

    commands: list[Words] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> Iterator[str]:
        """All words of all commands."""
        return (word for words in self.commands for word in words)


def read_acts(replies: Iterable[dict[str, Any] | None]) -> Acts:
    """Return the acts of a session from the replies of its calls, in their order: `Call.parsed_reply`.

    A script that a tool call writes and a later one runs is read too.
    """
    acts = Acts()
    for reply in replies:
        for call in (reply or {}).get("tool_calls") or []:
            function = call.get("function") or {}
            acts.tools.append(str(function.get("name", "")))
            _read(_parsed(function.get("arguments")), acts)
    return acts


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _read(value: Any, acts: Acts, depth: int = 0) -> None:
    """Add the commands and the written files of a call's arguments, or of a part of them."""
    if depth > _DEEPEST:
        return
    if isinstance(value, str):
        _read_text(value, acts)
    elif isinstance(value, list):
        if value and all(isinstance(item, str) for item in value):
            _read_argv(value, acts)
        else:
            for item in value:
                _read(item, acts, depth + 1)
    elif isinstance(value, dict):
        texts = [text for key, text in value.items() if key in _TEXTS and isinstance(text, str)]
        if texts and (path := next((value[key] for key in _PATHS if isinstance(value.get(key), str)), None)):
            acts.written[PurePosixPath(path).name] = "\n".join(texts)
        for key, item in value.items():
            if key in _PATHS and isinstance(item, str):
                acts.commands.append(["open", item])
            elif key not in _TEXTS or isinstance(item, list | dict):
                _read(item, acts, depth + 1)


def _read_argv(argv: list[str], acts: Acts) -> None:
    if program(argv) in SHELLS and len(argv) > 2:
        _read_text(argv[-1], acts)  # `bash -lc TEXT`
    elif argv[0] == "apply_patch":
        _read_text(argv[-1], acts)
    else:
        acts.commands.append(argv)


def _read_text(text: str, acts: Acts) -> None:
    if text.lstrip().startswith(_PATCH):
        parts = _ADDED.split(text)
        for path, body in zip(parts[1::2], parts[2::2], strict=True):
            added = "\n".join(line[1:] for line in body.splitlines() if line.startswith("+"))
            acts.written[PurePosixPath(path.strip()).name] = added
        return
    acts.written.update(written_files(text))
    for words in commands(text):
        acts.commands.append(words)
        acts.commands += _commands_of_scripts(words, acts.written)


def _commands_of_scripts(words: Words, written: dict[str, str]) -> Iterator[Words]:
    """Yield the commands of a script that the session wrote, when this command runs it."""
    name = program(words)
    runs_scripts = name in SHELLS or INTERPRETERS.fullmatch(name)
    for word in words[1:2] if runs_scripts else words[:1]:
        script = PurePosixPath(word).name
        if script in written:
            text = written[script]
            yield from commands_of_code(text) if is_code(script, text) else commands(text)
