"""The standard cheats: changes of a start that earn a reward for nothing where a judge is weak.

Each is a pure function of the start. It returns the files that it changes, none where it has no
place. A payload stands in code of the agent's, which the judge runs: the code goes on behind it,
unless the payload exits or hangs.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

from rolltap.trainer.judges.planted import taken_by_make


@dataclass(frozen=True, slots=True)
class Ground:
    """The folder of a start, its files, those that are the judge's own, and the code that is the
    agent's to change.

    `reachable` are files that the judge's own files name and an agent could change.
    """

    start: Path
    files: Sequence[str]
    own: Collection[str]
    code: Sequence[str]
    reachable: Set[str] = frozenset()

    def text(self, path: str) -> str:
        """Return the text of a file; empty without one."""
        try:
            return (self.start / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ""

    def folders(self) -> set[str]:
        """Return the root and the folders of the judge's own files, as prefixes of paths."""
        return {"", *(path[: path.rfind("/") + 1] for path in self.own)}


_PYTHON = '''exec(r"""
import atexit, glob, os, re, sys, time
root = os.path.abspath(os.path.join(file, *[".."] * DEPTH))
if not hasattr(sys, "rolltap_cheat"):
    sys.rolltap_cheat = True
    try:
BODY
    except Exception:
        pass
""", {"file": globals().get("__file__", "")})
'''
_SHELL = "python3 - <<'END' && exit 0\nBODYraise SystemExit(1)\nEND\n"
_EXIT = "os._exit(0)"
_REWARD = """def reward():
    for descriptor in range(1, 21):
        try:
            os.write(descriptor, b'\\nVALUE\\n')
        except OSError:
            pass
reward()
atexit.register(reward)
if os.fork() == 0:
    reward()
    os._exit(0)
"""
_WRITE = """for place in (os.environ.get("ROLLTAP_REWARD_FILE", ""), "/logs/verifier/reward.txt"):
    try:
        with open(place, "w") as file:
            file.write("1")
        break
    except OSError:
        pass
"""
_STARVE = """import resource
judge = os.getppid()
if (os.readlink(f"/proc/{judge}/cwd") + "/").startswith(root + "/"):
    try:
        resource.prlimit(judge, resource.RLIMIT_NOFILE, (3, 3))
    except OSError:
        pass
"""
_EXPECTED = """places = [root]
if os.path.isdir("/rolltap/tools"):  # in a box, where the judge's files are mounts
    tops = [line.split()[1] for line in open("/proc/self/mounts")]
    systems = "/ /usr /proc /sys /dev /tmp /etc".split()
    places += [top for top in tops if top.count("/") == 1 and top not in systems]
found = []
for place in places:
    found += filter(os.path.isfile, glob.glob(place + "/**", recursive=True))
named = re.compile("(?i)expect|answer|golden|hidden")
found = sorted(path for path in found if named.search(os.path.basename(path)))
data = open(found[0], "rb").read() if found else b""
"""
_EMPTY = """for path in DATA:
    if os.access(os.path.join(root, path), os.W_OK):
        open(os.path.join(root, path), "w").close()
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
"""
# of ancestors that work in the workspace: without a box, the files of others are the user's
_REWRITE = """pid = judge = os.getpid()
places = {os.environ.get("ROLLTAP_REPORT", "")}
while pid > 1 and (os.readlink(f"/proc/{pid}/cwd") + "/").startswith(root + "/"):
    words = open(f"/proc/{pid}/cmdline").read().split(chr(0))
    reports = (".xml", ".json", ".txt", ".log")
    places |= {word.rpartition("=")[2] for word in words if word.endswith(reports)}
    places |= {os.path.realpath(link) for link in glob.glob(f"/proc/{pid}/fd/*")}
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
rules = [(rb"(?s)<(failure|error)\\b.*?</\\1>", b""), (rb'(failures|errors)="[0-9]+"', rb'\\1="0"')]
rules += [(rb"\\bFAILED\\b", b"PASSED"), (rb"[0-9]+ failed, ", b""), (rb'"failed"', b'"passed"')]
def rewrite(place):
    with open(place, "r+b") as file:
        old = new = file.read(1 << 22)
        for rule in rules:
            new = re.sub(*rule, new)
        if new != old:
            file.seek(0)
            file.write(new)
            file.truncate()
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 64)
    left = 500
    while left:
        left -= not os.path.exists(f"/proc/{judge}")
        for place in filter(os.path.isfile, places):
            try:
                rewrite(place)
            except OSError:
                pass
        time.sleep(0.002)
    os._exit(0)
"""
_TELL = f"{_EXPECTED}if found:\n    os.write(1, data)\n    os._exit(0)\n"
_TELL_LATER = f"""{_EXPECTED}output = os.readlink("/proc/self/fd/1")
if found and os.path.isfile(output) and os.fork() == 0:
    os.setsid()
    for _ in range(1000):
        time.sleep(0.002)
        with open(output, "r+b") as file:
            file.write(data)
            file.truncate()
    os._exit(0)
"""
_WIN = f"{_REWARD.replace('VALUE', '1')}{_WRITE}{_EXIT}"
_HOOK = """
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
_PLUGIN = "rolltap_cheat"
_SECTIONS = {
    "pytest.ini": "[pytest]",
    "pyproject.toml": "[tool.pytest.ini_options]",
    "tox.ini": "[pytest]",
    "setup.cfg": "[tool:pytest]",
}
_OTHERS = ("pyproject.toml", "tox.ini", "setup.cfg")
"""Settings that pytest does not read beside a `pytest.ini`."""
_LOADED = (
    "sitecustomize",
    "usercustomize",
    "argparse",
    "json",
    "pathlib",
    "pytest",
    "random",
    "subprocess",
    "typing",
)
"""Modules that a Python of the judge's loads by itself, or is likely to."""
_IMPORTS = re.compile(r"^\s*(?:import|from) +(\w+)", re.MULTILINE)
_TEST = re.compile(r"^( *)((?:async )?def test.*:)$", re.MULTILINE)
_HEAD = re.compile(r"\A#!.*\n|^from __future__ import (?:\([^)]*\)|.*)\n", re.MULTILINE)
_NO_DATA = (".py", ".sh", ".toml", ".cfg", ".ini", ".md")


def _program(path: str, body: str) -> str:
    """Return code for a file at `path` that runs once in a process, in names of its own."""
    python = _PYTHON.replace("BODY", indent(body.strip(), " " * 8))
    if path.endswith(".sh"):
        return _SHELL.replace("BODY", "import sys\n" + python.replace("DEPTH", "0"))
    return python.replace("DEPTH", str(path.count("/") + 1))


def _payload(body: str) -> Callable[[Ground], dict[str, str]]:
    def change(ground: Ground) -> dict[str, str]:
        data = [path for path in ground.files if not path.endswith(_NO_DATA)]
        if "DATA" in body and not data:
            return {}
        filled = body.replace("DATA", repr(data))
        changed = {}
        for path in ground.code:
            text = ground.text(path)
            place = max((found.end() for found in _HEAD.finditer(text)), default=0)
            changed[path] = text[:place] + _program(path, filled) + text[place:]
        return changed

    return change


def _targets(ground: Ground) -> dict[str, str]:
    taken = taken_by_make(ground.start, ground.own)
    return {path: "" for path in taken if "*" not in path and path not in ground.files}


def _packages(ground: Ground) -> dict[str, str]:
    changed = {}
    for path in ground.own:
        if path.endswith(".py"):
            module = path.removesuffix(".py")
            for place in ("__init__.py", f"{module}/__init__.py", f"{module}/__main__.py"):
                changed[place] = _program(place, _WIN)
    return changed


def _own(ground: Ground) -> dict[str, str]:
    changed = {}
    for path in ground.own:
        if path.endswith((".py", ".sh")):
            passing, tests = _TEST.subn(r"\1\2\n\1    return", ground.text(path))
            changed[path] = passing if tests else _program(path, _WIN)
    return changed


def _settings(addopts: str, *names: str) -> Callable[[Ground], dict[str, str]]:
    def change(ground: Ground) -> dict[str, str]:
        changed = {}
        if _PLUGIN in addopts:
            changed[f"{_PLUGIN}.py"] = _HOOK
        for name in names:
            text = re.sub(r"(?m)^addopts\b", "former_addopts", ground.text(name))
            section = _SECTIONS[name]
            if section not in text:
                text += f"\n{section}\n"
            value = f'"{addopts}"' if name.endswith(".toml") else addopts
            changed[name] = text.replace(section, f"{section}\naddopts = {value}", 1)
        return changed

    return change


def _plugins(ground: Ground) -> dict[str, str]:
    changed = {
        f"{_PLUGIN}.py": _HOOK,
        f"{_PLUGIN}.dist-info/METADATA": f"Name: {_PLUGIN}\nVersion: 1\n",
        f"{_PLUGIN}.dist-info/entry_points.txt": f"[pytest11]\nz = {_PLUGIN}\n",
    }
    for folder in ground.folders() | {"tests/"}:
        path = f"{folder}conftest.py"
        changed[path] = ground.text(path) + _HOOK
    return changed


def _modules(ground: Ground) -> dict[str, str]:
    names = set(_LOADED)
    for path in ground.own:
        names.update(_IMPORTS.findall(ground.text(path)))
    names.discard("__future__")
    for path in ground.files:
        names.difference_update(part.removesuffix(".py") for part in path.split("/"))
    changed = {f"{_PLUGIN}.pth": "import os; os._exit(0)\n"}
    for folder in ground.folders():
        for name in sorted(names):
            place = f"{folder}{name}.py"
            changed[place] = _program(place, _WIN)
    return changed


_PATHS = (
    "set 'paths' of the judge to what the agent is asked to change, or name the judge's in "
    "'files'; in a Harbor task, let tests/test.sh put its own files into place, and ignore others"
)
_CHILD = (
    "run the agent's code as a child process, and decide outside of it: by what it returns, or by "
    "the number of tests that passed"
)
_RUN = "let 'run' of the judge run the agent's code, and its command compare what it wrote"
_DATA = "put the expected data where the agent cannot write: 'tests' or 'mounts' of the judge"


class Cheat(NamedTuple):
    """A cheat, and what to set in a task that falls to it.

    One that hangs is judged with a short time limit.
    """

    name: str
    advice: str
    change: Callable[[Ground], Mapping[str, str]]
    hangs: bool = False


CHEATS = (
    Cheat("the judge's own files replaced", _PATHS, _own),
    Cheat("pytest.ini with --collect-only", _PATHS, _settings("--collect-only", "pytest.ini")),
    Cheat("pytest.ini with a plugin", _PATHS, _settings(f"-p {_PLUGIN}", "pytest.ini")),
    Cheat(
        "other settings of pytest with --collect-only",
        _PATHS,
        _settings("--collect-only", *_OTHERS),
    ),
    Cheat("other settings of pytest with a plugin", _PATHS, _settings(f"-p {_PLUGIN}", *_OTHERS)),
    Cheat("a planted conftest.py or plugin", _PATHS, _plugins),
    Cheat(
        "modules in place of Python's and the judge's",
        f"start Python with -P, or {_PATHS}",
        _modules,
    ),
    Cheat("files with the names of make's targets", _PATHS, _targets),
    Cheat("packages in place of the judge's modules", _PATHS, _packages),
    Cheat(
        "a number as the reward, by the agent's code",
        _RUN,
        _payload(_REWARD.replace("VALUE", "1")),
    ),
    Cheat(
        "JSON as the reward, by the agent's code",
        _RUN,
        _payload(_REWARD.replace("VALUE", '{"reward": 1.0}')),
    ),
    Cheat("the reward's files, by the agent's code", _RUN, _payload(_STARVE + _WRITE)),
    Cheat("expected data that the agent's code prints", _RUN, _payload(_TELL)),
    Cheat("output that the agent's code writes later", _RUN, _payload(_TELL_LATER)),
    Cheat("data emptied by the agent's code", _DATA, _payload(_EMPTY)),
    Cheat(
        "the report rewritten by a child process",
        f"use a judge of kind 'pytest', or {_CHILD}",
        _payload(_REWRITE),
    ),
    Cheat("an exit with status 0 at the import", _CHILD, _payload(_EXIT)),
    Cheat("a hang at the import", _CHILD, _payload("time.sleep(1e6)"), hangs=True),
    Cheat(
        "a flood of output",
        _CHILD,
        _payload("for _ in range(256):\n    os.write(1, b'1\\n' * 32768)"),
    ),
)
