"""The judge's own part of a workspace: its tests and scripts, and the settings of the programs that
it runs.

Own are the files of the start that the judge's command names, tests by the usual names, files that
`fail_to_pass` and `files` of the judge list, and settings of test runners; `planted` adds the new
paths that a runner would take in place of these. They come from the start, are read-only while the
judge runs where a runtime can do that, and are compared afterwards. Commands are searched for names
and not parsed: a shell's text may spell a program in any way.

`paths` of the judge turns it round: what a pattern of it matches is the agent's, and nothing else
is applied.
"""

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from rolltap.trainer.beneath import opened_parent
from rolltap.trainer.boxes.runtime import Mount
from rolltap.trainer.judges.changes import loads_by_itself
from rolltap.trainer.judges.folders import parents, read_file, scan
from rolltap.trainer.tasks.content import RUNNER_FILES, TEST_FILES, matches
from rolltap.trainer.tasks.task import (
    CommandJudge,
    Judge,
    LLMJudge,
    PytestJudge,
    PythonJudge,
    SeveralJudges,
    Task,
)

OneJudge = CommandJudge | PytestJudge | PythonJudge
"""A judge that looks at a workspace."""
Stamp = tuple[int, int, int]
"""Inode, size, and time of the last change in nanoseconds, which no program can set."""

MAX_SCRIPT_BYTES = 1 << 20
_MAX_MOUNTS = 200
_MODULE = re.compile(r"(?:^|\s)-m\s*([\w.]+)")
_FOLDER_OF_PYTHON = re.compile(r"python[\d.]*\"?(?:\s+-\w+)*\s+([\w./-]+)")
_UNITTEST = re.compile(r"(?:^|\s)-m\s*unittest\b([^;&|\n]*)")
_FILE_NAME = re.compile(r"(?<![\w-])[\w-]*\.\w[\w-]*")
_NODE_FILE = re.compile(r".*\.[cm]?[jt]sx?")
_NODE_TEST = re.compile(r"(?:.*[._-](?:test|spec)|test(?:-.*)?)\.[cm]?[jt]sx?")


def judges_of(judge: Judge) -> Iterator[OneJudge | LLMJudge]:
    """Yield the judge, or each of several."""
    if isinstance(judge, SeveralJudges):
        for one in judge.judges:
            yield from judges_of(one.judge)
    else:
        yield judge


def runs_pytest(spec: CommandJudge) -> bool:
    """Return True if the text of a judge's command names pytest."""
    command = " ".join(spec.command)
    return is_named("pytest", command) or is_named("py.test", command)


class OwnRules:
    """The rules by which a path is the judge's own, by the keys of the judge alone.

    Attributes:
        paths: Patterns of what the agent is to change.
        command: Text of the judge's command.
    """

    def __init__(self, spec: OneJudge) -> None:
        self.paths = spec.paths or []
        self.command = "" if isinstance(spec, PythonJudge) else " ".join(spec.command)
        self._patterns = (*TEST_FILES, *spec.files)
        self._tests: set[str] = set()
        if isinstance(spec, PytestJudge):
            for name in (*spec.fail_to_pass, *spec.pass_to_pass):
                self._tests.add(name.partition("::")[0])

    def is_agents(self, path: str) -> bool:
        """Return True for a path that the agent is to change. Of settings and plugins the whole
        path must be given."""
        if path in self.paths:
            return True
        return matches(path, self.paths) and not loads_by_itself(path)

    def is_listed(self, path: str) -> bool:
        """Return True for a path that is own by its name alone, whatever the command says."""
        if path in self._tests or matches(path, self._patterns):
            return True
        return matches(path.lower(), RUNNER_FILES)

    def is_own(self, path: str) -> bool:
        """Return True for a path of a start that is the judge's."""
        if self.is_agents(path):
            return False
        return self.is_listed(path) or is_node_test(path) or is_named(path, self.command)


def is_node_test(path: str) -> bool:
    """Return True for a file that test runners of Node run by its name alone."""
    *folders, name = path.split("/")
    if not _NODE_FILE.fullmatch(name):
        return False
    return "test" in folders or "spec" in folders or bool(_NODE_TEST.fullmatch(name))


def is_named(path: str, text: str) -> bool:
    """Return True if a path, or its end, stands in a text between characters that are no part of a
    name.

    A name of four characters is looked for without its folder too: `run.sh` is in any folder,
    `tools/run.sh` in one.
    """
    name = path.rpartition("/")[2]
    if name in text:
        pattern = rf"(?<![\w.-])(?:[\w.-]+/)*{re.escape(name)}(?![\w-]|\.\w)"
        for found in re.finditer(pattern, text):
            word = "/".join(part for part in found[0].split("/") if part not in (".", ".."))
            ends_with_word = len(name) >= 4 and path.endswith(word)
            if word == path or word.endswith(f"/{path}") or ends_with_word:
                return True
    return path in _programs(text)


@lru_cache(maxsize=64)
def _programs(text: str) -> frozenset[str]:
    """Return the files that Python runs when a command gives it a module, or a folder."""
    found: set[str] = set()
    for module in _MODULE.findall(text):
        place = module.replace(".", "/")
        found |= {f"{place}.py", f"{place}/__main__.py"}
    for folder in _FOLDER_OF_PYTHON.findall(text):
        found.add(os.path.normpath(f"{folder}/__main__.py"))
    return frozenset(found)


def own_files(start: Path, spec: OneJudge) -> set[str]:
    """Return the paths of the judge's own files in a start, relative and with `/`."""
    rules = OwnRules(spec)
    there = scan(start).files
    own = {path for path in there if rules.is_own(path)}
    for path in _units(rules.command, set(there)):
        if not rules.is_agents(path):
            own.add(path)
    return own


def _units(command: str, there: Collection[str]) -> Iterator[str]:
    """Yield the files of the modules that `python -m unittest` is given, also before a class and a
    method."""
    words = " ".join(_UNITTEST.findall(command))
    for name in words.replace(".py", "").replace(".", "/").split():
        for part in (name, *parents(name)):
            module = {f"{part}.py", f"{part}/__init__.py"}.intersection(there)
            if module:
                yield from module
                break


def reachable_files(start: Path, spec: OneJudge) -> list[str]:
    """Return the files of a start that the judge's own files name and an agent could change; none
    with `paths`."""
    if spec.paths is not None:
        return []
    own = own_files(start, spec)
    text = read_texts(start, own)
    return sorted(path for path in scan(start).files if path not in own and is_named(path, text))


def read_texts(folder: Path, paths: Iterable[str]) -> str:
    """Return the begin of each file, one after the other."""
    texts: list[str] = []
    for path in paths:
        content = read_file(folder, path, MAX_SCRIPT_BYTES) or b""
        texts.append(content.decode(errors="replace"))
    return "\n".join(texts)


def ambiguous(paths: Iterable[str], task: Task, spec: OneJudge) -> list[str]:
    """Return the files of a start that the judge's command names and the instruction too: whose are
    they?"""
    rules = OwnRules(spec)
    asked = _FILE_NAME.findall(task.instruction)
    if spec.paths is not None or set(asked).isdisjoint(_FILE_NAME.findall(rules.command)):
        return []
    found: list[str] = []
    for path in paths:
        named = is_named(path, rules.command) and is_named(path, task.instruction)
        if named and not rules.is_listed(path):
            found.append(path)
    return sorted(found)


def read_only(workspace: Path, workdir: str, paths: Iterable[str]) -> list[Mount]:
    """Return mounts that show files read-only in a box: the first 200, the others are only
    compared.

    Their folders are mounts too: the folder of a mount can be renamed, a mount cannot.
    """
    chosen = [path for path in paths if not (workspace / path).is_symlink()][:_MAX_MOUNTS]
    folders: set[str] = set()
    for path in chosen:
        folders.update(parents(path))
    mounts: list[Mount] = []
    for path in (*sorted(folders), *chosen):
        mounts.append(Mount(workspace / path, f"{workdir}/{path}", writable=path in folders))
    return mounts


def stamp(workspace: Path, path: str) -> Stamp | None:
    """Return a file's stamp, which differs after every change of the file; None when it is gone."""
    try:
        with opened_parent(workspace, path) as (folder, name):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    if stat.S_ISDIR(status.st_mode):
        return None
    return status.st_ino, status.st_size, status.st_ctime_ns
