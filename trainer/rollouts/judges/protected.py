"""The judge's own part of a workspace: its tests, the scripts that its command starts, and its settings.

Files and programs that a judge's command line names are found by its words. The agent's changes to the judge's files
are not applied, and while the agent's code runs, the files are read-only or watched.
"""

import configparser
import os
import posixpath
import re
import shlex
import stat
import tomllib
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from rolltap.trainer.rollouts.judges.changes import Changes
from rolltap.trainer.rollouts.judges.folders import Refusal, opened, parents, read_file, scan
from rolltap.trainer.rollouts.runtimes.runtime import Mount
from rolltap.trainer.tasks.content import PLANTED, SETTINGS, SHADOWS, STARTUP, TEST_FILES, is_shadow, matches
from rolltap.trainer.tasks.task import CommandJudge, PytestJudge, PythonJudge, Task

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


OneJudge = CommandJudge | PytestJudge | PythonJudge
"""A judge that looks at a workspace."""

_MAX_SETTINGS_BYTES = 1 << 20


def select(
    changes: Changes, spec: OneJudge, tests: Collection[str], workdir: str, start: Path, workspace: Path
) -> Changes:
    """Return the changes that are applied for a judge; the others are refused in it.

    `tests` are the paths of the task's own tests. For a judge that runs a program, what would run in it without being a
    part of the solution (`PLANTED`) is refused too. Files of the start that its command names, and the start's test
    files, are applied only if `paths` names them; new test files are not applied for pytest.
    """
    tests_folders = {parent for path in tests for parent in parents(path)}
    refused: dict[str, Refusal] = {}
    for path in [*changes.changed, *changes.deleted]:
        entry = changes.changed.get(path)
        is_folder = entry is not None and entry.kind == "folder"
        if (
            path in tests
            or any(parent in tests for parent in parents(path))
            or (not is_folder and path in tests_folders and entry is not None)
            or (spec.paths is not None and not is_folder and not matches(path, spec.paths))
            or matches(path, spec.protect)
        ):
            refused[path] = "protected"
        elif isinstance(spec, PytestJudge | CommandJudge):
            refused |= _refuse_for_program(path, changes, spec, workdir, start, workspace)
    stays = (path for path, why in refused.items() if why == "protected" and path not in changes.added)
    kept = {parent for path in stays for parent in parents(path)}
    replaced = (path for path in kept if path in changes.changed and changes.changed[path].kind != "folder")
    refused.update(dict.fromkeys(replaced, "protected"))
    return changes.without(refused)


def _refuse_for_program(
    path: str, changes: Changes, spec: PytestJudge | CommandJudge, workdir: str, start: Path, workspace: Path
) -> dict[str, Refusal]:
    for_pytest = isinstance(spec, PytestJudge) or runs_pytest(spec.command)
    added = path in changes.added
    entry = changes.changed.get(path)
    shadows = is_shadow(path, is_folder=entry is not None and entry.kind == "folder") or matches(path, SHADOWS)
    if matches(path.lower(), PLANTED if for_pytest else STARTUP) or (added and shadows):
        return {path: "planted"}
    if spec.paths is None or not matches(path, spec.paths):
        if matches(path, TEST_FILES) and (for_pytest or not added):
            return {path: "protected"}
        if not added and is_script(path, spec.command, workdir):
            return {path: "protected"}
    if for_pytest and matches(path, SETTINGS):
        before, after = (read_file(folder, path, _MAX_SETTINGS_BYTES) for folder in (start, workspace))
        if pytest_settings(path, before) != pytest_settings(path, after):
            return {path: "settings"}
    return {}


def pytest_settings(path: str, content: bytes | None) -> object:
    """Return what a file of settings says about pytest; None when nothing. What cannot be read equals nothing else."""
    if content is None:
        return None
    try:
        text = content[:_MAX_SETTINGS_BYTES].decode()
        if path.endswith(".toml"):
            return tomllib.loads(text).get("tool", {}).get("pytest")
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text)
    except (ValueError, configparser.Error, AttributeError, RecursionError):
        return object()
    sections = [name for name in parser.sections() if name in ("pytest", "tool:pytest")]
    return {name: dict(parser[name]) for name in sections} or None


def own_files(start: Path, task: Task, spec: OneJudge) -> set[str]:
    """Return the files of a start that are the judge's own: its tests, and those that its command names."""
    if not isinstance(spec, PytestJudge | CommandJudge):
        return set()
    names = {posixpath.basename(word) for word in _words(tuple(spec.command))}
    return {
        path
        for path, entry in scan(start).entries.items()
        if entry.kind == "file"
        and (spec.paths is None or not matches(path, spec.paths))
        and (matches(path, TEST_FILES) or posixpath.basename(path) in names)
    }


Stamp = tuple[int, int, int]
"""Inode, size, and time of the last change in nanoseconds, which no program can set."""

_CODE = (".py", ".js", ".ts", ".mjs", ".cjs", ".jsx", ".tsx", ".sh")
"""Ends of the names of files that no test writes; tests write data."""
_MAX_MOUNTS = 200


def judges_files(start: Path, workspace: Path, spec: OneJudge, laid: Collection[str], workdir: str) -> list[str]:
    """Return the paths of the judge's own files of code in a prepared workspace, the task's `laid` tests first.

    The start's tests are among them, unless the judge has mounts: it brings tests then, and may replace those.
    """
    if not isinstance(spec, PytestJudge | CommandJudge):
        return []
    brings_tests = isinstance(spec, CommandJudge) and bool(spec.mounts)
    entries = scan(workspace).entries
    first = sorted(path for path in laid if path in entries)
    named = [
        path
        for path in scan(start).entries
        if path in entries
        and path not in laid
        and (spec.paths is None or not matches(path, spec.paths))
        and (is_script(path, spec.command, workdir) or (not brings_tests and matches(path, TEST_FILES)))
    ]
    named.sort(key=lambda path: not is_script(path, spec.command, workdir))
    return [path for path in [*first, *named] if path.endswith(_CODE) and entries[path].kind == "file"]


def read_only(workspace: Path, workdir: str, paths: Iterable[str]) -> list[Mount]:
    """Return mounts that show files read-only in a box: the first 200, the others can be changed.

    Their folders are mounts too: the folder of a mount can be renamed, a mount cannot.
    """
    chosen = list(paths)[:_MAX_MOUNTS]
    folders = {parent for path in chosen for parent in parents(path)}
    mounts = [Mount(workspace / folder, f"{workdir}/{folder}", writable=True) for folder in sorted(folders)]
    return mounts + [Mount(workspace / path, f"{workdir}/{path}") for path in chosen]


def stamp(workspace: Path, path: str) -> Stamp | None:
    """Return a file's stamp, which differs after every change of the file; None when it is gone."""
    parent, _, name = path.rpartition("/")
    try:
        with opened(workspace, parent) as folder:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_ctime_ns) if stat.S_ISREG(status.st_mode) else None
