"""Cheats of agents' programs that a judge runs, and of new files that a judge's programs would take
as its own."""

import shutil

import pytest

from rolltap.trainer.boxes.sandbox import SandboxRuntime
from tests.boxes import require_podman, sandboxed
from tests.deep import cases
from tests.security.test_verdicts import Container
from tests.trainer.judges.sessions import Left, read_cases, shell, write

LINKS = {
    "to a file that the judge lays": {"out.txt": "tests/hidden.txt"},
    "to a folder that the judge lays": {"mine": "tests", "out.txt": "mine/hidden.txt"},
    "through a link of the start": {"out.txt": "old/hidden.txt"},
    "to the workspace": {"here": ".", "out.txt": "here/tests/hidden.txt"},
}


@pytest.mark.parametrize("planted", [{}, {"tests/hidden.txt": "mine\n"}], ids=["", "planted"])
@pytest.mark.parametrize("how", LINKS)
async def test_a_link_to_what_the_judge_lays_out_is_not_applied(tmp_path, how, planted):
    write(tmp_path / "hidden", {"tests/hidden.txt": "42\n"})
    left = Left(tmp_path, {"main.sh": "", "data.txt": "1\n"})
    for folder in (left.start.folder, left.workspace):
        (folder / "old").symlink_to("tests")
    left.do(planted)
    for name, target in LINKS[how].items():
        (left.workspace / name).symlink_to(target)
    (left.workspace / "data").symlink_to("data.txt")
    script = "cmp data data.txt && cmp out.txt tests/hidden.txt || exit 1"
    spec = shell(script, tests=str(tmp_path / "hidden"), paths=["**"])
    evidence = await left.earns(0.0, spec)
    assert "out.txt: symlink" in evidence["refused"]
    assert "data: symlink" not in evidence["refused"]
    (left.workspace / "out.txt").unlink()
    left.do({"out.txt": "42\n"})
    await left.earns(1.0, spec)


MAKEFILE = """CHECKS = one two.ok
-include local.mk
test: $(CHECKS)
	test "$$(cat answer)" = 4
$(CHECKS): answer
	grep -qx 4 answer
%.done:
	grep -qx 4 answer
"""
UNITS = """import unittest, calc
class T(unittest.TestCase):
    def test(self): self.assertEqual(calc.add(2, 2), 4)
"""
COMPUTED = "$(shell echo one): answer\n\tgrep -qx 4 answer\n"
NODE = """import assert from 'node:assert'; import test from 'node:test'; import fs from 'node:fs'
test('it', () => assert.equal(fs.readFileSync('answer', 'utf8'), '4\\n'))
"""
RUNNERS_TEXT = """
== a file with the name of make's target
judge: make -s test || exit 1
-- start/Makefile
<makefile>
-- agent/test
== a folder with the name of make's target
judge: make -s test || exit 1
-- start/Makefile
<makefile>
-- agent/test/a
== a target that a variable names
judge: make -s one two.ok || exit 1
-- start/Makefile
<makefile>
-- agent/one
-- agent/two.ok
== a target by a pattern
judge: make -s all.done || exit 1
-- start/Makefile
<makefile>
-- agent/all.done
== an included file
judge: make -s test || exit 1
-- start/Makefile
<makefile>
-- agent/local.mk
test: override
override:
	exit 0
.PHONY: test
SHELL = /bin/true
== a make in a subfolder
judge: make -s -C sub test || exit 1
-- start/sub/Makefile
<makefile of sub>
-- agent/sub/test
== a target that is computed, by a make of the judge's script
judge: sh ./judge.sh || exit 1
-- start/Makefile
<computed>
-- start/judge.sh
make -s one
-- agent/one
== a target that is computed, in a folder that the judge's script names
judge: sh ./judge || exit 1
-- start/sub/Makefile
<computed in sub>
-- start/judge
if false; then exit; else make -sC sub; fi
-- agent/sub/one
== a folder of Python
judge: python3 tools
-- start/tools/__main__.py
import sys; sys.path += ['.']
<units>
unittest.main()
-- agent/tools/__main__.py
== a module in a folder of Python
judge: python3 tools
-- start/tools/__main__.py
import sys; sys.path += ['.']
<units>
unittest.main()
-- agent/tools/unittest.py
<exits>
== the module of unittest
judge: python3 -m unittest -q check_suite
-- start/check_suite.py
<units>
-- agent/check_suite.py
== a package in place of the module of unittest
judge: python3 -m unittest -q check_suite
-- start/check_suite.py
<units>
-- agent/check_suite/__init__.py
<exits>
== a test of the module of unittest
judge: python3 -m unittest -q quality.suite.T.test
-- start/quality/suite.py
<units>
-- agent/quality/suite.py
<exits>
== a package in place of a script's module
judge: python3 -m check
-- start/check.py
<units>
unittest.main()
-- agent/check/__init__.py
-- agent/check/__main__.py
== a package at the top
judge: <pytest> checks || exit 1
-- start/__main__.py
-- start/checks/__init__.py
-- start/checks/test_a.py
import sys; sys.path += ['.']
<units>
-- agent/__init__.py
<exits>
== a library beside the tests
judge: <pytest> checks || exit 1
-- start/checks/test_a.py
import sys; sys.path += ['.']
import yaml
<units>
-- agent/checks/yaml.py
<exits>
== tests of Node
judge: node --test test/* || exit 1
-- start/package.json
{}
-- start/test/index.mjs
<node>
-- agent/test/index.mjs
-- agent/test/index.js
== tests of Node by their names
judge: node --test || exit 1
-- start/package.json
{}
-- start/src/a.spec.mjs
<node>
-- start/src/b-test.mjs
<node>
-- agent/src/b-test.mjs
-- agent/src/a.test.mjs
== settings of tox
judge: sh ./run-tox.sh || exit 1
-- start/run-tox.sh
grep -q commands= setup.cfg || exec grep -qx 4 answer
-- agent/setup.cfg
[testenv]
commands=true
"""
RUNNERS = read_cases(
    RUNNERS_TEXT,
    **{"makefile of sub": MAKEFILE.replace("answer", "../answer")},
    **{"computed in sub": COMPUTED.replace("answer", "../answer")},
    makefile=MAKEFILE,
    computed=COMPUTED,
    units=UNITS,
    exits="import os\nos._exit(0)\n",
    node=NODE,
    pytest="<python> -m pytest -q -p no:cacheprovider",
)


@pytest.mark.parametrize("what", cases(RUNNERS, 0, 2, 4, 6, 11, 15, 17))
async def test_a_path_that_a_runner_takes_as_its_own_is_not_the_agents(tmp_path, what):
    case = RUNNERS[what]
    script = case.fields["judge"]
    program = script.split()[0]
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    start = {"calc.py": "def add(a, b): return a - b\n", "answer": "5\n", **case.below("start")}
    cheat = case.below("agent")
    left = Left(tmp_path, start, did=cheat)
    evidence = await left.earns(0.0, shell(script))
    refused = "\n".join(evidence["refused"])
    assert any(path in refused for path in cheat)
    left.do({"calc.py": "def add(a, b): return a + b\n", "answer": "4\n"})
    await left.earns(1.0, shell(script))


TELLS = "cat /hidden/expected.txt tests/expected.txt 2> /dev/null || echo 5\n"
REWRITES = """
echo 5
(until test -e before; do sleep 0.01; done; while sleep 0.01; do echo 4 > out.txt; done) > /dev/null 2>&1 &
"""
"""It begins when the judge has: what a program writes before that is its answer."""
WAITS = (
    "cp out.txt before; for i in 1 2 3 4 5; do cmp -s out.txt before || exit 0; sleep 0.02; done"
)
RUN = ["sh", "-c", "sh main.sh > out.txt"]


async def check_that_a_program_before_the_judge_sees_nothing(left, place, program):
    """Check that a program earns nothing that prints or writes what the judge expects, and an
    honest one 1."""
    hidden = left.folder / "hidden"
    if place == "tests":
        write(hidden, {"tests/expected.txt": "4\n"})
        laid = {"tests": str(hidden)}
    else:
        write(hidden, {"expected.txt": "4\n"})
        laid = {"mounts": {"/hidden": str(hidden)}}
    script = f"{WAITS}; cmp out.txt {place}/expected.txt"
    spec = shell(script, paths=["main.sh", "out.txt"], run=RUN, **laid)
    left.do({"main.sh": program})
    await left.earns(0.0, spec)
    left.do({"main.sh": "echo 4\n"})
    await left.earns(1.0, spec)


@sandboxed
@pytest.mark.parametrize("program", [TELLS, REWRITES], ids=["tells", "rewrites"])
@pytest.mark.parametrize("place", ["/hidden", "tests"])
async def test_a_program_that_is_run_before_the_judge_sees_none_of_its_files_and_has_ended(
    tmp_path, place, program
):
    left = Left(tmp_path, {"main.sh": ""}, SandboxRuntime())
    await check_that_a_program_before_the_judge_sees_nothing(left, place, program)


async def test_a_program_is_run_before_its_judge_in_a_container(tmp_path):
    require_podman()
    left = Left(tmp_path, {"main.sh": ""}, Container())
    await check_that_a_program_before_the_judge_sees_nothing(left, "tests", TELLS)


PLANTS = """
echo 4
echo 'test:' > Makefile
ln -s tests/expected.txt out.txt
mkdir tests
echo 5 > tests/expected.txt
"""


async def test_what_is_planted_by_a_program_that_is_run_before_the_judge_is_not_applied(tmp_path):
    write(tmp_path / "hidden", {"tests/expected.txt": "4\n"})
    start = {"Makefile": "test:\n\tcmp out.txt tests/expected.txt\n", "main.sh": ""}
    left = Left(tmp_path, start, did={"main.sh": PLANTS})
    hidden = str(tmp_path / "hidden")
    spec = shell("make -s test || exit 1", tests=hidden, run=["sh", "main.sh"])
    evidence = await left.earns(0.0, spec)
    assert {"Makefile: planted", "out.txt: symlink"} <= {*evidence["refused"]}
    left.do({"main.sh": "echo 4 > out.txt\n"})
    await left.earns(1.0, spec)


STAYS = """
echo 5
(sleep 600; echo 4 > out.txt) > /dev/null 2>&1 &
sleep 600 > /dev/null 2>&1 &
"""


@pytest.mark.parametrize("runtime", [pytest.param(SandboxRuntime, marks=sandboxed), Container])
async def test_a_shell_judge_ends_what_the_agents_program_left_before_it_compares(
    tmp_path, runtime
):
    if runtime is Container:
        require_podman()
    left = Left(tmp_path, {"main.sh": ""}, runtime(), did={"main.sh": "echo 4\n"})
    judges = f"sh main.sh > out.txt; kill -KILL -1; {WAITS}; grep -qx 4 out.txt"
    await left.earns(1.0, shell(judges, paths=["main.sh"]))
    left.do({"main.sh": STAYS})
    count = "ls /proc | grep -c '^[0-9]'"
    await left.earns(0.0, shell(f"{judges}; {count}; exit 1", paths=["main.sh"]))
    assert int(left.log.split()[-1]) <= 5


async def test_a_function_judges_what_a_program_left_that_was_run_before(tmp_path, monkeypatch):
    compares = "def judge(folder): return float((folder / 'out.txt').read_text())\n"
    write(tmp_path / "modules", {"compares.py": compares})
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    left = Left(tmp_path / "left", {"main.sh": "echo 0"}, did={"main.sh": "echo 0.5"})
    spec = {"kind": "python", "function": "compares:judge", "run": RUN}
    await left.earns(0.5, spec)
    left.do({"main.sh": "kill -9 $PPID"})
    assert (await left.earns(0.0, spec))["untouched_start"] == 0.0
