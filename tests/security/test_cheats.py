"""Cheats of agents' programs that a judge runs, and of new files that a judge's programs would take
as its own."""

import shutil
import sys

import pytest

from rolltap.trainer.boxes.sandbox import SandboxRuntime
from tests.boxes import require_podman, sandboxed
from tests.deep import DEEP
from tests.security.test_verdicts import Container
from tests.trainer.judges.sessions import Left, shell, write

LINKS = {
    "to a file that the judge lays": {"out.txt": "tests/hidden.txt"},
    "to a folder that the judge lays": {"mine": "tests", "out.txt": "mine/hidden.txt"},
    "through a link of the start": {"out.txt": "old/hidden.txt"},
    "to the workspace": {"here": ".", "out.txt": "here/tests/hidden.txt"},
}


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("how", LINKS)
async def test_a_link_to_what_the_judge_lays_out_is_not_applied(tmp_path, how, planted):
    write(tmp_path / "hidden", {"tests/hidden.txt": "42\n"})
    left = Left(tmp_path, {"main.sh": "", "data.txt": "1\n"})
    for folder in (left.start.folder, left.workspace):
        (folder / "old").symlink_to("tests")
    left.do({"tests/hidden.txt": "mine\n"} if planted else {})
    for name, target in LINKS[how].items():
        (left.workspace / name).symlink_to(target)
    (left.workspace / "data").symlink_to("data.txt")
    spec = shell(
        "cmp data data.txt && cmp out.txt tests/hidden.txt || exit 1",
        tests=str(tmp_path / "hidden"),
    )
    judged = await left.judge({**spec, "paths": ["**"]})
    assert judged.reward == 0.0, left.log
    assert "out.txt: symlink" in judged.evidence["refused"]
    assert "data: symlink" not in judged.evidence["refused"]
    (left.workspace / "out.txt").unlink()
    left.do({"out.txt": "42\n"})
    assert (await left.judge({**spec, "paths": ["**"]})).reward == 1.0, left.log


ADD = "def add(a, b): return a - b\n"
UNITS = (
    "import unittest, calc\nclass T(unittest.TestCase):\n    def test(self):"
    " self.assertEqual(calc.add(2, 2), 4)\n"
)
EXITS = "import os\nos._exit(0)\n"
MAKEFILE = """CHECKS = one two.ok
-include local.mk
test: $(CHECKS)
\ttest "$$(cat answer)" = 4
$(CHECKS): answer
\tgrep -qx 4 answer
%.done:
\tgrep -qx 4 answer
"""
COMPUTED = "$(shell echo one): answer\n\tgrep -qx 4 answer\n"
NODE = "import assert from 'node:assert'; import test from 'node:test'; import fs from 'node:fs'\n"
NODE += "test('it', () => assert.equal(fs.readFileSync('answer', 'utf8'), '4\\n'))\n"
PYTEST = f"{sys.executable} -m pytest -q -p no:cacheprovider"
TOX = "#!/bin/sh\ngrep -q commands= setup.cfg || exec grep -qx 4 answer\n"
RUNNERS = {
    "a file with the name of make's target": (
        "make -s test || exit 1",
        {"Makefile": MAKEFILE},
        {"test": ""},
    ),
    "a folder with the name of make's target": (
        "make -s test || exit 1",
        {"Makefile": MAKEFILE},
        {"test/a": ""},
    ),
    "a target that a variable names": (
        "make -s one two.ok || exit 1",
        {"Makefile": MAKEFILE},
        {"one": "", "two.ok": ""},
    ),
    "a target by a pattern": (
        "make -s all.done || exit 1",
        {"Makefile": MAKEFILE},
        {"all.done": ""},
    ),
    "an included file": (
        "make -s test || exit 1",
        {"Makefile": MAKEFILE},
        {"local.mk": "test: override\noverride:\n\texit 0\n.PHONY: test\nSHELL = /bin/true\n"},
    ),
    "a make in a subfolder": (
        "make -s -C sub test || exit 1",
        {"sub/Makefile": MAKEFILE.replace("answer", "../answer")},
        {"sub/test": ""},
    ),
    "a target that is computed, by a make of the judge's script": (
        "sh ./judge.sh || exit 1",
        {"Makefile": COMPUTED, "judge.sh": "make -s one\n"},
        {"one": ""},
    ),
    "a target that is computed, in a folder that the judge's script names": (
        "sh ./judge || exit 1",
        {
            "sub/Makefile": COMPUTED.replace("answer", "../answer"),
            "judge": "if false; then exit; else make -sC sub; fi\n",
        },
        {"sub/one": ""},
    ),
    "a folder of Python": (
        "python3 tools",
        {"tools/__main__.py": f"import sys; sys.path += ['.']\n{UNITS}unittest.main()\n"},
        {"tools/__main__.py": ""},
    ),
    "a module in a folder of Python": (
        "python3 tools",
        {"tools/__main__.py": f"import sys; sys.path += ['.']\n{UNITS}unittest.main()\n"},
        {"tools/unittest.py": EXITS},
    ),
    "the module of unittest": (
        "python3 -m unittest -q check_suite",
        {"check_suite.py": UNITS},
        {"check_suite.py": ""},
    ),
    "a package in place of the module of unittest": (
        "python3 -m unittest -q check_suite",
        {"check_suite.py": UNITS},
        {"check_suite/__init__.py": EXITS},
    ),
    "a test of the module of unittest": (
        "python3 -m unittest -q quality.suite.T.test",
        {"quality/suite.py": UNITS},
        {"quality/suite.py": EXITS},
    ),
    "a package in place of a script's module": (
        "python3 -m check",
        {"check.py": UNITS + "unittest.main()\n"},
        {"check/__init__.py": "", "check/__main__.py": ""},
    ),
    "a package at the top": (
        f"{PYTEST} checks || exit 1",
        {
            "__main__.py": "",
            "checks/__init__.py": "",
            "checks/test_a.py": "import sys; sys.path += ['.']\n" + UNITS,
        },
        {"__init__.py": EXITS},
    ),
    "a library beside the tests": (
        f"{PYTEST} checks || exit 1",
        {"checks/test_a.py": "import sys; sys.path += ['.']\nimport yaml\n" + UNITS},
        {"checks/yaml.py": EXITS},
    ),
    "tests of Node": (
        "node --test test/* || exit 1",
        {"package.json": "{}", "test/index.mjs": NODE},
        {"test/index.mjs": "", "test/index.js": ""},
    ),
    "tests of Node by their names": (
        "node --test || exit 1",
        {"package.json": "{}", "src/a.spec.mjs": NODE, "src/b-test.mjs": NODE},
        {"src/b-test.mjs": "", "src/a.test.mjs": ""},
    ),
    "settings of tox": (
        "sh ./run-tox.sh || exit 1",
        {"run-tox.sh": TOX},
        {"setup.cfg": "[testenv]\ncommands=true\n"},
    ),
}
SOLVED = {"calc.py": ADD.replace("-", "+"), "answer": "4\n"}


@pytest.mark.parametrize(
    "what", RUNNERS if DEEP else [list(RUNNERS)[i] for i in (0, 2, 4, 6, 11, 15, 17)]
)
async def test_a_path_that_a_runner_takes_as_its_own_is_not_the_agents(tmp_path, what):
    script, files, cheat = RUNNERS[what]
    if not shutil.which(script.split()[0]):
        pytest.skip(f"{script.split()[0]} is not installed")
    left = Left(tmp_path, {"calc.py": ADD, "answer": "5\n", **files}, did=cheat)
    spec = shell(script, timeout=60)
    judged = await left.judge(spec)
    assert judged.reward == 0.0, left.log
    assert {
        path for path in cheat if any(line.startswith(path) for line in judged.evidence["refused"])
    }
    left.do(SOLVED)
    assert (await left.judge(spec)).reward == 1.0, left.log


TELLS = "cat /hidden/expected.txt tests/expected.txt 2> /dev/null || echo 5\n"
REWRITES = (
    "echo 5; (until test -e before; do sleep 0.01; done; while sleep 0.01; do echo 4 > out.txt;"
    " done) > /dev/null 2>&1 &\n"
)
"""It begins when the judge has: what a program writes before that is its answer."""
WAITS = (
    "cp out.txt before; for i in 1 2 3 4 5; do cmp -s out.txt before || exit 0; sleep 0.02; done"
)


@sandboxed
@pytest.mark.parametrize("program", [TELLS, REWRITES], ids=["tells", "rewrites"])
@pytest.mark.parametrize("place", ["/hidden", "tests"])
async def test_a_program_that_is_run_before_the_judge_sees_none_of_its_files_and_has_ended(
    tmp_path, place, program
):
    hidden = tmp_path / "hidden"
    if place == "tests":
        write(hidden, {"tests/expected.txt": "4\n"})
        laid = {"tests": str(hidden)}
    else:
        write(hidden, {"expected.txt": "4\n"})
        laid = {"mounts": {"/hidden": str(hidden)}}
    left = Left(tmp_path, {"main.sh": ""}, SandboxRuntime(), did={"main.sh": program})
    spec = shell(f"{WAITS}; cmp out.txt {place}/expected.txt", paths=["main.sh", "out.txt"], **laid)
    spec["run"] = ["sh", "-c", "sh main.sh > out.txt"]
    assert (await left.judge(spec)).reward == 0.0, left.log
    left.do({"main.sh": "echo 4\n"})
    assert (await left.judge(spec)).reward == 1.0, left.log


async def test_what_is_planted_by_a_program_that_is_run_before_the_judge_is_not_applied(tmp_path):
    plants = (
        "echo 4; echo 'test:' > Makefile; ln -s tests/expected.txt out.txt; mkdir tests; echo 5 >"
        " tests/expected.txt"
    )
    write(tmp_path / "hidden", {"tests/expected.txt": "4\n"})
    left = Left(
        tmp_path,
        {"Makefile": "test:\n\tcmp out.txt tests/expected.txt\n", "main.sh": ""},
        did={"main.sh": plants},
    )
    spec = shell("make -s test || exit 1", tests=str(tmp_path / "hidden"), run=["sh", "main.sh"])
    judged = await left.judge(spec)
    assert judged.reward == 0.0, left.log
    assert {"Makefile: planted", "out.txt: symlink"} <= {*judged.evidence["refused"]}
    left.do({"main.sh": "echo 4 > out.txt\n"})
    assert (await left.judge(spec)).reward == 1.0, left.log


@pytest.mark.parametrize("runtime", [pytest.param(SandboxRuntime, marks=sandboxed), Container])
async def test_a_shell_judge_ends_what_the_agents_program_left_before_it_compares(
    tmp_path, runtime
):
    if runtime is Container:
        require_podman()
    left = Left(tmp_path, {"main.sh": ""}, runtime(), did={"main.sh": REWRITES})
    judges = f"sh main.sh > out.txt; kill -KILL -1; {WAITS}; grep -qx 4 out.txt"
    spec = shell(judges, paths=["main.sh"], timeout=60)
    left.do({"main.sh": "echo 4\n"})
    assert (await left.judge(spec)).reward == 1.0, left.log
    left.do(
        {
            "main.sh": (
                "echo 5; (sleep 600; echo 4 > out.txt) > /dev/null 2>&1 & sleep 600 > /dev/null"
                " 2>&1 &\n"
            )
        }
    )
    judged = await left.judge(
        shell(f"{judges}; ls /proc | grep -c '^[0-9]'; exit 1", paths=["main.sh"], timeout=60)
    )
    assert (judged.reward, int(left.log.split()[-1]) <= 5) == (0.0, True), left.log


async def test_a_function_judges_what_a_program_left_that_was_run_before(tmp_path, monkeypatch):
    write(
        tmp_path / "modules",
        {"compares.py": "def judge(folder): return float((folder / 'out.txt').read_text())\n"},
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    left = Left(tmp_path / "left", {"main.sh": "echo 0"}, did={"main.sh": "echo 0.5"})
    run = ["sh", "-c", "sh main.sh > out.txt"]
    spec = {"kind": "python", "function": "compares:judge", "run": run, "timeout": 60}
    assert (await left.judge(spec)).reward == 0.5
    left.do({"main.sh": "kill -9 $PPID"})
    judged = await left.judge(spec)
    assert (judged.reward, judged.evidence["untouched_start"]) == (0.0, 0.0)


async def test_a_program_is_run_before_its_judge_in_a_container(tmp_path):
    require_podman()
    write(tmp_path / "hidden", {"tests/expected.txt": "4\n"})
    left = Left(tmp_path, {"main.sh": ""}, Container(), did={"main.sh": TELLS})
    spec = shell(
        f"{WAITS}; cmp out.txt tests/expected.txt",
        tests=str(tmp_path / "hidden"),
        paths=["main.sh", "out.txt"],
    )
    spec["run"] = ["sh", "-c", "sh main.sh > out.txt"]
    assert (await left.judge(spec)).reward == 0.0, left.log
    left.do({"main.sh": "echo 4\n"})
    assert (await left.judge(spec)).reward == 1.0, left.log
