"""Commands that a session ran and tools that it used, from the tool calls of any harness.

Every text that runs is cut into commands, lists of words: `cd x && sudo git log | head` has `cd x`, `git log` and
`head`. Texts that run are arguments of tools, the text of a shell or of another interpreter (`bash -c`, `python -c`, a
heredoc), and a file that the session wrote and then runs. Text that is written, printed or searched for does not run.
"""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from rolltap.trainer.traces.conversations import parsed_arguments

MOST_COMMANDS = 20_000
"""Most commands of a session that are read: an agent chooses how many there are, and every rule looks at each."""
_LONGEST_TEXT = 50_000
"""Most characters of one text that are read: reading takes time, and an agent chooses the text."""
_DEEPEST = 8
"""Most levels of programs in programs, and of lists and objects in arguments, that are read."""
_SHELL = re.compile(r"(ba|da|z|k|a)?sh|busybox|source|\.|eval")
_RUNS_TEXT = re.compile(rf"{_SHELL.pattern}|(python|pypy|node|nodejs|perl|ruby|php|deno|bun)[0-9.]*")
_HANDLES_TEXT = frozenset({"echo", "printf", "grep", "egrep", "fgrep", "rg", "ag"})
"""Programs whose first argument is text that they print or search for."""
_BEFORE = re.compile(
    r"(.*/)?(sudo|env|time|nohup|nice|exec|command|xargs|timeout)|!|\{|then|do|else|if|while|until|"
    r"-.*|[0-9][0-9.]*[smh]?|[A-Za-z_]\w*=(?s:.*)"
)
"""Words before a program: assignments, words of the shell, and programs that only start it, with their options."""
_TOKEN = re.compile(r"""(?:[^\s;&|()`'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+|[;&|()`\n]""", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_TARGET = re.compile(r"(?:>|\btee(?: -a)?) *([^\s<>]+)")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
_TEXTS = re.compile(
    r"(?i)contents?|((new|old|file|insert)_?)?(text|string|str)|patch|diff|description|explanation|thought|reasoning|"
    r"prompt|message|query|plan|todos|title|summary|justification|pattern|regex|instruction|goal|response|answer"
)
"""Keys of arguments with text that is written, searched for or reported. It is neither a command nor a path."""
_PATHS = ("file_path", "path", "filePath", "absolute_path", "filename", "file")


class Command(NamedTuple):
    """Name of a program without its folder, the words before it, and those from it on, as one line each."""

    program: str
    before: str
    line: str


@dataclass(slots=True)
class Acts:
    """Commands and tools of a session, as far as the arguments of its tool calls say them.

    Attributes:
        commands: At most `MOST_COMMANDS`. The path of a tool for files is the command `open PATH`.
        words: All words of all commands.
        tools: Names of the tools, one for each call.
        left_out: Number of texts that were not read to their end, because the session has `MOST_COMMANDS`.
        written: Name of a file without its folder -> its last text, until it runs.
    """

    commands: list[Command] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    left_out: int = 0
    written: dict[str, str] = field(default_factory=dict)

    def run(self, text: str) -> list[str]:
        """Add the commands of shell text, and return the texts that they run."""
        inner = []
        for words in _commands(_quote_heredocs(text[:_LONGEST_TEXT])):
            if len(self.commands) >= MOST_COMMANDS:
                self.left_out += 1
                break
            start = next((i for i, word in enumerate(words) if not _BEFORE.fullmatch(word)), len(words))
            before, words = words[:start], words[start:]
            program = PurePosixPath(words[0]).name if words else ""
            if runs_text := _RUNS_TEXT.fullmatch(program):
                flags = (i for i, word in enumerate(words) if re.fullmatch(r"-[a-z]*[ce]|--eval", word))
                flag = 0 if program == "eval" else next(flags, len(words))
                inner.append(_as_shell(" ".join(words[flag + 1 :]), program))
                words = words[: flag + 1]
            inner += [found.strip("$()`") for word in words for found in _SUBSTITUTION.findall(word)]
            first = next((i for i, word in enumerate(words) if i and not word.startswith("-")), len(words))
            script = PurePosixPath("".join(words[first : first + 1])).name if runs_text else program
            if script in self.written:
                inner.append(_as_shell(self.written.pop(script), program))
            if program in _HANDLES_TEXT:
                words = words[:first] + words[first + 1 :]
            # a word of several lines is no path: it is text that may become a file
            texts, words = [word for word in words if "\n" in word], [word for word in words if "\n" not in word]
            if texts and (target := _TARGET.search(" ".join(words))):
                self.written[PurePosixPath(target[1]).name] = "\n".join(texts)
            self.commands.append(Command(program, " ".join(before), " ".join(words)))
            self.words += before + words
        return inner


def read_acts(replies: Iterable[dict[str, Any] | None]) -> Acts:
    """Return the acts of a session from the replies of its calls, in their order: `Call.parsed_reply`."""
    acts = Acts()
    calls = (call for reply in replies for call in (reply or {}).get("tool_calls") or [])
    for function in (call.get("function") or {} for call in calls):
        arguments = parsed_arguments(function.get("arguments"))
        acts.tools.append(str(function.get("name", "")))
        texts = [*_texts(arguments)]
        for _ in range(_DEEPEST):
            texts = [inner for text in texts for inner in acts.run(text)]
        if isinstance(arguments, dict):
            written = "\n".join(str(text) for key, text in arguments.items() if _TEXTS.fullmatch(key))
            paths = [str(arguments[key]) for key in _PATHS if key in arguments and written]
            acts.written |= {PurePosixPath(path).name: written for path in paths}
    return acts


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the shell texts of arguments, or of a part of them."""
    if isinstance(value, str):
        yield from [] if value.lstrip().startswith("*** Begin Patch") else [value]
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        yield shlex.join(value)
    elif isinstance(value, list | dict) and depth < _DEEPEST:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key in _PATHS and isinstance(item, str):
                yield shlex.join(["open", item])
            elif not _TEXTS.fullmatch(str(key)):
                yield from _texts(item, depth + 1)


def _as_shell(text: str, program: str) -> str:
    """Return a program's text as shell text: code without its quotes, commas and brackets."""
    if _SHELL.fullmatch(program) or re.match(r"#!.*sh\b", text):
        return text
    return re.sub(r"(\w)\s*=\s*", r"\1= ", re.sub(r"(\b[bfru])?[\"']+|[\[\]{},]", " ", text))


def _quote_heredocs(text: str) -> str:
    """Return shell text with heredocs as quoted arguments, `-c TEXT`. One without an end is none: `1 << 2`."""
    kept: list[str] = []
    body: list[str] = []
    start = None
    for line in text.splitlines():
        if start is None:
            kept.append(line)
            start, body = _HEREDOC.search(line), []
        elif line.strip() != start[2]:
            body.append(line)
        else:
            # quotes go: the heredoc may stand within quotes, as in `-m "$(cat <<EOF`
            argument = re.sub("['\"]", " ", "\n".join([*body, ""]))
            kept[-1] = f"{kept[-1][: start.start()]} -c '{argument}' {kept[-1][start.end() :]}"
            start = None
    return "\n".join(kept if start is None else kept + body)


def _commands(text: str) -> list[list[str]]:
    """Return the words between the separators of shell text. An open quote is white space."""
    found: list[list[str]] = [[]]
    for token in _TOKEN.findall(text.replace("\\\n", " ")):
        if token in ";&|()`\n":
            found.append([])
        else:
            found[-1] += shlex.split(token) if re.search(r"['\"\\]", token) else [token]
    return [words for words in found if words]
