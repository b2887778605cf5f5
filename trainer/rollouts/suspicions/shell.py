"""Shell text and program text -> the simple commands in it.

A simple command is the list of its words, its program first: `cd x && sudo git log | head` has `cd x`, `git log` and
`head`. Text that a program gets as a program (`bash -c`, `python -c`, `$(...)`, a heredoc of an interpreter) has
commands of its own. Text that a program only handles (`grep "git log"`, `echo`, the heredoc of `cat`) has none.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

Words = list[str]

SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh", "ash", "busybox"})
INTERPRETERS = re.compile(r"(python|pypy|node|nodejs|perl|ruby|php|deno|bun)[0-9.]*")
_WRAPPERS = frozenset(
    [
        "sudo",
        "doas",
        "env",
        "time",
        "nohup",
        "nice",
        "ionice",
        "stdbuf",
        "setsid",
        "exec",
        "command",
        "builtin",
        "eval",
        "xargs",
        "timeout",
        "strace",
        "!",
        "{",
        "then",
        "do",
        "else",
        "if",
        "while",
        "until",
    ]
)
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


def is_code(name: str, text: str) -> bool:
    """Return True for a program text that is not for a shell."""
    first = text.split("\n", 1)[0]
    return bool(
        re.search(r"\.(py|js|mjs|cjs|ts|pl|rb|php)$", name) or re.match(r"#!.*\b(python|node|perl|ruby)", first)
    )


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
    while words and (program(words) in _WRAPPERS or _ASSIGNMENT.fullmatch(words[0])):
        wrapper = program(words)
        words.pop(0)
        while wrapper in _WRAPPERS and words and (words[0].startswith("-") or re.fullmatch(r"[0-9.]+[smh]?", words[0])):
            words.pop(0)
    return words
