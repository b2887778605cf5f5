"""Commands that a session ran and tools that it used, from the tool calls of any harness.

Every text that runs is cut into commands, lists of words: `cd x && sudo git log | head` has `cd x`,
`sudo`, `git log` and `head`. Texts that run are arguments of tools, and what these give to a shell
or another interpreter (`bash -c`, `python -c`, a heredoc): it is cut as if it was shell text. Text
that is written, printed or searched for does not run, and a script that is written first and run
later is not followed: its author has many other ways to hide it.
"""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rolltap.trainer.traces.conversations import parsed_arguments

MOST_COMMANDS = 20_000
"""Most commands of a session that are read: an agent chooses how many there are, and every rule
looks at each."""
_LONGEST_TEXT = 50_000
"""Most characters of one text that are read: reading takes time, and an agent chooses the text."""
_DEEPEST = 8
"""Most levels of programs in programs, and of lists and objects in arguments, that are read."""
_RUNS_TEXT = re.compile(
    r"(.*/)?([abdkz]{0,2}sh|source|\.|eval|(python|pypy|node|perl|ruby|php|deno|bun)[0-9.]*)"
)
_HANDLES_TEXT = re.compile(r"(.*/)?(echo|printf|[ef]?grep|rg|ag)")
"""Programs whose first argument is text that they print or search for."""
_BEFORE = re.compile(
    r"(.*/)?(sudo|env|time|nohup|nice|exec|command|xargs|timeout|busybox)|!|\{|then|do|else|if|while|until|"
    r"-.*|[0-9][0-9.]*[smh]?|[A-Za-z_]\w*=(?s:.*)"
)
"""Words before a program: assignments, words of the shell, and programs that only start it, with
their options."""
_TOKEN = re.compile(r"""(?:[^\s;&|()`'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+|[;&|()`\n]""", re.DOTALL)
_HEREDOC = re.compile(r"(?<!<)<<-?\s*['\"]?([A-Za-z_]\w*)")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
_TEXTS = re.compile(
    r"(?i)contents?|((new|old|file|insert)_?)?(text|string|str)|patch|diff|description|explanation|thought|reasoning|"
    r"prompt|message|query|plan|todos|title|summary|justification|pattern|regex|instruction|goal|response|answer"
)
"""Keys of arguments with text that is written, searched for or reported. It is neither a command
nor a path."""


@dataclass(slots=True)
class Acts:
    """Commands and tools of a session, as far as the arguments of its tool calls say them.

    Attributes:
        commands: One line each, at most `MOST_COMMANDS`. The words before a program are a command
            of their own.
        tools: Names of the tools, one for each call.
        left_out: Number of texts that were not read to their end, because the session has
            `MOST_COMMANDS`.
    """

    commands: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    left_out: int = 0

    def run(self, text: str) -> Iterator[str]:
        """Add the commands of shell text, and yield the texts that they run."""
        for words in _commands(_without_documents(text[:_LONGEST_TEXT])):
            if len(self.commands) >= MOST_COMMANDS:
                self.left_out += 1
                break
            if _RUNS_TEXT.fullmatch(words[0]):
                yield " ".join(words[1:])
                words = words[:1]
            # a word of several lines is a message or a document
            words = [word for word in words if "\n" not in word]
            for word in words:
                for found in _SUBSTITUTION.findall(word):
                    yield found.strip("$()`")
            if words and _HANDLES_TEXT.fullmatch(words[0]):
                arguments = [word for word in words[1:] if not word.startswith("-")]
                words = [words[0], *arguments[1:]]
            self.commands.append(" ".join(words))


def read_acts(replies: Iterable[dict[str, Any] | None]) -> Acts:
    """Return the acts of a session from the replies of its calls, in their order:
    `Call.parsed_reply`."""
    acts = Acts()
    for reply in replies:
        for call in (reply or {}).get("tool_calls") or []:
            function = call.get("function") or {}
            acts.tools.append(str(function.get("name", "")))
            texts = list(_texts(parsed_arguments(function.get("arguments"))))
            for _ in range(_DEEPEST):
                inner: list[str] = []
                for text in texts:
                    inner += acts.run(text)
                texts = inner
    return acts


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the shell texts of arguments, or of a part of them. A path is a command without
    arguments."""
    if isinstance(value, str):
        if not value.lstrip().startswith("*** Begin Patch"):
            yield value
        return
    if isinstance(value, list):
        if value and all(isinstance(item, str) for item in value):
            yield shlex.join(value)
            return
        value = dict(enumerate(value))
    if isinstance(value, dict) and depth < _DEEPEST:
        for key, item in value.items():
            if not _TEXTS.fullmatch(str(key)):
                yield from _texts(item, depth + 1)


def _without_documents(text: str) -> str:
    """Return shell text without heredocs, except those that an interpreter runs."""
    kept: list[str] = []
    end = None
    for line in text.splitlines():
        if line.strip() == end:
            end = None
        elif end is None:
            kept.append(line)
            found = _HEREDOC.search(line)
            if found is not None:
                command = re.split(r"[;&|(]", line[: found.start()])[-1]
                if not any(map(_RUNS_TEXT.fullmatch, command.split())):
                    end = found[1]
    return "\n".join(kept)


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words between the separators of shell text, those before a program apart. An open
    quote is a space."""
    found: list[list[str]] = [[]]
    for token in _TOKEN.findall(text.replace("\\\n", " ")):
        if token in ";&|()`\n":
            found.append([])
        elif re.search(r"['\"\\]", token):
            found[-1] += shlex.split(token)
        else:
            found[-1].append(token)
    for words in found:
        before = list(takewhile(_BEFORE.fullmatch, words))
        if before:
            yield before
        if words[len(before) :]:
            yield words[len(before) :]
