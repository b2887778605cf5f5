"""The words of a judge's command: the scripts that it starts, and whether it runs pytest."""

import posixpath
import re
import shlex
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

_PYTEST = re.compile(r"(.*/)?(pytest|py\.test)(-3)?")
_SHELL = re.compile(r"(.*/)?(ba|da|z|k|a)?sh")
_INTERPRETER = re.compile(r"(.*/)?(python[0-9.]*|(ba|da|z|k|a)?sh|node|ruby|perl)")
_BEFORE_A_COMMAND = frozenset([";", "&&", "||", "|", "&", "(", "!", "then", "do", "else", "exec"])
_SPECIAL = frozenset("|&;<>()$`\\*?[]#~=%!{}\n")
"""Characters that mean more to a shell than themselves, outside of quotes."""


@lru_cache(maxsize=1024)
def _words(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments. In place of a shell's text there are its words, and its operators between them."""
    found: list[str] = []
    for argument in command:
        if found and found[-1].startswith("-") and found[-1].endswith("c") and _SHELL.fullmatch(found[0]):
            lexer = shlex.shlex(argument, posix=True, punctuation_chars=True)
            lexer.commenters = ""
            try:
                found += [";", *lexer]
            except ValueError:
                found += [";", *re.split(r"[\s;|&<>()'\"]+", argument)]
        else:
            found.append(argument)
    return tuple(found)


@lru_cache(maxsize=1024)
def _scripts(command: tuple[str, ...], workdir: str) -> frozenset[str]:
    words = _words(command)
    named: set[str] = set()
    for number, word in enumerate(words):
        begins = number == 0 or words[number - 1] in _BEFORE_A_COMMAND or words[number - 1].endswith("env")
        if begins and "/" in word:
            named.add(word)
        if _INTERPRETER.fullmatch(word):
            rest = list(words[number + 1 :])
            while rest and rest[0].startswith("-") and rest[0] != "-m":
                del rest[0]
            if rest[:1] == ["-m"]:
                module = "".join(rest[1:2]).replace(".", "/")
                named |= {f"{module}.py", f"{module}/__main__.py"}
            else:
                named |= {*rest[:1]}
    paths = {posixpath.normpath(path) for path in named if path}
    return frozenset(posixpath.relpath(path, workdir) if path.startswith("/") else path for path in paths)


def is_script(path: str, command: Sequence[str], workdir: str) -> bool:
    """Return True if a command starts a file of the workspace: as a program, as an interpreter's script or module.

    A file that it only reads is not one: the agent's result may be there.
    """
    return path in _scripts(tuple(command), workdir)


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
