"""The commands that a session ran and the tools that it used, from the tool calls of any harness.

Shell text and program text are cut into simple commands. A simple command is the list of its words, its program first:
`cd x && sudo git log | head` has `cd x`, `git log` and `head`. Text that a program gets as a program (`bash -c`,
`python -c`, `$(...)`, a heredoc of an interpreter) has commands of its own. Text that a program only handles
(`grep "git log"`, `echo`, the heredoc of `cat`) has none.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rolltap.trainer.traces.conversations import parsed_arguments

Words = list[str]

SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh", "ash", "busybox"})
INTERPRETERS = re.compile(r"(python|pypy|node|nodejs|perl|ruby|php|deno|bun)[0-9.]*")
_WRAPPERS = re.compile(
    r"sudo|doas|env|time|nohup|nice|ionice|stdbuf|setsid|exec|command|builtin|eval|xargs|timeout|strace|"
    r"!|\{|then|do|else|if|while|until"
)
"""Programs and words of the shell that only start a command."""
_SEPARATORS = ";&|()`\n"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_LITERAL = re.compile(r"\"((?:[^\"\\\n]|\\.)*)\"|'((?:[^'\\\n]|\\.)*)'")
_DEEPEST = 4
"""Most levels of programs in programs that are read."""
_LONGEST_TEXT = 50_000
"""Most characters of one text that are read: reading takes time, and an agent chooses the text."""
_LONGEST_WORD = 4096
"""Most characters of a word or a line of code that are read: as many as a path may have on Linux."""


def program(words: Sequence[str]) -> str:
    """Return the name of a command's program without its folder."""
    return PurePosixPath(words[0]).name if words else ""


def commands(text: str, depth: int = 0) -> Iterator[Words]:
    """Yield the simple commands of shell text, those of nested programs included."""
    if depth >= _DEEPEST:
        return
    lines = []
    for line, body in _split_heredocs(text[:_LONGEST_TEXT]):
        lines.append(line)
        if body is not None:
            yield from _of_heredoc(line, body, depth)
    for words in map(_unwrapped, _simple("\n".join(lines))):
        if not words:
            continue
        name = program(words)
        flag = next((i for i, word in enumerate(words) if re.fullmatch(r"-[a-z]*[ce]", word)), len(words))
        runs_text = name in SHELLS or bool(INTERPRETERS.fullmatch(name))
        yield [word[:_LONGEST_WORD] for word in (words[: flag + 1] if runs_text else words)]
        if runs_text and name in SHELLS:
            yield from commands(" ".join(words[flag + 1 :]), depth + 1)
        elif runs_text:
            yield from commands_of_code(" ".join(words[flag + 1 : flag + 2]), depth + 1)
        else:
            for word in words:
                for inside in _SUBSTITUTION.findall(word):
                    yield from commands("".join(inside), depth + 1)


def commands_of_code(code: str, depth: int = 0) -> Iterator[Words]:
    """Yield the commands that the text literals of a program may be: those of one line are taken together."""
    for line in code.splitlines():
        if literals := ["".join(found) for found in _LITERAL.findall(line[:_LONGEST_WORD])]:
            yield from commands(" ".join(literals), depth + 1)


def written_files(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file that shell text writes from a heredoc (`cat > NAME <<EOF`)."""
    for line, body in _split_heredocs(text):
        target = re.search(r">\s*([^\s|;&<>]+)", line) or re.search(r"\btee\s+(?:-a\s+)?([^\s|;&<>]+)", line)
        if body is not None and target:
            yield PurePosixPath(target[1].strip("'\"")).name, body


def _commands_of_script(name: str, text: str) -> Iterator[Words]:
    """Yield the commands of a script, of a shell or of another interpreter."""
    shebang = re.match(r"#!.*\b(python|node|perl|ruby)", text)
    is_code = re.search(r"\.(py|js|mjs|cjs|ts|pl|rb|php)$", name) or shebang
    return commands_of_code(text) if is_code else commands(text)


def _split_heredocs(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield each line of shell text, and the heredoc that follows it or None. One without an end is none: `1 << 2`."""
    lines = text.splitlines()
    last = {line.strip(): i for i, line in enumerate(lines)}
    i = 0
    while i < len(lines):
        line, i = lines[i], i + 1
        start = _HEREDOC.search(line[:_LONGEST_WORD])
        if start is None or last.get(start[2], -1) < i:
            yield line, None
        else:
            end = next(n for n in range(i, len(lines)) if lines[n].strip() == start[2])
            yield line[: start.start()] + line[start.end() :], "\n".join(lines[i:end])
            i = end + 1


def _of_heredoc(line: str, body: str, depth: int) -> Iterator[Words]:
    """Yield the commands of a heredoc that a command of the line runs."""
    names = {program(_unwrapped(words)) for words in _simple(line)}
    if names & SHELLS:
        yield from commands(body, depth + 1)
    elif any(map(INTERPRETERS.fullmatch, names)):
        yield from commands_of_code(body, depth + 1)


def _simple(text: str) -> list[Words]:
    """Return the words between the separators of shell text. Text with an open quote is split at white space."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        tokens = re.findall(r"[;&|()`\n]+|[^\s;&|()`\"']+", text)
    found: list[Words] = [[]]
    for token in tokens:
        if token and set(token) <= set(_SEPARATORS):
            found.append([])
        else:
            found[-1].append(token)
    return [words for words in found if words]


def _unwrapped(words: Words) -> Words:
    """Return a command without the assignments and the programs that only start it."""
    words = list(words)
    while words and ((wraps := _WRAPPERS.fullmatch(program(words))) or _ASSIGNMENT.fullmatch(words[0])):
        words.pop(0)
        while wraps and words and (words[0].startswith("-") or re.fullmatch(r"[0-9.]+[smh]?", words[0])):
            words.pop(0)
    return words


_TEXTS = re.compile(
    r"contents?|file_text|(new|old)(_string|_str|String|Text)|insert_text|text|patch|diff|description|explanation|"
    r"thought|reasoning|prompt|message|query|plan|todos|title|summary|justification|pattern|regex|instruction|goal|"
    r"response|answer"
)
"""Keys of arguments with text that is written, searched for or reported. It is neither a command nor a path."""
_PATCH = "*** Begin Patch"
_ADDED = re.compile(r"^\*\*\* (?:Add|Update) File: (.+)$", re.MULTILINE)
_DEEPEST_ARGUMENTS = 20
"""Most levels of lists and objects in arguments that are read."""
MOST_COMMANDS = 20_000
"""Most commands of a session that are read: an agent chooses how many there are, and every rule looks at each."""
_PATHS = ("file_path", "path", "filePath", "absolute_path", "filename", "file")


@dataclass(slots=True)
class Acts:
    """Commands, tools and written files of a session, as far as the arguments of its tool calls say them.

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

    def add(self, commands: Iterable[Words], *, of_script: bool = False) -> None:
        """Add the commands of one text, up to `MOST_COMMANDS` in all, and of the scripts that they run.

        A script that ran before with the same text is not read again. Nor is one that a script runs.
        """
        for words in commands:
            if len(self.commands) >= MOST_COMMANDS:
                self.left_out += 1
                return
            self.commands.append(words)
            script = None if of_script else _script(words, self.written)
            if script and script not in self._ran:
                self._ran.add(script)
                self.add(_commands_of_script(*script), of_script=True)

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
            _read(parsed_arguments(function.get("arguments")), acts)
    return acts


def _read(value: Any, acts: Acts, depth: int = 0) -> None:
    """Add the commands and the written files of a call's arguments, or of a part of them."""
    if depth > _DEEPEST_ARGUMENTS:
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
        texts = [text for key, text in value.items() if _TEXTS.fullmatch(key) and isinstance(text, str)]
        if texts and (path := next((value[key] for key in _PATHS if isinstance(value.get(key), str)), None)):
            acts.written[PurePosixPath(path).name] = "\n".join(texts)
        for key, item in value.items():
            if key in _PATHS and isinstance(item, str):
                acts.add([["open", item]])
            elif not _TEXTS.fullmatch(key) or isinstance(item, list | dict):
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
