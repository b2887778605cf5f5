"""The words of a judge's command: the files that it names, and whether it runs pytest."""

import posixpath
import re
import shlex
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

_PYTEST = re.compile(r"(.*/)?(pytest|py\.test)(-3)?")
_SHELL = re.compile(r"(.*/)?(ba|da|z|k|a)?sh")
_SPECIAL = frozenset("|&;<>()$`\\*?[]#~=%!{}\n")
"""Characters that mean more to a shell than themselves, outside of quotes."""


@lru_cache(maxsize=1024)
def _words(command: tuple[str, ...]) -> frozenset[str]:
    """Return the arguments, and the words of those that hold several, as a shell's text does."""
    found = set(command)
    for argument in command:
        if re.search(r"[\s;|&<>()]", argument):
            lexer = shlex.shlex(argument, posix=True, punctuation_chars=True)
            lexer.commenters = ""
            try:
                found |= {*lexer}
            except ValueError:
                found |= {*re.split(r"[\s;|&<>()'\"]+", argument)}
    return frozenset(found)


@lru_cache(maxsize=1024)
def _named(command: tuple[str, ...], workdir: str) -> frozenset[str]:
    words = _words(command)
    paths = {*words, *(word.partition("=")[2] for word in words), *(word.partition("::")[0] for word in words)}
    named = set()
    for path in filter(None, paths):
        inside = posixpath.normpath(path)
        named.add(posixpath.relpath(inside, workdir) if inside.startswith("/") else inside)
    if "-m" in words:
        for word in words:
            module = word.replace(".", "/")
            named |= {f"{module}.py", f"{module}/__main__.py"}
    return frozenset(named)


def is_named(path: str, command: Sequence[str], workdir: str) -> bool:
    """Return True if a command names a file of the workspace: in an argument, in a shell's text, or as a module."""
    return path in _named(tuple(command), workdir)


def runs_pytest(command: Sequence[str]) -> bool:
    """Return True if a word of a command is pytest."""
    return any(_PYTEST.fullmatch(word) for word in _words(tuple(command)))


def pytest_command(command: Sequence[str]) -> list[str] | None:
    """Return a command that is pytest itself and writes no report of its own, None for another one.

    Arguments of pytest can be added at its end. A shell that only starts pytest is left out.
    """
    words = list(command)
    if len(words) == 3 and _SHELL.fullmatch(words[0]) and words[1] in ("-c", "-lc", "-ec"):
        if _SPECIAL & {*words[2]}:
            return None
        try:
            words = shlex.split(words[2])
        except ValueError:
            return None
    if any(word.startswith(("--junit-xml", "--junitxml")) for word in words) or not words:
        return None
    by_module = any(pair == ("-m", "pytest") for pair in pairwise(words))
    return words if by_module or _PYTEST.fullmatch(words[0]) else None
