"""The judge's own part of a workspace: its tests and scripts, and the settings of the programs that
it runs.

Own are the files of the start that the judge's command names, tests by the usual names, what
`fail_to_pass` and `files` of the judge list, settings of test runners, and new paths that a runner
would take in place of these: targets of make, modules of the name of a test's. They come from the
start, are read-only while the judge runs where a runtime can do that, and are compared afterwards.
Commands are searched for names and not parsed: a shell's text may spell a program in any way.

`paths` of the judge turns it round: what a pattern of it matches is the agent's, and nothing else
is applied.
"""

import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from iniconfig import IniConfig

from rolltap.trainer.boxes.runtime import Mount
from rolltap.trainer.judges.changes import Changes
from rolltap.trainer.judges.folders import Refusal, opened, parents, read_file, scan
from rolltap.trainer.tasks.content import RUNNER_FILES, STARTUP, TEST_FILES, matches
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

_MODULE = re.compile(r"(?:^|\s)-m\s*([\w.]+)")
_FILE_NAME = re.compile(r"(?<![\w-])[\w-]*\.\w[\w-]*")
_SHADOWS = sys.stdlib_module_names | {
    *(
        "pytest",
        "_pytest",
        "pluggy",
        "iniconfig",
        "xdist",
        "py",
        "packaging",
        "pygments",
        "exceptiongroup",
        "tomli",
    ),
    *("colorama", "typing_extensions", "coverage", "attr"),
}
"""Modules of Python and of pytest."""
_IMPORTED = re.compile(r"([^/.]+)(?:\.(?:py|pyc|(?:[^/]+\.)?so)|/__init__\.[^/]+)")
"""A module, relative to a folder on Python's path. A folder without `__init__` hides no module."""
_IMPORT = re.compile(r"^\s*(?:import|from)\s+(\w+)", re.MULTILINE)
_UNITTEST = re.compile(r"(?:^|\s)-m\s*unittest\b([^;&|\n]*)")
_UNIT_TESTS = re.compile(r"pytest|py\.test|unittest")
_FOLDER_OF_PYTHON = re.compile(r"python[\d.]*\"?(?:\s+-\w+)*\s+([\w./-]+)")
_NODE = re.compile(
    r"(?<![\w./-])(?:node\s.*--test|npm|npx|yarn|pnpm|bun|deno|jest|vitest|mocha|ava)(?![\w.-])"
)
_NODE_FILE = re.compile(r".*\.[cm]?[jt]sx?")
_NODE_TEST = re.compile(r"(?:.*[._-](?:test|spec)|test(?:-.*)?)\.[cm]?[jt]sx?")
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
_MAX_SCRIPT_BYTES = 1 << 20


def judges_of(judge: Judge) -> Iterator[OneJudge | LLMJudge]:
    """Yield the judge, or each of several."""
    if isinstance(judge, SeveralJudges):
        for one in judge.judges:
            yield from judges_of(one.judge)
    else:
        yield judge


def runs_pytest(spec: OneJudge) -> bool:
    """Return True if the text of a judge's command names pytest."""
    return any(_is_named(name, _text(spec)) for name in ("pytest", "py.test"))


def _text(spec: OneJudge) -> str:
    return "" if isinstance(spec, PythonJudge) else " ".join(spec.command)


def _is_named(path: str, text: str) -> bool:
    """Return True if a path, or its end, stands in a text between characters that are no part of a
    name.

    A name of four characters is looked for without its folder too: `run.sh` is in any folder,
    `tools/run.sh` in one.
    """
    name = path.rpartition("/")[2]
    pattern = rf"(?<![\w.-])(?:[\w.-]+/)*{re.escape(name)}(?![\w-]|\.\w)"
    for found in re.finditer(pattern, text) if name in text else ():
        word = "/".join(part for part in found[0].split("/") if part not in (".", ".."))
        if word == path or word.endswith(f"/{path}") or (path.endswith(word) and len(name) >= 4):
            return True
    modules = {module.replace(".", "/") for module in _MODULE.findall(text)}
    runs = {f"{module}.py" for module in modules} | {f"{module}/__main__.py" for module in modules}
    runs |= {
        os.path.normpath(f"{folder}/__main__.py") for folder in _FOLDER_OF_PYTHON.findall(text)
    }
    return path in runs


def _is_theirs(path: str, spec: OneJudge) -> bool:
    """Return True for a path that the agent is to change. Of settings and plugins the whole path
    must be given."""
    paths = spec.paths or []
    return path in paths or (
        matches(path, paths) and not matches(path.lower(), (*STARTUP, *RUNNER_FILES))
    )


def _is_listed(path: str, spec: OneJudge) -> bool:
    """Return True for a path that is own by its name alone, whatever the command says."""
    listed = [*spec.fail_to_pass, *spec.pass_to_pass] if isinstance(spec, PytestJudge) else []
    if matches(path, (*TEST_FILES, *spec.files)) or matches(path.lower(), RUNNER_FILES):
        return True
    if _is_node_test(path) and _NODE.search(_text(spec)):
        return True
    return path in {name.partition("::")[0] for name in listed}


def own_files(start: Path, task: Task, spec: OneJudge) -> set[str]:
    """Return the paths of the judge's own files in a start, relative and with `/`."""
    text = _text(spec)
    there = scan(start).files
    units = _units(text, there)
    return {
        path
        for path in there
        if not _is_theirs(path, spec)
        and (path in units or _is_listed(path, spec) or _is_named(path, text))
    }


def reachable_files(start: Path, task: Task, spec: OneJudge) -> list[str]:
    """Return the files of a start that the judge's own files name and an agent could change; none
    with `paths`."""
    if spec.paths is not None:
        return []
    own = own_files(start, task, spec)
    text = _contents(start, own)
    return sorted(path for path in scan(start).files if path not in own and _is_named(path, text))


def _contents(folder: Path, paths: Iterable[str]) -> str:
    """Return the begin of each file, one after the other."""
    contents = (read_file(folder, path, _MAX_SCRIPT_BYTES) or b"" for path in paths)
    return "\n".join(content.decode(errors="replace") for content in contents)


def _units(text: str, there: Collection[str]) -> set[str]:
    """Return the files of the modules that `python -m unittest` is given, also before a class and a
    method."""
    found = set[str]()
    for name in " ".join(_UNITTEST.findall(text)).replace(".py", "").replace(".", "/").split():
        for part in (name, *parents(name)):
            module = {f"{part}.py", f"{part}/__init__.py"} & {*there}
            if module:
                found |= module
                break
    return found


def ambiguous(paths: Iterable[str], task: Task, spec: OneJudge) -> list[str]:
    """Return the files of a start that the judge's command names and the instruction too: whose are
    they?"""
    text = _text(spec)
    if spec.paths is not None or not {*_FILE_NAME.findall(text)} & {
        *_FILE_NAME.findall(task.instruction)
    }:
        return []
    named = (path for path in paths if _is_named(path, text) and not _is_listed(path, spec))
    return sorted(path for path in named if _is_named(path, task.instruction))


def select(
    changes: Changes, task: Task, spec: OneJudge, laid: Collection[str], start: Path, work: Path
) -> Changes:
    """Return the changes that are applied for a judge; the others are refused in it.

    `laid` are the paths of the tests that the task lays over the start, `work` is the folder that
    the agent left.
    """
    if isinstance(spec, CommandJudge):
        targets = (*spec.mounts, *spec.writable, *spec.reward_files)
        laid = {*laid, *(os.path.relpath(target, task.workdir) for target in targets)}
    own = own_files(start, task, spec) | {*laid}
    folders = {parent for path in laid for parent in parents(path)}
    scripts = {
        path.rpartition("/")[0]
        for path in own
        if path.endswith(".py") and _is_named(path, _text(spec))
    }
    taken = ["**"] if computed_makefiles(start, own, spec) else taken_by_make(start, own)
    tests = _test_folders(start, own, spec)
    is_node = (start / "package.json").exists()
    places = {
        os.path.normpath(place) for place in _python_path(task, spec) if not place.startswith("/")
    }
    refused: dict[str, Refusal] = {}
    for path in [*changes.changed, *changes.deleted]:
        entry = changes.changed.get(path)
        is_folder = entry is not None and entry.kind == "folder"
        if (
            path in {*laid}
            or any(parent in own for parent in parents(path))
            or (path in folders and not is_folder)
        ):
            refused[path] = "protected"
        elif (
            entry is not None
            and entry.kind == "link"
            and _leads_away(path, work, {*laid, *folders})
        ):
            refused[path] = "symlink"
        elif path in (spec.paths or []):
            continue
        elif matches(path.lower(), (*STARTUP, *RUNNER_FILES)):
            refused[path] = "planted"
        elif not _same_settings(path, start, work):
            refused[path] = "settings"
        elif _is_theirs(path, spec):
            continue
        elif path in own or (not is_folder and (spec.paths is not None or _is_listed(path, spec))):
            refused[path] = "protected"
        elif path not in changes.added or _is_named(path, task.instruction if "." in path else ""):
            continue
        elif matches(path, taken) or (is_node and _is_node_test(path)):
            refused[path] = "planted"
        elif _is_imported_first(path, scripts, places) or _hides_module(path, own, tests):
            refused[path] = "planted"  # what Python imports, after what runners take
        elif path == "__init__.py" and _UNIT_TESTS.search(_text(spec)):
            refused[path] = "planted"  # pytest imports the package that its folder is
    stays = (path for path, why in refused.items() if path in own and path not in changes.added)
    kept = {parent for path in stays for parent in parents(path)}
    replaced = (
        path for path in kept if path in changes.changed and changes.changed[path].kind != "folder"
    )
    refused.update(dict.fromkeys(replaced, "protected"))
    return changes.without(refused)


def _leads_away(path: str, work: Path, laid: Collection[str]) -> bool:
    """Return True for a link that leads to nothing that the agent left, or to where the judge lays
    files of its own.

    In the judge's checkout it could be a file that no session has seen.
    """
    try:
        target = os.path.realpath(work / path, strict=True)
    except OSError:
        return True
    place = os.path.relpath(target, os.path.realpath(work))
    return place.startswith("..") or place in laid


def _python_path(task: Task, spec: OneJudge) -> list[str]:
    """Return the folders that the judge's Python has before its own modules, as far as the task
    says them."""
    if isinstance(spec, PythonJudge) or not re.search(r"python|pytest|py\.test", _text(spec)):
        return []
    given = {**task.env, **spec.env}.get("PYTHONPATH", "").split(os.pathsep)
    inside = (
        os.path.relpath(place, task.workdir) if place.startswith(task.workdir) else place
        for place in given
    )
    return [".", *filter(None, inside)]


def _is_imported_first(path: str, scripts: Collection[str], places: Collection[str]) -> bool:
    """Return True for a new module that the judge would import in place of another one.

    Python looks for modules in the folder of its script first: all modules there are the judge's.
    `-m` and PYTHONPATH put folders before Python's own: modules there may have no name of these.
    """
    for place in {*scripts, *places}:
        folder = "" if place in ("", ".") else f"{place}/"
        module = _IMPORTED.fullmatch(path.removeprefix(folder)) if path.startswith(folder) else None
        if module and (place in scripts or module[1] in _SHADOWS):
            return True
    return False


def _test_folders(start: Path, own: Collection[str], spec: OneJudge) -> dict[str, set[str]]:
    """Return the folders of nothing but tests, and the modules that these import; none without a
    runner of tests."""
    folders: dict[str, list[str]] = {}
    for path in scan(start).entries:
        if path.endswith(".py"):
            folders.setdefault(path.rpartition("/")[0], []).append(path)
    found: dict[str, set[str]] = {}
    for folder, paths in folders.items():
        if folder and {*paths} <= {*own} and _UNIT_TESTS.search(_text(spec)):
            found[folder] = {*_IMPORT.findall(_contents(start, paths))}
    return found


def _hides_module(path: str, own: Collection[str], tests: Mapping[str, set[str]]) -> bool:
    """Return True for a new module that is imported in place of one of the judge's, or of a library
    of its tests.

    pytest and unittest put the folder of a test first on Python's path: a module that tests import
    from there, and that is not there, is a library's.
    """
    folder, _, name = path.rpartition("/")
    module = name.partition(".")[0]
    if module == "__init__":
        folder, _, module = folder.rpartition("/")
    if f"{folder}/{module}.py".lstrip("/") in own:
        return True
    return name.endswith((".py", ".so")) and folder in tests and module in _SHADOWS | tests[folder]


def _is_node_test(path: str) -> bool:
    """Return True for a file that test runners of Node run by its name alone."""
    *folders, name = path.split("/")
    if not _NODE_FILE.fullmatch(name):
        return False
    return not {"test", "spec"}.isdisjoint(folders) or bool(_NODE_TEST.fullmatch(name))


def taken_by_make(start: Path, own: Collection[str]) -> list[str]:
    """Return patterns of new paths that decide for make: its targets, which are up to date then,
    and its includes."""
    found: list[str] = []
    for path in own:
        folder = path.rpartition("/")[0]
        names = (name for name in _names_of_make(start, path) if name.strip("*./"))
        found += [os.path.normpath(f"/{folder}/{name}").lstrip("/") for name in names]
    return found


def computed_makefiles(start: Path, own: Iterable[str], spec: OneJudge) -> list[str]:
    """Return the Makefiles of a judge whose targets or includes may have any name, as make computes
    them.

    There are none where the judge has `paths`, or where neither its command names make nor a script
    of its own that the command names starts make.
    """
    computed = [
        path for path in own if not all(name.strip("*./") for name in _names_of_make(start, path))
    ]
    if spec.paths is not None or not computed:
        return []
    text = _text(spec)
    scripts = ""
    for folder in filter(None, (start, spec.tests)):
        scripts += _contents(folder, [path for path in scan(folder).files if _is_named(path, text)])
    if not _MAKE.search(text) and not _STARTS_MAKE.search(scripts):
        return []
    text += scripts
    return sorted(
        path for path in computed if "/" not in path or _is_named(path.rpartition("/")[0], text)
    )


def _names_of_make(start: Path, path: str) -> list[str]:
    """Return the targets and includes of a Makefile, with `*` for what make computes; nothing for
    other files."""
    if not matches(path.lower(), _MAKEFILES):
        return []
    text = _contents(start, [path]).replace("\\\n", " ")
    words = "\n".join("".join(line) for line in _TARGETS.findall(text))
    for name, value in [*_ASSIGNED.findall(text)] * _MAX_NESTED:
        for variable in (f"$({name})", f"${{{name}}}"):
            size = len(words) + words.count(variable) * len(value)
            if size > 2 * _MAX_SCRIPT_BYTES:
                return ["*"]
            words = words.replace(variable, value)
    replaced = 1
    while replaced:  # the inner ones first
        words, replaced = _COMPUTED.subn("*", words)
    names = words.replace("%", "*").split()
    return [*names, "*"] if "$" in words or "$(eval" in text else names


_MAX_SETTINGS_BYTES = 4 << 20
_PYTHON_TOOLS = ("pytest", "coverage", "tox", "nox", "hatch", "pdm", "poe", "taskipy", "pixi")
_NODE_KEYS = ("scripts", "config", "jest", "vitest", "mocha", "ava", "tap", "babel", "c8", "nyc")
_CARGO_KEYS = ("lib", "test", "bench", "profile", "patch", "replace")


def _ini(text: str) -> Mapping[str, Any]:
    read = IniConfig("setup.cfg", data=text)
    ours = ("tool:", "pytest", "tox", "testenv")
    return {name: dict(values) for name, values in read.sections.items() if name.startswith(ours)}


def _part(keys: Iterable[str], tables: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: tables[key] for key in keys if key in tables}


_SETTINGS: Mapping[str, Callable[[str], Any]] = {
    "pyproject.toml": lambda text: _part(_PYTHON_TOOLS, tomllib.loads(text).get("tool", {})),
    "cargo.toml": lambda text: _part(_CARGO_KEYS, tomllib.loads(text)),
    "package.json": lambda text: _part(_NODE_KEYS, json.loads(text)),
    "setup.cfg": _ini,
}
"""File that is settings of test runners in part -> that part of its text, read as the runner reads
it."""


def _same_settings(path: str, start: Path, work: Path) -> bool:
    """Return False for a file of settings whose part for test runners differs, or cannot be read
    whole."""
    read = _SETTINGS.get(PurePosixPath(path).name.lower())
    if read is None:
        return True
    texts = [read_file(folder, path, _MAX_SETTINGS_BYTES) for folder in (start, work)]
    try:
        if any(len(text or b"") > _MAX_SETTINGS_BYTES for text in texts):
            return False
        before, after = ({} if text is None else read(text.decode("utf-8-sig")) for text in texts)
    except Exception:  # the agent wrote it; what its reader says of it is not known
        return False
    return bool(before == after)


Stamp = tuple[int, int, int]
"""Inode, size, and time of the last change in nanoseconds, which no program can set."""
_MAX_MOUNTS = 200


def read_only(workspace: Path, workdir: str, paths: Iterable[str]) -> list[Mount]:
    """Return mounts that show files read-only in a box: the first 200, the others are only
    compared.

    Their folders are mounts too: the folder of a mount can be renamed, a mount cannot.
    """
    chosen = [path for path in paths if not (workspace / path).is_symlink()][:_MAX_MOUNTS]
    folders = {parent for path in chosen for parent in parents(path)}
    mounts = [
        Mount(workspace / folder, f"{workdir}/{folder}", writable=True)
        for folder in sorted(folders)
    ]
    return mounts + [Mount(workspace / path, f"{workdir}/{path}") for path in chosen]


def stamp(workspace: Path, path: str) -> Stamp | None:
    """Return a file's stamp, which differs after every change of the file; None when it is gone."""
    parent, _, name = path.rpartition("/")
    try:
        with opened(workspace, parent) as folder:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return (
        (status.st_ino, status.st_size, status.st_ctime_ns)
        if not stat.S_ISDIR(status.st_mode)
        else None
    )
