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
from tests.trainer.judges.sessions import Left, write

START = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n",
    "tests/__init__.py": "",
    "tests/test_calc.py": (
        "import calc\n\n\ndef test_add():\n    assert calc.add(2, 2) == 4\n\n\n"
        "def test_double():\n    assert calc.double(2) == 4\n"
    ),
}
RIGHT = START["calc.py"].replace("a - b", "a + b")
JUDGE = {
    "kind": "pytest",
    "command": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"],
    "fail_to_pass": ["tests/test_calc.py::test_add"],
    "pass_to_pass": ["tests/test_calc.py::test_double"],
    "timeout": 60,
}
NO_LISTS = {**JUDGE, "fail_to_pass": [], "pass_to_pass": []}
SHORT = {"kind": "command", "command": [sys.executable, "-m", "pytest", "-q"]}
REWRITERS = {
    "rewrites a test": "open('tests/test_zz.py', 'w').write('def test_add(): pass')\n",
    "replaces the folder of tests": (
        "import os\nos.rename('tests', 'away')\nos.mkdir('tests')\nopen('tests/__init__.py',"
        " 'w').close()\nopen('tests/test_zz.py', 'w').write('def test_add(): pass')\n"
    ),
}

PASS_ALL = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
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
PATCH_RUNTEST = """
import _pytest.python, _pytest.unittest
_pytest.python.Function.runtest = lambda self: None
_pytest.unittest.TestCaseFunction.runtest = lambda self: None
"""
PATCH_REPORTS = """
import _pytest.reports
make = _pytest.reports.TestReport.from_item_and_call
def passed(item, call):
    call.excinfo = None
    return make(item, call)
_pytest.reports.TestReport.from_item_and_call = passed
"""
BROKEN = START["calc.py"]
PLUGIN = {
    "zzplug.py": PASS_ALL.replace(
        "    report.outcome", "    if 'rolltap' not in item.nodeid: report.outcome"
    ),
    "zz.dist-info/METADATA": "Name: zz\nVersion: 1\n",
    "zz.dist-info/entry_points.txt": "[pytest11]\nzz = zzplug\n",
}

ATTACKS = {
    "conftest.py": {"conftest.py": PASS_ALL},
    "tests/conftest.py": {"tests/conftest.py": PASS_ALL},
    "sitecustomize.py": {"sitecustomize.py": FORGER},
    "usercustomize.py": {"usercustomize.py": FORGER},
    "sitecustomize as a package": {"sitecustomize/__init__.py": FORGER},
    "a plugin of a planted distribution": PLUGIN,
    "a plugin of an egg": {
        name.replace("dist-info", "EGG-INFO"): text for name, text in PLUGIN.items()
    },
    "a module of the standard library": {"argparse.py": FORGER},
    "a package of the standard library": {"argparse/__init__.py": FORGER},
    "a module that pytest imports": {"pygments/__init__.py": FORGER},
    "a fake pytest": {"pytest.py": FORGER},
    "a fake pytest package": {"pytest/__init__.py": "", "pytest/__main__.py": FORGER},
    "a fake _pytest": {"_pytest/__init__.py": FORGER},
    "a fake pluggy": {"pluggy/__init__.py": FORGER},
    "changed tests": {"tests/test_calc.py": "def test_add(): pass\ndef test_double(): pass\n"},
    "emptied tests": {"tests/test_calc.py": ""},
    "deleted tests": {"tests/test_calc.py": None},
    "deleted tests, and others": {
        "tests/test_calc.py": None,
        "tests/test_new.py": "def test_add(): pass\n",
    },
    "pytest.ini": {"pytest.ini": "[pytest]\naddopts = --deselect tests/test_calc.py::test_add\n"},
    "addopts in pyproject.toml": {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-k double'\n"
    },
    "addopts in tox.ini": {"tox.ini": "[pytest]\naddopts = -k double\n"},
    "addopts in setup.cfg": {"setup.cfg": "[tool:pytest]\naddopts = -k double\n"},
    "environment files": {
        ".env": "PYTEST_ADDOPTS=-k double\n",
        ".pdbrc": "import os; os._exit(0)\n",
        ".pythonstartup": "import os; os._exit(0)\n",
        ".venv/lib/python3.11/site-packages/evil.pth": "import os; os._exit(0)\n",
    },
    "rewards in the workspace": {
        "reward": "1.0",
        "reward.txt": "1.0",
        "reward.json": '{"reward": 1.0}',
        "report.xml": (
            "<testsuite><testcase classname='tests.test_calc' name='test_add'/></testsuite>"
        ),
    },
    "git attributes": {
        ".gitattributes": "* filter=evil\n",
        ".git/config": '[filter "evil"]\nsmudge = touch /tmp/evil\n',
    },
    "git hooks": {
        ".git/hooks/post-checkout": "#!/bin/sh\nexit 0\n",
        "sub/.git/hooks/pre-commit": "#!/bin/sh\n",
    },
    "an exit at import": {"calc.py": "import os\nos._exit(0)\n"},
    "an exit by SystemExit": {"calc.py": "import sys\nsys.exit(0)\n"},
    "a forged report, then an exit": {"calc.py": FORGER},
    "pytest.exit": {"calc.py": "import pytest\npytest.exit('done', returncode=0)\n"},
    "a patched runtest": {"calc.py": PATCH_RUNTEST + BROKEN},
    "patched reports": {"calc.py": PATCH_REPORTS + BROKEN},
    "the answer in the output": {
        "calc.py": "import atexit\natexit.register(print, '1.0')\n" + BROKEN
    },
    "a kill of its own process": {"calc.py": "import os\nos.kill(os.getpid(), 9)\n"},
    "pytest.xfail": {
        "calc.py": "import pytest\ndef add(*_): pytest.xfail()\ndef double(*_): pytest.xfail()\n"
    },
    "pytest.skip": {"calc.py": RIGHT + "import pytest\ndef double(*_): pytest.skip()\n"},
    "unittest.SkipTest": {
        "calc.py": RIGHT + "import unittest\ndef double(*_): raise unittest.SkipTest\n"
    },
    "a syntax error": {"calc.py": "def add(:\n"},
    "an emptied report": {
        "calc.py": "import os\nimport rolltap_report\nos.close(rolltap_report.PIPE)\nos._exit(0)\n"
    },
}
BY_FILES = {name: files for name, files in ATTACKS.items() if "calc.py" not in files}
IN_PROCESS = [name for name in ATTACKS if name not in BY_FILES]
FORGED = {
    "a patched runtest": "a test that must fail passed",
    "patched reports": "a test that must fail passed",
    "a forged report, then an exit": "the report lacks tests that pytest ran on the untouched start",
}
"""Attack -> what the evidence says of its report."""
ONE_OF_EACH = [
    *("a plugin of a planted distribution", "a fake pytest package", "deleted tests, and others"),
    *("an exit at import", "pytest.skip", *FORGED),
]


async def earns_nothing(left, spec):
    judged = await left.judge(spec)
    assert (judged.reward, judged.unjudged) == (0.0, None), left.log
    return judged.evidence


@pytest.mark.parametrize("attack", ATTACKS if DEEP else ONE_OF_EACH)
async def test_an_attack_on_the_tests_that_must_pass_earns_nothing(tmp_path, attack):
    left = Left(tmp_path, START, did=ATTACKS[attack])
    evidence = await earns_nothing(left, JUDGE)
    assert evidence.get("forged_report", "").startswith(FORGED.get(attack, ""))


async def test_all_that_can_be_planted_earns_nothing(tmp_path):
    left = Left(tmp_path, START)
    for files in BY_FILES.values():
        if None not in files.values():
            left.do(files)
    await earns_nothing(left, JUDGE)


IN_SHORT_FORM = ["deleted tests, and others", "addopts in pyproject.toml", *IN_PROCESS]


@pytest.mark.parametrize("attack", cases(IN_SHORT_FORM, 0, 4))
async def test_an_attack_on_the_short_form_earns_nothing(tmp_path, attack):
    await earns_nothing(Left(tmp_path, START, did=ATTACKS[attack]), SHORT)


def command_judge(*command, **fields):
    return {"kind": "command", "command": [*command], **fields}


CHECK = "import calc, sys\nsys.exit(calc.add(2, 2) != 4)\n"
UNITS = (
    "import calc, unittest\nclass T(unittest.TestCase):\n    def test_add(self):"
    " self.assertEqual(calc.add(2, 2), 4)\n"
)
BY_COMMAND = {
    "a script": [sys.executable, "check.py"],
    "a module": [sys.executable, "-m", "check"],
    "a script in a shell": ["sh", "-c", f"{sys.executable} ./check.py && true"],
    "pytest in a shell": ["sh", "-c", f"{sys.executable} -m pytest -q tests"],
    "pytest in more of a shell": ["sh", "-c", f"cd . && {sys.executable} -m pytest -q tests"],
    "pytest after an option": [sys.executable, "-B", "-m", "pytest", "-q"],
    "unittest": [sys.executable, "-m", "unittest", "tests.test_units"],
}


@pytest.mark.parametrize("command", cases(BY_COMMAND, 0, 4, 6))
async def test_what_a_command_names_and_the_starts_tests_are_not_the_agents(tmp_path, command):
    left = Left(tmp_path, {**START, "check.py": CHECK, "tests/test_units.py": UNITS})
    passing = "def test_add(): pass\ndef test_double(): pass\n"
    forged = {
        "check.py": "",
        "tests/test_calc.py": passing,
        "tests/test_units.py": "",
        "conftest.py": PASS_ALL,
    }
    left.do({**forged, **PLUGIN, "argparse.py": FORGER})
    spec = command_judge(*BY_COMMAND[command])
    evidence = await earns_nothing(left, spec)
    assert {"check.py: protected", "tests/test_calc.py: protected"} & {*evidence["refused"]}
    left.do({"calc.py": RIGHT})
    assert (await left.judge(spec)).reward == 1.0, left.log


@pytest.mark.parametrize(
    "command", cases([[sys.executable, "run/check.py"], BY_COMMAND["unittest"]])
)
async def test_a_link_in_place_of_the_folder_of_a_judges_file_is_not_applied(tmp_path, command):
    left = Left(
        tmp_path, {**START, "run/check.py": "raise SystemExit(1)", "tests/test_units.py": UNITS}
    )
    for folder in ("run", "tests"):
        shutil.rmtree(left.workspace / folder)
        (left.workspace / folder).symlink_to("mine")
    left.do({"mine/check.py": "", "mine/test_units.py": "", "mine/__init__.py": ""})
    evidence = await earns_nothing(left, command_judge(*command))
    assert {"run: protected", "tests: protected"} & {*evidence["refused"]}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("spec", "file"),
    [
        ({"kind": "command", "command": ["sh", "check.sh"]}, "check.sh"),
        (SHORT, "tests/test_calc.py"),
        (NO_LISTS, "tests/test_calc.py"),
    ],
)
async def test_a_folder_in_place_of_a_judges_file_is_not_applied(tmp_path, spec, file, full):
    left = Left(
        tmp_path,
        {**START, "check.sh": "exit 1", "tests/test_units.py": "def test_nothing(): pass\n"},
    )
    (left.workspace / file).unlink()
    (left.workspace / file).mkdir()
    left.do({f"{file}/a.txt": "x"} if full else {})
    evidence = await earns_nothing(left, spec)
    assert f"{file}: protected" in evidence["refused"]


async def test_a_script_that_a_command_starts_is_applied_if_paths_name_it(tmp_path):
    left = Left(tmp_path, {"solve.py": "raise SystemExit(1)"}, did={"solve.py": ""})
    spec = command_judge(sys.executable, "solve.py")
    assert (await left.judge(spec)).evidence["refused"] == ["solve.py: protected"]
    assert (await left.judge({**spec, "paths": ["solve.py"]})).reward == 1.0


async def test_a_file_that_a_command_reads_is_the_judges_unless_paths_name_it(tmp_path):
    left = Left(tmp_path, {"notes.txt": "old"}, did={"notes.txt": "new"})
    spec = command_judge("grep", "-q", "new", "notes.txt")
    await earns_nothing(left, spec)
    assert (await left.judge({**spec, "paths": ["*.txt"]})).reward == 1.0


async def rewrite(folder, attack, spec, runtime=None):
    tests = {"tests/test_aa.py": "import calc\n", "tests/test_zz.py": START["tests/test_calc.py"]}
    rewriting = f"try:\n    exec({REWRITERS[attack]!r})\nexcept OSError: pass\n{BROKEN}"
    left = Left(
        folder,
        {"calc.py": BROKEN, "tests/__init__.py": "", **tests},
        runtime,
        did={"calc.py": rewriting},
    )
    return await left.judge(
        {**spec, "fail_to_pass": ["tests/test_zz.py::test_add"], "pass_to_pass": []}
    )


@pytest.mark.parametrize("attack", REWRITERS)
async def test_tests_that_are_rewritten_while_they_run_earn_nothing(tmp_path, attack):
    judged = await rewrite(tmp_path, attack, JUDGE)
    assert (judged.reward, judged.evidence["rewritten"]) in [
        (0.0, ["tests/test_zz.py"]),
        (0.0, ["tests/__init__.py", "tests/test_aa.py", "tests/test_zz.py"]),
    ]
    if attack == "rewrites a test":
        assert (
            judged.evidence["forged_report"]
            == "the judge's own files or limits were changed while it ran"
        )


@pytest.mark.parametrize("spec", cases([JUDGE, NO_LISTS, SHORT], 0, 2))
async def test_the_right_change_is_judged_as_such_beside_all_that_can_be_planted(tmp_path, spec):
    left = Left(tmp_path, START)
    for files in BY_FILES.values():
        if "pytest.py" not in files and "tests/test_calc.py" not in files:
            left.do(files)
    left.do({"calc.py": RIGHT, "tests/test_calc.py": "def test_nothing(): pass\n"})
    judged = await left.judge(spec)
    assert (judged.reward, judged.unjudged) == (1.0, None), left.log
    assert judged.evidence["changed_tests"] == ["tests/test_calc.py"]
    refused = judged.evidence["refused"]
    assert {
        "conftest.py: planted",
        "tests/test_calc.py: protected",
        "pyproject.toml: settings",
    } <= {*refused}


async def test_compiled_code_with_the_time_and_size_of_the_tasks_own_is_not_run(tmp_path):
    check = "import answer\nraise SystemExit(answer.value != 4)\n"
    left = Left(tmp_path, {"check.py": check, "answer.py": "value = 5\n"})
    real, fake = (left.start.folder / "check.py").stat(), tmp_path / "check.py"
    fake.write_text("raise SystemExit(0)\n".ljust(real.st_size, "#"))
    os.utime(fake, ns=(real.st_atime_ns, real.st_mtime_ns))
    compiled = left.workspace / "__pycache__" / f"check.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(str(fake), str(compiled), "check.py", doraise=True)
    await earns_nothing(
        left, command_judge(sys.executable, "-c", "import check", files=["check.py"])
    )


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
    passing = "def test_add(): pass\ndef test_double(): pass\ndef test_more(): pass\n"
    left = Left(tmp_path, START, did={"tests/test_calc.py": passing})
    if how == "laid over":
        shutil.move(left.workspace / "tests", left.workspace / "other")
        (left.workspace / "tests").symlink_to("other")
        write(tmp_path / "overlay", {"tests/test_calc.py": START["tests/test_calc.py"]})
        spec = {**JUDGE, "tests": str(tmp_path / "overlay")}
    else:
        spec = {**JUDGE, "test_patch": PATCH, "fail_to_pass": ["tests/test_calc.py::test_more"]}
    await earns_nothing(left, spec)
    left.do({"calc.py": RIGHT})
    assert (await left.judge(spec)).reward == 1.0, left.log


async def test_a_reward_planted_where_the_judge_writes_is_not_read(tmp_path):
    left = Left(tmp_path, {"a.txt": "a"})
    for folder in (left.workspace, left.home):
        write(folder, {"reward": "1.0", "out/reward": "1.0", "reward.json": '{"reward": 1.0}'})
    os.mkfifo(left.home / "report.xml")
    await earns_nothing(left, command_judge("sh", "-c", "echo nothing; exit 1"))


async def test_odd_files_are_left_behind_and_told(tmp_path, monkeypatch):
    left = Left(tmp_path, {"good.txt": "old"})
    write(tmp_path, {"secret": "1.0"})
    space = left.workspace
    os.mkfifo(space / "fifo")
    monkeypatch.chdir(space)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    left.do(
        {
            "good.txt": "new",
            "sub/.git/config": "[core]",
            "__pycache__/a.pyc": "x",
            "tool": "#!/bin/sh\n",
        }
    )
    links = {
        "out": tmp_path / "secret",
        "up": "../../secret",
        "loop": "loop",
        "folder": "/",
        "sub/link": "../good.txt",
    }
    for name, target in links.items():
        (space / name).symlink_to(target)
    (space / "tool").chmod(0o6755)
    with (space / "huge").open("wb") as file:
        file.truncate(1 << 40)
    script = "ls -A . sub; cat good.txt sub/link; stat -c %a tool"
    judged = await left.judge(command_judge("sh", "-c", script, result="status", paths=["**"]))
    assert judged.reward == 1.0
    assert left.log.split() == [".:", "good.txt", "sub", "tool", "sub:", "link", "newnew755"]
    odd = {
        "fifo": "fifo",
        "folder": "symlink",
        "huge": "size",
        "loop": "symlink",
        "out": "symlink",
        "socket": "socket",
    }
    odd |= {"sub/.git": "git", "tool": "setuid", "up": "symlink"}
    assert judged.evidence["refused"] == [f"{name}: {why}" for name, why in odd.items()]


@pytest.mark.skipif(os.geteuid() != 0, reason="devices can be made only by root")
async def test_a_device_is_left_behind(tmp_path):
    left = Left(tmp_path, {})
    os.mknod(left.workspace / "disk", stat.S_IFBLK | 0o666, os.makedev(7, 0))
    judged = await left.judge(command_judge("test", "!", "-e", "disk"))
    assert (judged.reward, judged.evidence["refused"]) == (1.0, ["disk: device"])


async def test_a_workspace_that_is_gone_or_a_link_is_empty(tmp_path):
    left = Left(tmp_path, {"a.txt": "a"})
    (left.workspace / "a.txt").unlink()
    left.workspace.rmdir()
    spec = command_judge("test", "-e", "a.txt", paths=["**"])
    await earns_nothing(left, spec)
    left.workspace.symlink_to(left.start.folder)
    await earns_nothing(left, spec)


async def test_a_workspace_with_too_many_files_earns_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MAX_ENTRIES", 50)
    left = Left(tmp_path, {"a.txt": "a"})
    left.do({f"{number}": "" for number in range(60)})
    evidence = await earns_nothing(left, command_judge("true"))
    assert evidence["too_much"] == "the workspace has more than 50 files and folders"


IN_SANDBOX = {**JUDGE, "command": ["python", *JUDGE["command"][1:]]}


@sandboxed
class TestSandbox:
    async def test_the_sandbox_judges_as_processes_do(self, tmp_path):
        left = Left(
            tmp_path, START, SandboxRuntime(), did={"calc.py": RIGHT, "conftest.py": PASS_ALL}
        )
        judged = await left.judge(IN_SANDBOX)
        assert (judged.reward, judged.unjudged) == (1.0, None), left.log
        assert judged.evidence["canary"] == "failed"
        left.do({"calc.py": FORGER})
        assert (await earns_nothing(left, IN_SANDBOX))["forged_report"]

    @pytest.mark.parametrize("attack", REWRITERS)
    async def test_tests_cannot_be_rewritten_while_they_run(self, tmp_path, attack):
        judged = await rewrite(tmp_path, attack, IN_SANDBOX, SandboxRuntime())
        assert (judged.reward, judged.evidence.get("rewritten")) == (0.0, None)

    async def test_a_reward_file_and_mounts_are_where_the_task_says_and_there_is_no_network(
        self, tmp_path
    ):
        left = Left(tmp_path / "left", {}, SandboxRuntime())
        script = "cat /proc/net/dev; echo x > /tests/new; echo 0.5 > /logs/verifier/reward.txt"
        write(tmp_path / "tests", {"test.sh": script})
        mounts = {"mounts": {"/tests": str(tmp_path / "tests")}, "writable": ["/logs/verifier"]}
        spec = command_judge(
            "bash", "/tests/test.sh", **mounts, reward_files=["/logs/verifier/reward.txt"]
        )
        assert (await left.judge(spec)).reward == 0.5, left.log
        assert "/tests/new: Read-only file system" in left.log
        assert {
            line.split(":")[0].strip() for line in left.log.splitlines() if line.count(" 0 ") > 5
        } == {"lo"}
        assert [path.name for path in (tmp_path / "tests").iterdir()] == ["test.sh"]
