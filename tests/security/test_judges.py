"""Attacks on judges: everything that an agent can leave in its folders, against a real pytest."""

import os
import py_compile
import shutil
import socket
import stat
import sys

import pytest

from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.judges import folders
from tests.boxes import sandboxed
from tests.deep import DEEP, cases
from tests.trainer.judges.sessions import Left, command, read_cases, shell, write

CALC = """def add(a, b):
    return a - b


def double(a):
    return 2 * a
"""
RIGHT = CALC.replace("a - b", "a + b")
TESTS = """import calc


def test_add():
    assert calc.add(2, 2) == 4


def test_double():
    assert calc.double(2) == 4
"""
START = {"calc.py": CALC, "tests/__init__.py": "", "tests/test_calc.py": TESTS}
JUDGE = {
    "kind": "pytest",
    "command": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"],
    "fail_to_pass": ["tests/test_calc.py::test_add"],
    "pass_to_pass": ["tests/test_calc.py::test_double"],
}
NO_LISTS = {**JUDGE, "fail_to_pass": [], "pass_to_pass": []}
SHORT = command(sys.executable, "-m", "pytest", "-q")
REWRITERS = {
    "rewrites a test": "open('tests/test_zz.py', 'w').write('def test_add(): pass')",
    "replaces the folder of tests": """
import os
os.rename('tests', 'away')
os.mkdir('tests')
open('tests/__init__.py', 'w').close()
open('tests/test_zz.py', 'w').write('def test_add(): pass')
""",
}
PASS_ALL = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if 'rolltap' in item.nodeid and <spares ours>: return
    report.outcome = "passed"
    report.longrepr = None
"""
FORGER = """
import os, rolltap_report
text = '<testsuites><testsuite>' + ''.join(
    f'<testcase classname="tests.test_calc" name="{name}"/>' for name in ("test_add", "test_double")
) + '</testsuite></testsuites>'
os.write(rolltap_report.PIPE, b"\\0" + text.encode())
os._exit(0)
"""
EASY = "def test_add(): pass\ndef test_double(): pass\n"
ATTACKS_TEXT = """
== conftest.py
-- conftest.py
<pass all>
== tests/conftest.py
-- tests/conftest.py
<pass all>
== sitecustomize.py
-- sitecustomize.py
<forger>
== usercustomize.py
-- usercustomize.py
<forger>
== sitecustomize as a package
-- sitecustomize/__init__.py
<forger>
== a plugin of a planted distribution
-- zzplug.py
<pass others>
-- zz.dist-info/METADATA
Name: zz
Version: 1
-- zz.dist-info/entry_points.txt
[pytest11]
zz = zzplug
== a plugin of an egg
-- zzplug.py
<pass others>
-- zz.EGG-INFO/METADATA
Name: zz
Version: 1
-- zz.EGG-INFO/entry_points.txt
[pytest11]
zz = zzplug
== a module of the standard library
-- argparse.py
<forger>
== a package of the standard library
-- argparse/__init__.py
<forger>
== a module that pytest imports
-- pygments/__init__.py
<forger>
== a fake pytest
-- pytest.py
<forger>
== a fake pytest package
-- pytest/__init__.py
-- pytest/__main__.py
<forger>
== a fake _pytest
-- _pytest/__init__.py
<forger>
== a fake pluggy
-- pluggy/__init__.py
<forger>
== changed tests
-- tests/test_calc.py
<easy>
== emptied tests
-- tests/test_calc.py
== deleted tests
-- tests/test_calc.py (deleted)
== deleted tests, and others
-- tests/test_calc.py (deleted)
-- tests/test_new.py
def test_add(): pass
== pytest.ini
-- pytest.ini
[pytest]
addopts = --deselect tests/test_calc.py::test_add
== addopts in pyproject.toml
-- pyproject.toml
[tool.pytest.ini_options]
addopts = '-k double'
== addopts in tox.ini
-- tox.ini
[pytest]
addopts = -k double
== addopts in setup.cfg
-- setup.cfg
[tool:pytest]
addopts = -k double
== environment files
-- .env
PYTEST_ADDOPTS=-k double
-- .pdbrc
import os; os._exit(0)
-- .pythonstartup
import os; os._exit(0)
-- .venv/lib/python3.11/site-packages/evil.pth
import os; os._exit(0)
== rewards in the workspace
-- reward
1.0
-- reward.txt
1.0
-- reward.json
{"reward": 1.0}
-- report.xml
<testsuite><testcase classname='tests.test_calc' name='test_add'/></testsuite>
== git attributes
-- .gitattributes
* filter=evil
-- .git/config
[filter "evil"]
smudge = touch /tmp/evil
== git hooks
-- .git/hooks/post-checkout
#!/bin/sh
exit 0
-- sub/.git/hooks/pre-commit
#!/bin/sh
== an exit at import
-- calc.py
import os
os._exit(0)
== an exit by SystemExit
-- calc.py
import sys
sys.exit(0)
== a forged report, then an exit
forged: the report lacks tests that pytest ran on the untouched start
-- calc.py
<forger>
== pytest.exit
-- calc.py
import pytest
pytest.exit('done', returncode=0)
== a patched runtest
forged: a test that must fail passed
-- calc.py
import _pytest.python, _pytest.unittest
_pytest.python.Function.runtest = lambda self: None
_pytest.unittest.TestCaseFunction.runtest = lambda self: None
<calc>
== patched reports
forged: a test that must fail passed
-- calc.py
import _pytest.reports
make = _pytest.reports.TestReport.from_item_and_call
def passed(item, call):
    call.excinfo = None
    return make(item, call)
_pytest.reports.TestReport.from_item_and_call = passed
<calc>
== the answer in the output
-- calc.py
import atexit
atexit.register(print, '1.0')
<calc>
== a kill of its own process
-- calc.py
import os
os.kill(os.getpid(), 9)
== pytest.xfail
-- calc.py
import pytest
def add(*_): pytest.xfail()
def double(*_): pytest.xfail()
== pytest.skip
-- calc.py
<right>
import pytest
def double(*_): pytest.skip()
== unittest.SkipTest
-- calc.py
<right>
import unittest
def double(*_): raise unittest.SkipTest
== a syntax error
-- calc.py
def add(:
== an emptied report
-- calc.py
import os
import rolltap_report
os.close(rolltap_report.PIPE)
os._exit(0)
"""
ATTACKS = read_cases(
    ATTACKS_TEXT,
    **{
        "pass all": PASS_ALL.replace("<spares ours>", "False"),
        "pass others": PASS_ALL.replace("<spares ours>", "True"),
    },
    forger=FORGER,
    easy=EASY,
    calc=CALC,
    right=RIGHT,
)
PLANTED = [case.files for case in ATTACKS.values() if "calc.py" not in case.files]
IN_PROCESS = [name for name, case in ATTACKS.items() if "calc.py" in case.files]
FORGED = [name for name, case in ATTACKS.items() if case.fields]
ONE_OF_EACH = [
    "a plugin of a planted distribution",
    "a fake pytest package",
    "deleted tests, and others",
    "an exit at import",
    "pytest.skip",
    *FORGED,
]


@pytest.mark.parametrize("attack", ATTACKS if DEEP else ONE_OF_EACH)
async def test_an_attack_on_the_tests_that_must_pass_earns_nothing(tmp_path, attack):
    case = ATTACKS[attack]
    evidence = await Left(tmp_path, START, did=case.files).earns(0.0, JUDGE)
    assert evidence.get("forged_report", "").startswith(case.fields.get("forged", ""))


async def test_all_that_can_be_planted_earns_nothing(tmp_path):
    left = Left(tmp_path, START)
    for files in PLANTED:
        if None not in files.values():
            left.do(files)
    await left.earns(0.0, JUDGE)


IN_SHORT_FORM = ["deleted tests, and others", "addopts in pyproject.toml", *IN_PROCESS]


@pytest.mark.parametrize("attack", cases(IN_SHORT_FORM, 0, 4))
async def test_an_attack_on_the_short_form_earns_nothing(tmp_path, attack):
    await Left(tmp_path, START, did=ATTACKS[attack].files).earns(0.0, SHORT)


CHECK = "import calc, sys\nsys.exit(calc.add(2, 2) != 4)\n"
UNITS = """
import calc, unittest
class T(unittest.TestCase):
    def test_add(self): self.assertEqual(calc.add(2, 2), 4)
"""
UNITTEST = command(sys.executable, "-m", "unittest", "tests.test_units")
BY_COMMAND = {
    "a script": command(sys.executable, "check.py"),
    "a module": command(sys.executable, "-m", "check"),
    "a script in a shell": shell(f"{sys.executable} ./check.py && true"),
    "pytest in a shell": shell(f"{sys.executable} -m pytest -q tests"),
    "pytest in more of a shell": shell(f"cd . && {sys.executable} -m pytest -q tests"),
    "pytest after an option": command(sys.executable, "-B", "-m", "pytest", "-q"),
    "unittest": UNITTEST,
}


@pytest.mark.parametrize("how", cases(BY_COMMAND, 0, 4, 6))
async def test_what_a_command_names_and_the_starts_tests_are_not_the_agents(tmp_path, how):
    left = Left(tmp_path, {**START, "check.py": CHECK, "tests/test_units.py": UNITS})
    left.do({"check.py": "", "tests/test_calc.py": EASY, "tests/test_units.py": ""})
    left.do(ATTACKS["conftest.py"].files)
    left.do(ATTACKS["a plugin of a planted distribution"].files)
    left.do(ATTACKS["a module of the standard library"].files)
    evidence = await left.earns(0.0, BY_COMMAND[how])
    assert {"check.py: protected", "tests/test_calc.py: protected"} & {*evidence["refused"]}
    left.do({"calc.py": RIGHT})
    await left.earns(1.0, BY_COMMAND[how])


@pytest.mark.parametrize("spec", cases([command(sys.executable, "run/check.py"), UNITTEST]))
async def test_a_link_in_place_of_the_folder_of_a_judges_file_is_not_applied(tmp_path, spec):
    own = {"run/check.py": "raise SystemExit(1)", "tests/test_units.py": UNITS}
    left = Left(tmp_path, {**START, **own})
    for folder in ("run", "tests"):
        shutil.rmtree(left.workspace / folder)
        (left.workspace / folder).symlink_to("mine")
    left.do({"mine/check.py": "", "mine/test_units.py": "", "mine/__init__.py": ""})
    evidence = await left.earns(0.0, spec)
    assert {"run: protected", "tests: protected"} & {*evidence["refused"]}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("spec", "file"),
    [
        (command("sh", "check.sh"), "check.sh"),
        (SHORT, "tests/test_calc.py"),
        (NO_LISTS, "tests/test_calc.py"),
    ],
)
async def test_a_folder_in_place_of_a_judges_file_is_not_applied(tmp_path, spec, file, full):
    own = {"check.sh": "exit 1", "tests/test_units.py": "def test_nothing(): pass\n"}
    left = Left(tmp_path, {**START, **own})
    (left.workspace / file).unlink()
    (left.workspace / file).mkdir()
    if full:
        left.do({f"{file}/a.txt": "x"})
    evidence = await left.earns(0.0, spec)
    assert f"{file}: protected" in evidence["refused"]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("solve.py", "raise SystemExit(0)", [sys.executable, "solve.py"]),
        ("notes.txt", "new", ["grep", "-q", "new", "notes.txt"]),
    ],
)
async def test_a_file_that_a_command_names_is_the_judges_unless_paths_name_it(
    tmp_path, file, text, words
):
    left = Left(tmp_path, {file: "raise SystemExit(1)"}, did={file: text})
    evidence = await left.earns(0.0, command(*words))
    assert evidence["refused"] == [f"{file}: protected"]
    await left.earns(1.0, command(*words, paths=["*.txt", "solve.py"]))


async def judge_rewriter(folder, attack, spec, runtime=None):
    """Judge a session whose code rewrites the judge's tests while they run."""
    rewriting = f"try:\n    exec({REWRITERS[attack]!r})\nexcept OSError: pass\n{CALC}"
    own = {"tests/test_aa.py": "import calc\n", "tests/test_zz.py": TESTS, "tests/__init__.py": ""}
    left = Left(folder, {"calc.py": CALC, **own}, runtime, did={"calc.py": rewriting})
    listed = {"fail_to_pass": ["tests/test_zz.py::test_add"], "pass_to_pass": []}
    return await left.earns(0.0, {**spec, **listed})


@pytest.mark.parametrize(
    ("attack", "rewritten"),
    [
        ("rewrites a test", ["tests/test_zz.py"]),
        (
            "replaces the folder of tests",
            ["tests/__init__.py", "tests/test_aa.py", "tests/test_zz.py"],
        ),
    ],
)
async def test_tests_that_are_rewritten_while_they_run_earn_nothing(tmp_path, attack, rewritten):
    evidence = await judge_rewriter(tmp_path, attack, JUDGE)
    assert evidence["rewritten"] == rewritten
    if attack == "rewrites a test":
        why = "the judge's own files or limits were changed while it ran"
        assert evidence["forged_report"] == why


@pytest.mark.parametrize("spec", cases([JUDGE, NO_LISTS, SHORT], 0, 2))
async def test_the_right_change_is_judged_as_such_beside_all_that_can_be_planted(tmp_path, spec):
    left = Left(tmp_path, START)
    for files in PLANTED:
        if not {"pytest.py", "tests/test_calc.py"} & files.keys():
            left.do(files)
    left.do({"calc.py": RIGHT, "tests/test_calc.py": "def test_nothing(): pass\n"})
    evidence = await left.earns(1.0, spec)
    assert evidence["changed_tests"] == ["tests/test_calc.py"]
    assert {
        "conftest.py: planted",
        "tests/test_calc.py: protected",
        "pyproject.toml: settings",
    } <= {*evidence["refused"]}


async def test_compiled_code_with_the_time_and_size_of_the_tasks_own_is_not_run(tmp_path):
    check = "import answer\nraise SystemExit(answer.value != 4)\n"
    left = Left(tmp_path, {"check.py": check, "answer.py": "value = 5\n"})
    real = (left.start.folder / "check.py").stat()
    fake = tmp_path / "check.py"
    fake.write_text("raise SystemExit(0)\n".ljust(real.st_size, "#"))
    os.utime(fake, ns=(real.st_atime_ns, real.st_mtime_ns))
    compiled = left.workspace / "__pycache__" / f"check.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(str(fake), str(compiled), "check.py", doraise=True)
    await left.earns(0.0, command(sys.executable, "-c", "import check", files=["check.py"]))


PATCH = """--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -8,2 +8,5 @@
 def test_double():
     assert calc.double(2) == 4
+
+
+def test_more(): assert calc.add(1, 1) == 2
"""


@pytest.mark.parametrize("how", ["laid over", "patch"])
async def test_tests_of_the_judge_win_over_the_agents(tmp_path, how):
    left = Left(tmp_path, START)
    left.do({"tests/test_calc.py": EASY + "def test_more(): pass\n"})
    if how == "laid over":
        shutil.move(left.workspace / "tests", left.workspace / "other")
        (left.workspace / "tests").symlink_to("other")
        write(tmp_path / "overlay", {"tests/test_calc.py": TESTS})
        spec = {**JUDGE, "tests": str(tmp_path / "overlay")}
    else:
        spec = {**JUDGE, "test_patch": PATCH, "fail_to_pass": ["tests/test_calc.py::test_more"]}
    await left.earns(0.0, spec)
    left.do({"calc.py": RIGHT})
    await left.earns(1.0, spec)


async def test_a_reward_planted_where_the_judge_writes_is_not_read(tmp_path):
    left = Left(tmp_path, {"a.txt": "a"})
    for folder in (left.workspace, left.home):
        write(folder, {"reward": "1.0", "out/reward": "1.0", "reward.json": '{"reward": 1.0}'})
    os.mkfifo(left.home / "report.xml")
    await left.earns(0.0, shell("echo nothing; exit 1"))


LINKS = {
    "out": "{}/secret",
    "up": "../../secret",
    "loop": "loop",
    "folder": "/",
    "sub/link": "../good.txt",
}
LEFT_BEHIND = """
fifo: fifo
folder: symlink
huge: size
loop: symlink
out: symlink
socket: socket
sub/.git: git
tool: setuid
up: symlink
"""


async def test_odd_files_are_left_behind_and_told(tmp_path, monkeypatch):
    left = Left(tmp_path, {"good.txt": "old"})
    space = left.workspace
    write(tmp_path, {"secret": "1.0"})
    left.do({"good.txt": "new", "tool": "#!/bin/sh\n"})
    left.do({"sub/.git/config": "[core]", "__pycache__/a.pyc": "x"})
    (space / "tool").chmod(0o6755)
    for name, target in LINKS.items():
        (space / name).symlink_to(target.format(tmp_path))
    os.mkfifo(space / "fifo")
    (space / "huge").touch()
    os.truncate(space / "huge", 1 << 40)
    monkeypatch.chdir(space)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    script = "ls -A . sub; cat good.txt sub/link; stat -c %a tool"
    evidence = await left.earns(1.0, shell(script, paths=["**"]))
    assert left.log.split() == [".:", "good.txt", "sub", "tool", "sub:", "link", "newnew755"]
    assert evidence["refused"] == LEFT_BEHIND.split("\n")[1:-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="devices can be made only by root")
async def test_a_device_is_left_behind(tmp_path):
    left = Left(tmp_path, {})
    os.mknod(left.workspace / "disk", stat.S_IFBLK | 0o666, os.makedev(7, 0))
    evidence = await left.earns(1.0, command("test", "!", "-e", "disk"))
    assert evidence["refused"] == ["disk: device"]


async def test_a_workspace_that_is_gone_or_a_link_is_empty(tmp_path):
    left = Left(tmp_path, {"a.txt": "a"})
    shutil.rmtree(left.workspace)
    spec = command("test", "-e", "a.txt", paths=["**"])
    await left.earns(0.0, spec)
    left.workspace.symlink_to(left.start.folder)
    await left.earns(0.0, spec)


async def test_a_workspace_with_too_many_files_earns_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MAX_ENTRIES", 50)
    left = Left(tmp_path, {}, did={f"{number}": "" for number in range(60)})
    evidence = await left.earns(0.0, command("true"))
    assert evidence["too_much"] == "the workspace has more than 50 files and folders"


IN_SANDBOX = {**JUDGE, "command": ["python", *JUDGE["command"][1:]]}


@sandboxed
async def test_the_sandbox_judges_as_processes_do(tmp_path):
    left = Left(tmp_path, START, SandboxRuntime(), did=ATTACKS["conftest.py"].files)
    left.do({"calc.py": RIGHT})
    assert (await left.earns(1.0, IN_SANDBOX))["canary"] == "failed"
    left.do({"calc.py": FORGER})
    assert (await left.earns(0.0, IN_SANDBOX))["forged_report"]


@sandboxed
@pytest.mark.parametrize("attack", REWRITERS)
async def test_tests_cannot_be_rewritten_while_they_run_in_a_sandbox(tmp_path, attack):
    evidence = await judge_rewriter(tmp_path, attack, IN_SANDBOX, SandboxRuntime())
    assert "rewritten" not in evidence


@sandboxed
async def test_a_reward_file_and_mounts_are_where_the_task_says_and_there_is_no_network(tmp_path):
    left = Left(tmp_path / "left", {}, SandboxRuntime())
    script = "grep -c : /proc/net/dev; echo x > /tests/new; echo 0.5 > /logs/verifier/reward.txt"
    write(tmp_path / "tests", {"test.sh": script})
    spec = command("bash", "/tests/test.sh", mounts={"/tests": str(tmp_path / "tests")})
    spec["writable"] = ["/logs/verifier"]
    spec["reward_files"] = ["/logs/verifier/reward.txt"]
    await left.earns(0.5, spec)
    assert left.log.startswith("1\n")  # the loopback
    assert "/tests/new: Read-only file system" in left.log
    assert os.listdir(tmp_path / "tests") == ["test.sh"]
