"""The changes that are applied for a judge. The others are refused: changes of the judge's own
files, and new paths and settings that its programs would take in place of these.

Such paths are targets and includes of make, modules of the name of a test's, of Python's or of a
library's, links out of the workspace, and the settings of test runners.
"""

import json
import os
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from iniconfig import IniConfig

from rolltap.trainer.judges.changes import Changes, loads_by_itself
from rolltap.trainer.judges.folders import Entry, Refusal, parents, read_file, scan
from rolltap.trainer.judges.protected import (
    MAX_SCRIPT_BYTES,
    OneJudge,
    OwnRules,
    is_named,
    is_node_test,
    own_files,
    read_texts,
)
from rolltap.trainer.tasks.content import matches
from rolltap.trainer.tasks.task import CommandJudge, PythonJudge, Task

_LIBRARIES = (
    "pytest _pytest pluggy iniconfig xdist py packaging pygments exceptiongroup tomli"
    " colorama typing_extensions coverage attr"
)
_SHADOWS = sys.stdlib_module_names.union(_LIBRARIES.split())
"""Modules of Python and of pytest."""
_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)
_RUNS_PYTHON = re.compile(r"python|pytest|py\.test")
_UNIT_TESTS = re.compile(r"pytest|py\.test|unittest")
_MAKEFILES = ("**/makefile", "**/gnumakefile", "**/*.mk")
_TARGETS = re.compile(r"^([^\s#:=][^#:=\n]*):(?!:?=)|^ *[-s]?include\s+(.*)$", re.MULTILINE)
"""Targets of a rule, and what is included."""
_COMPUTED = re.compile(r"\$\([^(){}]*\)|\$\{[^(){}]*\}|\$[^({]")
_MAKE = re.compile(r"(?<![\w.-])g?make(?![\w.-])")
_STARTS_MAKE = re.compile(
    r"(?:^|[;&|({!`\"'])[ \t]*(?:(?:if|while|then|do|else|exec|env|time|\w+=[\w./:-]*) +)*"
    r"(?:[\w./-]*/)?g?make(?![\w.-])",
    re.MULTILINE,
)
"""A command of a script, where a text could have the word too."""
_ASSIGNED = re.compile(r"^ *(\w+)\s*[:?+]*=[ \t]*(.*)$", re.MULTILINE)
_MAX_NESTED = 3
_MAX_SETTINGS_BYTES = 4 << 20
_SETTINGS = ("pyproject.toml", "cargo.toml", "package.json", "setup.cfg")
"""Files that are settings of test runners in part."""
_PYTHON_TOOLS = ("pytest", "coverage", "tox", "nox", "hatch", "pdm", "poe", "taskipy", "pixi")
_NODE_KEYS = ("scripts", "config", "jest", "vitest", "mocha", "ava", "tap", "babel", "c8", "nyc")
_CARGO_KEYS = ("lib", "test", "bench", "profile", "patch", "replace")
_INI_SECTIONS = ("tool:", "pytest", "tox", "testenv")


def select(
    changes: Changes,
    task: Task,
    spec: OneJudge,
    laid: Collection[str],
    start: Path,
    work: Path,
) -> Changes:
    """Return the changes that are applied for a judge; the others are refused in it.

    `laid` are the paths of the tests that the task lays over the start, `work` is the folder that
    the agent left.
    """
    rules = _Rules(
        task,
        spec,
        laid,
        start,
        work,
    )
    refused: dict[str, Refusal] = {}
    kept: set[str] = set()
    for path in (*changes.changed, *changes.deleted):
        is_new = path in changes.added
        why = rules.why_refused(path, changes.changed.get(path), is_new)
        if why is not None:
            refused[path] = why
            if path in rules.own and not is_new:
                kept.update(parents(path))
    # nothing may stand in place of a folder of an own file that stays
    for path in kept.intersection(changes.changed):
        if changes.changed[path].kind != "folder":
            refused[path] = "protected"
    return changes.without(refused)


class _Rules:
    """The rules for the changes of one session."""

    def __init__(
        self,
        task: Task,
        spec: OneJudge,
        laid: Collection[str],
        start: Path,
        work: Path,
    ) -> None:
        self.start = start
        self.work = work
        self.only_paths = spec.paths is not None
        self.rules = OwnRules(spec)
        self.asked = task.instruction
        self.laid = set(laid)
        if isinstance(spec, CommandJudge):
            for target in (*spec.mounts, *spec.writable, *spec.reward_files):
                self.laid.add(os.path.relpath(target, task.workdir))
        self.folders: set[str] = set()
        for path in self.laid:
            self.folders.update(parents(path))
        self.own = own_files(start, spec) | self.laid
        self.taken = taken_by_make(start, self.own)
        if computed_makefiles(start, self.own, spec):
            self.taken = ["**"]
        self.scripts: set[str] = set()  # folders in which all modules are the judge's
        self.modules: dict[str, set[str]] = defaultdict(set)  # others: folder -> such modules
        self._find_modules(task, spec)

    def _find_modules(self, task: Task, spec: OneJudge) -> None:
        """Find the modules that a new file would be imported in place of.

        Python looks for modules in the folder of its script first. `-m` and PYTHONPATH put folders
        before Python's own, and pytest and unittest the folder of a test: a module that tests
        import from there, and that is not there, is a library's.
        """
        command = self.rules.command
        for path in self.own:
            folder, _, name = path.rpartition("/")
            if name.endswith(".py"):
                self.modules[folder].add(name.removesuffix(".py"))
                if is_named(path, command):
                    self.scripts.add(folder)
        if _RUNS_PYTHON.search(command) and not isinstance(spec, PythonJudge):
            places = {**task.env, **spec.env}.get("PYTHONPATH", "").split(os.pathsep)
            for place in ("", *places):
                inside = os.path.relpath(os.path.join(task.workdir, place), task.workdir)
                self.modules["" if inside == "." else inside] |= _SHADOWS
        if not _UNIT_TESTS.search(command):
            return
        self.modules[""].add("__init__")  # pytest imports the package that its folder is
        by_folder: dict[str, set[str]] = defaultdict(set)
        for path in scan(self.start).entries:
            if path.endswith(".py"):
                by_folder[path.rpartition("/")[0]].add(path)
        for folder, paths in by_folder.items():
            if folder and paths <= self.own:
                imported = _IMPORT.findall(read_texts(self.start, paths))
                self.modules[folder] |= _SHADOWS.union(imported)

    def why_refused(self, path: str, entry: Entry | None, is_new: bool) -> Refusal | None:
        """Return why a change is refused, None if it is applied. `entry` is None for a path that
        was deleted."""
        kind = entry.kind if entry is not None else ""
        in_own = not self.own.isdisjoint(parents(path))
        if path in self.laid or in_own or (path in self.folders and kind != "folder"):
            return "protected"
        if kind == "link" and self._leads_away(path):
            return "symlink"
        if path in self.rules.paths:
            return None
        if loads_by_itself(path):
            return "planted"
        if not self._has_same_settings(path):
            return "settings"
        if self.rules.is_agents(path):
            return None
        is_listed = kind != "folder" and (self.only_paths or self.rules.is_listed(path))
        if path in self.own or is_listed:
            return "protected"
        if not is_new or ("." in path and is_named(path, self.asked)):
            return None
        if matches(path, self.taken) or is_node_test(path) or self._hides_module(path):
            return "planted"
        return None

    def _leads_away(self, path: str) -> bool:
        """Return True for a link that leads to nothing that the agent left, or to where the judge
        lays files of its own.

        In the judge's checkout it could be a file that no session has seen.
        """
        try:
            target = os.path.realpath(self.work / path, strict=True)
        except OSError:
            return True
        place = os.path.relpath(target, os.path.realpath(self.work))
        return place.startswith("..") or place in self.laid or place in self.folders

    def _hides_module(self, path: str) -> bool:
        """Return True for a new module that is imported in place of another one."""
        for folder, module in _modules_of(path):
            if folder in self.scripts or module in self.modules.get(folder, ()):
                return True
        return False

    def _has_same_settings(self, path: str) -> bool:
        """Return False for a file of settings whose part for test runners differs, or cannot be
        read whole."""
        name = path.rpartition("/")[2].lower()
        if name not in _SETTINGS:
            return True
        parts: list[Any] = []
        for folder in (self.start, self.work):
            content = read_file(folder, path, _MAX_SETTINGS_BYTES) or b""
            if len(content) > _MAX_SETTINGS_BYTES:
                return False
            try:
                parts.append(_part_for_runners(name, content.decode("utf-8-sig")))
            except Exception:  # the agent wrote it; what its reader says of it is not known
                return False
        return bool(parts[0] == parts[1])


def _modules_of(path: str) -> Iterator[tuple[str, str]]:
    """Yield the modules that a file is, each as its folder and its name. A folder without
    `__init__` hides no module."""
    folder, _, name = path.rpartition("/")
    module, _, ending = name.partition(".")
    if ending in ("py", "pyc") or f".{ending}".endswith(".so"):
        yield folder, module
    if module == "__init__":
        above, _, package = folder.rpartition("/")
        yield above, package


def _part_for_runners(name: str, text: str) -> Mapping[str, Any]:
    """Return the part of a file of settings that is for test runners, read as the runner reads
    it."""
    if name == "setup.cfg":
        sections = IniConfig(name, data=text).sections
        return _some(filter(_is_runners, sections), sections)
    if name == "package.json":
        return _some(_NODE_KEYS, json.loads(text or "{}"))
    if name == "cargo.toml":
        return _some(_CARGO_KEYS, tomllib.loads(text))
    return _some(_PYTHON_TOOLS, tomllib.loads(text).get("tool", {}))


def _is_runners(section: str) -> bool:
    return section.startswith(_INI_SECTIONS)


def _some(keys: Iterable[str], tables: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: tables[key] for key in keys if key in tables}


def taken_by_make(start: Path, own: Iterable[str]) -> list[str]:
    """Return patterns of new paths that decide for make: its targets, which are up to date then,
    and its includes."""
    found: list[str] = []
    for path in own:
        folder = path.rpartition("/")[0]
        for name in _names_of_make(start, path):
            if not _is_computed(name):
                found.append(os.path.normpath(f"/{folder}/{name}").lstrip("/"))
    return found


def computed_makefiles(start: Path, own: Iterable[str], spec: OneJudge) -> list[str]:
    """Return the Makefiles of a judge whose targets or includes may have any name, as make computes
    them.

    There are none where the judge has `paths`, or where neither its command names make nor a script
    of its own that the command names starts make.
    """
    if spec.paths is not None:
        return []
    computed = [path for path in own if any(map(_is_computed, _names_of_make(start, path)))]
    if not computed:
        return []
    command = OwnRules(spec).command
    scripts = ""
    for folder in filter(None, (start, spec.tests)):
        named = [path for path in scan(folder).files if is_named(path, command)]
        scripts += read_texts(folder, named)
    if not _MAKE.search(command) and not _STARTS_MAKE.search(scripts):
        return []
    found: list[str] = []
    for path in computed:
        folder_of_it = path.rpartition("/")[0]
        if not folder_of_it or is_named(folder_of_it, command + scripts):
            found.append(path)
    return sorted(found)


def _is_computed(name: str) -> bool:
    """Return True for a name of which make computes all characters that count."""
    return not name.strip("*./")


def _names_of_make(start: Path, path: str) -> list[str]:
    """Return the targets and includes of a Makefile, with `*` for what make computes; nothing for
    other files."""
    if not matches(path.lower(), _MAKEFILES):
        return []
    text = read_texts(start, [path]).replace("\\\n", " ")
    words = "\n".join("".join(line) for line in _TARGETS.findall(text))
    for name, value in _ASSIGNED.findall(text) * _MAX_NESTED:
        for variable in (f"$({name})", f"${{{name}}}"):
            size = len(words) + words.count(variable) * len(value)
            if size > 2 * MAX_SCRIPT_BYTES:
                return ["*"]
            words = words.replace(variable, value)
    replaced = 1
    while replaced:  # the inner ones first
        words, replaced = _COMPUTED.subn("*", words)
    names = words.replace("%", "*").split()
    if "$" in words or "$(eval" in text:
        names.append("*")
    return names
