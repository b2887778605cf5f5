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
MOST_COMMANDS = 20_000
"""Most commands of a session that are read: an agent chooses how many there are, and every rule looks at each."""
_PATHS = ("file_path", "path", "filePath", "absolute_path", "filename", "file")


@dataclass(slots=True)
class Acts:
    """The deeds of a session's tool calls, as far as their arguments say them.

    Attributes:
        commands: Simple commands, each a list of words. The path of a tool for files is the command `open PATH`.
        tools: Names of the tools, one for each call.
        written: Name of a file without its folder -> the text that was last written to it.
        left_out: Number of texts and scripts that were not read to their end, because the session has `MOST_COMMANDS`.
    """

    commands: list[Words] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    _ran: set[tuple[str, str]] = field(default_factory=set)
    """Name and text of each script that was read."""

    def add(self, commands: Iterable[Words]) -> None:
        """Add the commands of one text, as far as there is room."""
        for words in commands:
            if len(self.commands) >= MOST_COMMANDS:
                self.left_out += 1
                return
            self.commands.append(words)
            if script := _script(words, self.written):
                self.add_script(*script)

    def add_script(self, name: str, text: str) -> None:
        """Add the commands of a script that runs. One that ran before with the same text is not read again."""
        if (name, text) in self._ran:
            return
        self._ran.add((name, text))
        for words in commands_of_code(text) if is_code(name, text) else commands(text):
            if len(self.commands) >= MOST_COMMANDS:
                self.left_out += 1
                return
            self.commands.append(words)

    @property
    def words(self) -> Iterator[str]:
        """All words of all commands."""
        return (word for words in self.commands for word in words)


def read_acts(replies: Iterable[dict[str, Any] | None]) -> Acts:
    """Return the acts of a session from the replies of its calls, in their order: `Call.parsed_reply`.

    A script that a tool call writes and a later one runs is read too, once for each text that it has had.
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
                acts.add([["open", item]])
            elif key not in _TEXTS or isinstance(item, list | dict):
                _read(item, acts, depth + 1)


def _read_argv(argv: list[str], acts: Acts) -> None:
    if program(argv) in SHELLS and len(argv) > 2:
        _read_text(argv[-1], acts)  # `bash -lc TEXT`
    elif argv[0] == "apply_patch":
        _read_text(argv[-1], acts)
    else:
        acts.add([argv])


def _read_text(text: str, acts: Acts) -> None:
    if text.lstrip().startswith(_PATCH):
        parts = _ADDED.split(text)
        for path, body in zip(parts[1::2], parts[2::2], strict=True):
            added = "\n".join(line[1:] for line in body.splitlines() if line.startswith("+"))
            acts.written[PurePosixPath(path.strip()).name] = added
        return
    acts.written.update(written_files(text))
    acts.add(commands(text))


def _script(words: Words, written: dict[str, str]) -> tuple[str, str] | None:
    """Return name and text of the script that a command runs, when the session wrote it."""
    name = program(words)
    runs_scripts = name in SHELLS or INTERPRETERS.fullmatch(name)
    for word in words[1:2] if runs_scripts else words[:1]:
        script = PurePosixPath(word).name
        if script in written:
            return script, written[script]
    return None
