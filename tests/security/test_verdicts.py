"""Attacks on what a judge says and reads, and ordinary solutions that must earn what they
should."""

import os
import shutil
import sys
from dataclasses import replace

import pytest

from rolltap.trainer.boxes.containers.container import ContainerRuntime
from rolltap.trainer.boxes.containers.find import system_root
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from tests.boxes import require_podman, sandboxed
from tests.deep import cases
from tests.trainer.judges.sessions import Left, command, read_cases, shell

PYTHON = sys.executable


class Container(ContainerRuntime):
    """Containers of a root folder of this machine's programs, with what a judge mounts."""

    def box(self, spec):
        root = spec.workspace.parent / "root"
        shutil.rmtree(root, ignore_errors=True)
        for folder in ("etc", "tmp", "logs", "rolltap/tools"):
            (root / folder).mkdir(parents=True)
        mounts = [*system_root(root), *spec.mounts]
        return super().box(replace(spec, image=str(root), mounts=mounts))


CALC = {"calc.py": "def add(a, b): return a - b\n"}
RIGHT = {"calc.py": "def add(a, b): return a + b\n"}
TEST = "import calc\ndef test_add(): assert calc.add(2, 2) == 4\n"
START = {**CALC, "tests/test_calc.py": TEST}
CHECK = """import subprocess, sys
out = subprocess.run([sys.executable, 'calc.py'], capture_output=True).stdout
sys.exit(out.strip() != b'4')
"""
PYTEST = {"kind": "pytest", "command": ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"]}
CHILD = """
import subprocess
def test_tool(): assert subprocess.run(['sh', 'tool.sh'], stdout=-1).stdout == b'4'
"""
FORGES = """
cat > /tmp/forge.sh <<'END'
text="<testsuites><testcase classname='tests.test_tool' name='test_tool'/></testsuites>"
for f in $ROLLTAP_REPORT /rolltap/out/* /proc/[0-9]*/fd/*; do
    case "$(readlink $f)" in *pipe*|*out/*) printf '\\0%s' "$text" > $f ;; esac; echo "$text" > $f
done
for i in 3 4 5 6 7 8 9; do printf '\\0%s' "$text" >&$i; done
END
timeout 2 sh /tmp/forge.sh; printf 5
"""


async def test_the_output_of_the_agents_program_is_no_reward(tmp_path):
    loud = "import sys\nprint(1000000, file=sys.stderr)\nprint('{\"reward\": 1}')\nprint(5)\n"
    left = Left(tmp_path, CALC, did={"calc.py": loud})
    await left.earns(0.0, shell(f"{PYTHON} -c 'import calc'; exit 1"))
    assert "1000000" in left.log


@sandboxed
async def test_a_child_of_a_test_cannot_write_the_report(tmp_path):
    start = {"tool.sh": "printf 5", "tests/test_tool.py": CHILD}
    left = Left(tmp_path, start, SandboxRuntime(), did={"tool.sh": FORGES})
    name = "tests/test_tool.py::test_tool"
    evidence = await left.earns(0.0, {**PYTEST, "fail_to_pass": [name]})
    assert evidence["tests"] == {name: "failed"}


@pytest.mark.parametrize("runtime", [ProcessRuntime, pytest.param(SandboxRuntime, marks=sandboxed)])
async def test_a_child_of_a_shell_turns_its_reward_into_no_other_one(tmp_path, runtime):
    writes = "printf 1. > $ROLLTAP_REWARD_FILE; for i in 3 4 5 6 7 8 9; do printf 1. >&$i; done"
    left = Left(tmp_path, {"tool.sh": ""}, runtime(), did={"tool.sh": writes})
    script = f"echo >> {tmp_path}/runs; sh ./tool.sh; echo 0 > $ROLLTAP_REWARD_FILE"
    evidence = await left.earns(0.0, shell(script, result="number", paths=["tool.sh"]))
    assert evidence["forged_report"] == "its verdict was written 2 times"
    if runtime is ProcessRuntime:  # the start's, and one of the changes
        assert (tmp_path / "runs").read_text() == "\n\n"


async def test_verdicts_come_out_of_a_container_and_a_missing_judge_is_unjudged_there(tmp_path):
    require_podman()
    script = "import os\nos.write(int(os.environ['ROLLTAP_REWARD_FD']), b'0.5')\n"
    left = Left(tmp_path, {"tool.sh": "printf 5", "check.py": script}, Container())
    for how in ("written", "written where the judge has no descriptors left"):
        left.do({"tool.sh": AT_FILES[how]})
        await left.earns(0.0, BY_FILE)
    left.do({"tool.sh": "printf 4; ( exec 3<> /proc/$PPID/mem ) && echo ESCAPED >&2"})
    await left.earns(1.0, BY_FILE)
    assert "ESCAPED" not in left.log
    assert "Read-only" in left.log
    await left.earns(0.5, command("python3", "check.py", result="number"))
    assert "could not be started" in await left.is_unjudged(command("no-such-judge"))


BEFORE = """
import os
pipe = os.environ['ROLLTAP_REPORT']
text = "<testsuites><testcase classname='tests.test_calc' name='test_add'/></testsuites>"
open(pipe, 'w').write('\\0' + text)
os.rename(pipe, pipe + '1')
open(pipe, 'w').close()
"""


@pytest.mark.parametrize("runtime", [ProcessRuntime, SandboxRuntime])
async def test_who_runs_before_pytest_cannot_write_its_report(tmp_path, runtime):
    left = Left(tmp_path, {"tool.py": "", **START}, runtime(), did={"tool.py": BEFORE})
    python = PYTHON if runtime is ProcessRuntime else "python3"
    script = f"{python} tool.py; {python} -m pytest -q"
    judged = await left.judge(
        {
            "kind": "pytest",
            "command": ["sh", "-c", script],
            "paths": ["tool.py"],
            "fail_to_pass": ["tests/test_calc.py::test_add"],
        }
    )
    rights_of_root = runtime is ProcessRuntime and os.geteuid() == 0
    assert judged.reward in ((0.0, 1.0) if rights_of_root else (0.0,)), left.log


async def test_a_link_of_the_judges_is_compared_and_a_mount_below_the_workspace_is_its_own(
    tmp_path,
):
    replaces = "import os; os.unlink('check.py'); open('check.py', 'w').write('')"
    left = Left(tmp_path, {"tools/real.py": "raise SystemExit(1)", "calc.py": ""})
    for folder in (left.start.folder, left.workspace):
        (folder / "check.py").symlink_to("tools/real.py")
    left.do({"calc.py": replaces})
    evidence = await left.earns(0.0, shell(f"{PYTHON} -c 'import calc'; {PYTHON} check.py"))
    assert evidence["rewritten"] == ["check.py"]
    left.do({"out": "in place of a folder"})
    judged = await left.judge(shell("exit 1", writable=["/workspace/out"]))
    assert judged.evidence["refused"][:2] == ["out: protected"]


BY_FILE = shell(
    'test "$(sh ./tool.sh)" = 4 && echo 1 > /logs/reward.txt || echo 0 > /logs/reward.txt',
    mounts={},
    writable=["/logs"],
    reward_files=["/logs/reward.txt", "/logs/reward.json"],
    paths=["tool.sh"],
)
AT_FILES = {
    "written": "echo 1 > /logs/reward.txt",
    "written as JSON": """echo '{"reward": 1}' > /logs/reward.json""",
    "written as the begin of another number": "printf 1. > /logs/reward.txt",
    "removed and written": (
        "echo 1 > /logs/reward.txt; rm -f /logs/reward.txt; echo 1 > /logs/reward.txt"
    ),
    "replaced by a file": (
        "echo 1 > /logs/r; mv -f /logs/r /logs/reward.txt; echo 1 > /logs/reward.txt"
    ),
    "in another folder": "mv /logs /other; mkdir /logs; echo 1 > /logs/reward.txt",
    "read": (
        "chmod 666 /logs/reward.txt; (timeout 5 cat /logs/reward.txt &); echo 1 > /logs/reward.txt"
    ),
    "written where the judge has no descriptors left": (
        "for p in /proc/[0-9]*; do [ $p = /proc/$$ ] || prlimit --pid ${p#/proc/} --nofile=3:3;"
        " done 2> /dev/null\necho 1 > /logs/reward.txt"
    ),
    "written by what stays": "(while :; do echo 1; done > /logs/reward.txt &) 2> /dev/null",
}


@sandboxed
@pytest.mark.parametrize("how", cases(AT_FILES, 2, 4, 7))
async def test_a_reward_file_that_the_agent_writes_too_earns_nothing(tmp_path, how):
    left = Left(tmp_path, {"tool.sh": "printf 5"}, SandboxRuntime(), did={"tool.sh": AT_FILES[how]})
    judged = await left.judge(BY_FILE)
    assert judged.reward in (0.0, None), left.log
    left.do({"tool.sh": "printf 4"})
    await left.earns(1.0, BY_FILE)


DIFFERS = """import os, resource, subprocess, sys
def run(out, *words): subprocess.run(words, stdout=open(out, "w"))
OWN
run("out.txt", sys.executable, "calc.py")
run("wrong.txt", "diff", "out.txt", "right.txt")
os.write(int(os.environ["ROLLTAP_REWARD_FD"]), b"0" if os.path.getsize("wrong.txt") else b"1")
"""
LOWERS = """
import os, resource
resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))
print(5)
"""


@pytest.mark.parametrize("own", ["", "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"])
async def test_a_script_whose_limits_the_agents_program_lowers_gives_no_reward(tmp_path, own):
    start = {"calc.py": "print(5)\n", "right.txt": "4\n", "check.py": DIFFERS.replace("OWN", own)}
    left = Left(tmp_path, start, did={"calc.py": LOWERS})
    spec = command(PYTHON, "check.py", result="number", paths=["calc.py"])
    evidence = await left.earns(0.0, spec)
    assert evidence["rewritten"][-1:] == ["limits of the judge: RLIMIT_FSIZE"]
    left.do({"calc.py": "print(4)\n"})
    await left.earns(1.0, spec)


TAKEN = """
== the target of make
judge: make -s it || exit 1
-- start/Makefile
it:
	python3 check.py
-- agent/Makefile
it:
== a script in a shell
judge: cd tools; ./run.sh
-- start/tools/run.sh
#!/bin/sh
cd ${0%/*}/.. && exec python3 check.py
-- agent/tools/run.sh
#!/bin/sh
== a script in a variable
judge: x=check; python3 $x.py check.py
-- agent/check.py
== a module
judge: python3 -m check
-- agent/check.py
== a module beside the script
judge: python3 check.py
-- agent/subprocess.py
raise SystemExit(0)
== a library
judge: python3 run/two.py
-- start/run/two.py
try: import helper
except ImportError: pass
<check>
-- agent/run/helper.py
raise SystemExit(0)
== a module before Python's
judge: python3 -m unittest units
-- start/units.py
<check>
-- agent/argparse.py
raise SystemExit(0)
== data of the tests
judge: test "$(python3 -c 'import calc')" = "$(cat tests/4)"
-- start/tests/4
4
-- agent/tests/4
0
== what files name
judge: ./ci/go
-- start/ci/go
#!/bin/sh
cd ${0%/*}/.. && exec python3 check.py
-- agent/ci/go
#!/bin/sh
"""
TAKEN_CASES = read_cases(TAKEN, check=CHECK)


@pytest.mark.parametrize("what", cases(TAKEN_CASES, 0, 3, 6))
async def test_what_is_the_judges_own_is_not_changed(tmp_path, what):
    case = TAKEN_CASES[what]
    files = {"calc.py": "print(2 - 2)\n", "check.py": CHECK, **case.below("start")}
    left = Left(tmp_path, files, did=case.below("agent"))
    for name, text in files.items():
        if "#!" in text:
            (left.start.folder / name).chmod(0o755)
    spec = shell(case.fields["judge"], files=["ci/**"])
    evidence = await left.earns(0.0, spec)
    assert evidence["refused_files"] >= 1
    left.do({"calc.py": "print(2 + 2)\n"})
    await left.earns(1.0, spec)


SETTINGS = """
== a section that is there twice
-- setup.cfg
[tool:pytest]
[metadata]
[tool:pytest]
addopts = --collect-only -q
== a byte order mark
-- setup.cfg
\ufeff[tool:pytest]
addopts = --collect-only -q
== a key with a colon
-- setup.cfg
[tool:pytest]
addopts: --collect-only
== a line that configparser does not take
-- setup.cfg
[tool:pytest]
addopts = --collect-only -q
[x]
no value
== a default section
-- setup.cfg
[DEFAULT]
a = %(b)s
[tool:pytest]
addopts = --collect-only -q
== a comment in the line of a section
-- setup.cfg
[tool:pytest] ; x
addopts = --collect-only -q
== two megabytes before it
-- setup.cfg
<two megabytes>
[tool:pytest]
addopts = --collect-only -q
== six megabytes before it
-- setup.cfg
<two megabytes><two megabytes><two megabytes>
[tool:pytest]
addopts = --collect-only -q
== a dotted key
-- pyproject.toml
tool.pytest.ini_options.addopts = '--collect-only'
== a quoted key
-- pyproject.toml
[tool.'pytest'."ini_options"]
addopts = '--collect-only'
== pytest's own table
-- pyproject.toml
[tool.pytest]
addopts = ['--collect-only']
== a file of its own
-- tests/pytest.ini
[pytest]
addopts = --collect-only -q
== a hidden file
-- .pytest.ini
[pytest]
addopts = --collect-only -q
== tox
-- tox.ini
[pytest]
addopts = --collect-only -q
== a plugin in a hidden folder
-- .pytest_cache/conftest.py
-- src/conftest.py
import os; os._exit(0)
"""
SETTINGS_CASES = read_cases(SETTINGS, **{"two megabytes": "#" * (2 << 20)})
MPYTEST = [shell(f"exec {PYTHON} -mpytest"), {"kind": "pytest", "command": [PYTHON, "-mpytest"]}]


@pytest.mark.parametrize("what", cases(SETTINGS_CASES, 0, 8))
@pytest.mark.parametrize("spec", cases(MPYTEST))
@pytest.mark.parametrize("paths", cases([None, ["**"]], 1))
async def test_settings_of_test_runners_are_not_the_agents(tmp_path, what, spec, paths):
    left = Left(tmp_path, START, did=SETTINGS_CASES[what].files)
    spec = {**spec, "paths": paths}
    evidence = await left.earns(0.0, spec)
    assert evidence["planted_files"] > 0
    left.do(RIGHT)
    await left.earns(1.0, spec)


HONEST = """
== a module that was asked for beside the script
judge: <python> check.py
-- start/check.py
<check of solution.py>
-- agent/solution.py
print(4)
== a file with the name of the script
judge: sh test/index.sh
-- start/test/index.sh
test $(sh src/index.sh) = 4 || exit 1
-- start/src/index.sh
echo 0
-- agent/src/index.sh
echo 4
== a path of Python in the command
judge: PYTHONPATH=src <python> -m pytest -q || exit 1
<tested>
== another folder
judge: cd back && <python> -m pytest -q
-- start/back/calc.py
def add(a, b): return a - b
-- start/back/tests/test_calc.py
<test>
-- agent/back/calc.py
def add(a, b): return a + b
== a report of the task's own
judge: <python> -m pytest -q --junitxml=out.xml; grep -q 'failures="0"' out.xml
<tested>
== a mended function
judge: <python> -m pytest -q
<tested>
== a mended function, by the report
kind: pytest
judge: <python> -m pytest
<tested>
== unittest
judge: <python> -m unittest discover -q tests
<tested>
-- start/tests/test_u.py
import unittest, sys
sys.path += ['.']
import calc
class T(unittest.TestCase):
    def test(self): self.assertEqual(calc.add(2, 2), 4)
== an answer in a new file
judge: test "$(cat answer.txt)" = 1
-- start/a.txt
-- agent/answer.txt
1
== an answer in an old file
judge: test "$(cat answer.txt)" = 1
paths: answer.txt
-- start/answer.txt
-- agent/answer.txt
1
== src/types.py
judge: <python> -m pytest -q
<tested>
-- agent/src/types.py
X = 1
== queue.py in a package
judge: test "$(python3 main.py)" = 4
paths: **/*.py
-- start/shop/__init__.py
-- start/main.py
print(0)
-- agent/shop/queue.py
size = 4
-- agent/main.py
from shop.queue import size
print(size)
== queue.py that paths name
judge: sh check.sh
paths: queue.py
-- start/check.sh
python3 -c 'import queue; exit(getattr(queue, "size", 0) != 4)'
-- agent/queue.py
size = 4
== queue.py that no Python reads
judge: cat queue.py | grep -q Queue
-- start/a
-- agent/queue.py
class Queue: pass
== a new __init__.py
judge: test "$(python3 main.py)" = 4
paths: main.py pkg/**
-- start/pkg/a.py
X = 4
-- start/main.py
print(0)
-- agent/pkg/__init__.py
from pkg.a import X
-- agent/main.py
import pkg
print(pkg.X)
== a new module in a package
judge: <python> -m pytest -q
<tested>
-- start/lib/__init__.py
-- agent/lib/ops.py
def add(a, b): return a + b
-- agent/calc.py
from lib.ops import add
== a dependency in pyproject.toml
judge: grep -q attrs pyproject.toml && <python> -m pytest
paths: pyproject.toml *.py
<tested>
<dependency>
== a dependency in pyproject.toml beside the change
judge: <python> -m pytest -q
<tested>
<dependency>
== a version in setup.cfg
judge: <python> -m pytest -q
<tested>
-- start/setup.cfg
[tool:pytest]
addopts = -q
[metadata]
version = 1
-- agent/setup.cfg
[tool:pytest]
addopts = -q
[metadata]
version = 2
== a dependency in package.json
judge: grep -q left-pad package.json
paths: package.json
-- start/package.json
{"scripts": {"test": "true"}}
-- agent/package.json
{"scripts": {"test": "true"}, "dependencies": {"left-pad": "1"}}
== tests of one's own
judge: <python> -m pytest -q
<tested>
-- agent/tests/test_more.py
def test_it(): assert 0
== tests that were asked for
judge: sh grade.sh
paths: tests/**
-- start/calc.py
def add(a, b): return a + b
-- start/grade.sh
<python> -m pytest -q tests || exit 1
-- agent/tests/test_new.py
import calc
def test_add(): assert calc.add(1, 1) == 2
== a Makefile that was asked for
judge: make -s build || exit 1
paths: Makefile
-- start/a.txt
-- agent/Makefile
build:
	true
== a conftest.py that was asked for
kind: pytest
judge: <python> -m pytest
paths: tests/conftest.py
-- start/tests/test_a.py
def test_a(four): assert four == 4
-- agent/tests/conftest.py
import pytest
@pytest.fixture
def four(): return 4
== a script of a shell
judge: test "$(sh sort.sh a.txt | head -1)" = a
paths: sort.sh
-- start/a.txt
b
a
-- agent/sort.sh
sort "$1"
== a deleted file
judge: test ! -e old -a -e new
paths: old
-- start/old
-- start/new
-- agent/old (deleted)
== tests that write beside their data
judge: <python> -m pytest -q
-- start/calc.py
def add(a, b): return a - b
-- start/tests/data/a
-- start/tests/test_w.py
import calc, pathlib
def test_w():
    (pathlib.Path(__file__).parent / 'data/out.txt').write_text('4')
    assert calc.add(2, 2) == 4
-- agent/calc.py
def add(a, b): return a + b
"""
TESTED = """-- start/calc.py
def add(a, b): return a - b
-- start/tests/test_calc.py
import calc
def test_add(): assert calc.add(2, 2) == 4
-- agent/calc.py
def add(a, b): return a + b"""
DEPENDENCY = """-- start/pyproject.toml
[tool.pytest.ini_options]
addopts = '-q'
[project]
name = 'a'
version = '1'
-- agent/pyproject.toml
[tool.pytest.ini_options]
addopts = '-q'
[project]
name = 'a'
version = '1'
dependencies = ['attrs']"""
PUNCTUATION = {*"|&;$='"}
"""Characters of a shell."""
HONEST_CASES = read_cases(
    HONEST,
    tested=TESTED,
    dependency=DEPENDENCY,
    test=TEST,
    **{"check of solution.py": CHECK.replace("calc.py", "solution.py")},
)


@pytest.mark.parametrize("what", cases(HONEST_CASES, 3, 6, 9, 12))
async def test_an_ordinary_solution_earns_what_it_should(tmp_path, what):
    case = HONEST_CASES[what]
    script = case.fields["judge"]
    spec = shell(script)
    if "kind" in case.fields:
        spec = {"kind": "pytest", "command": script.split()}
    elif not PUNCTUATION & {*script}:
        spec = command(*script.split())
    if "paths" in case.fields:
        spec["paths"] = case.fields["paths"].split()
    left = Left(tmp_path, case.below("start"))
    instruction = "Mend it, or write solution.py."
    await left.earns(0.0, spec, instruction)
    left.do(case.below("agent"))
    await left.earns(1.0, spec, instruction)
