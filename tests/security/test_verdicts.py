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
from tests.trainer.judges.sessions import Left, shell

PYTHON = sys.executable


class Container(ContainerRuntime):
    """Containers of a root folder of this machine's programs, with what a judge mounts."""

    def box(self, spec):
        root = spec.workspace.parent / "root"
        shutil.rmtree(root, ignore_errors=True)
        for folder in ("etc", "tmp", "logs", "rolltap/tools"):
            (root / folder).mkdir(parents=True)
        return super().box(
            replace(spec, image=str(root), mounts=[*system_root(root), *spec.mounts])
        )


TESTS = {"tests/test_calc.py": "import calc\ndef test_add(): assert calc.add(2, 2) == 4\n"}
CALC = {"calc.py": "def add(a, b): return a - b\n"}
RIGHT = {"calc.py": "def add(a, b): return a + b\n"}
START = {**CALC, **TESTS}
CHILD = (
    "import subprocess\ndef test_tool(): assert subprocess.run(['sh', 'tool.sh'], stdout=-1).stdout"
    " == b'4'\n"
)
CHECK = (
    "import subprocess, sys\nout = subprocess.run([sys.executable, 'calc.py'],"
    " capture_output=True).stdout\n"
)
CHECK += "sys.exit(out.strip() != b'4')\n"
PYTEST = {"kind": "pytest", "command": ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"]}
FORGED = "<testsuite><testcase classname='tests.test_tool' name='test_tool'/></testsuite>"
FORGES = f"""
cat > /tmp/forge.sh <<'END'
text="{FORGED}"
for f in $ROLLTAP_REPORT /rolltap/out/* /proc/[0-9]*/fd/*; do
    case "$(readlink $f)" in *pipe*|*out/*) printf '\\0%s' "$text" > $f ;; esac; echo "$text" > $f
done
for i in 3 4 5 6 7 8 9; do printf '\\0%s' "$text" >&$i; done
END
timeout 2 sh /tmp/forge.sh; printf 5
"""


def command(*words, **fields):
    return {"kind": "command", "command": [*words], **fields}


async def test_the_output_of_the_agents_program_is_no_reward(tmp_path):
    loud = "import sys\nprint(1000000, file=sys.stderr)\nprint('{\"reward\": 1}')\nprint(5)\n"
    left = Left(
        tmp_path,
        {**CALC, "check.py": CHECK.replace(", capture_output=True", "")},
        did={"calc.py": loud},
    )
    judged = await left.judge(shell(f"{PYTHON} -c 'import calc'; exit 1"))
    assert (judged.reward, "1000000" in left.log) == (0.0, True)


@sandboxed
async def test_a_child_of_a_test_cannot_write_the_report(tmp_path):
    left = Left(
        tmp_path,
        {"tool.sh": "printf 5", "tests/test_tool.py": CHILD},
        SandboxRuntime(),
        did={"tool.sh": FORGES},
    )
    judged = await left.judge({**PYTEST, "fail_to_pass": ["tests/test_tool.py::test_tool"]})
    assert (judged.reward, judged.evidence["tests"]) == (
        0.0,
        {"tests/test_tool.py::test_tool": "failed"},
    ), left.log


@pytest.mark.parametrize("runtime", [ProcessRuntime, pytest.param(SandboxRuntime, marks=sandboxed)])
async def test_a_child_of_a_shell_turns_its_reward_into_no_other_one(tmp_path, runtime):
    writes = "printf 1. > $ROLLTAP_REWARD_FILE; for i in 3 4 5 6 7 8 9; do printf 1. >&$i; done"
    left = Left(tmp_path, {"tool.sh": ""}, runtime(), did={"tool.sh": writes})
    spec = {
        **shell("sh ./tool.sh; echo 0 > $ROLLTAP_REWARD_FILE", result="number"),
        "paths": ["tool.sh"],
    }
    judged = await left.judge(spec)
    assert (judged.reward, judged.evidence["forged_report"]) == (
        0.0,
        "its verdict was written 2 times",
    )


async def test_verdicts_come_out_of_a_container_and_a_missing_judge_is_unjudged_there(tmp_path):
    require_podman()
    left = Left(tmp_path, {"tool.sh": "printf 5", "check.py": SCRIPT}, Container())
    by_file = {**shell(BY_FILE, **VERIFIER), "paths": ["tool.sh"]}
    for how in ("written", "written where the judge has no descriptors left"):
        left.do({"tool.sh": AT_FILES[how]})
        assert (await left.judge(by_file)).reward == 0.0, left.log
    left.do({"tool.sh": "printf 4; ( exec 3<> /proc/$PPID/mem ) && echo ESCAPED >&2"})
    assert (await left.judge(by_file)).reward == 1.0, left.log
    assert ("ESCAPED" in left.log, "Read-only" in left.log) == (False, True)
    assert (await left.judge(command("python3", "check.py", result="number"))).reward == 0.5, (
        left.log
    )
    assert "could not be started" in (await left.judge(command("no-such-judge"))).unjudged


async def test_who_runs_before_pytest_cannot_write_its_report(tmp_path):
    text = "<testsuites><testcase classname='tests.test_calc' name='test_add'/></testsuites>"
    forges = (
        f"import os\npipe = os.environ['ROLLTAP_REPORT']\nopen(pipe, 'w').write('\\0' + {text!r})\n"
    )
    forges += "os.rename(pipe, pipe + '1')\nopen(pipe, 'w').close()\n"
    left = Left(tmp_path, {"tool.py": "", **START}, did={"tool.py": forges})
    spec = {
        **PYTEST,
        "command": ["sh", "-c", f"{PYTHON} tool.py; {PYTHON} -m pytest -q"],
        "paths": ["tool.py"],
    }
    spec["fail_to_pass"] = ["tests/test_calc.py::test_add"]
    assert (await left.judge(spec)).reward in ((0.0, 1.0) if os.geteuid() == 0 else (0.0,))
    boxed = Left(
        tmp_path / "boxed", {"tool.py": "", **START}, SandboxRuntime(), did={"tool.py": forges}
    )
    spec["command"] = ["sh", "-c", "python3 tool.py; python3 -m pytest -q"]
    assert (await boxed.judge(spec)).reward == 0.0, boxed.log


async def test_a_link_of_the_judges_is_compared_and_a_mount_below_the_workspace_is_its_own(
    tmp_path,
):
    replaces = "import os; os.unlink('check.py'); open('check.py', 'w').write('')"
    left = Left(tmp_path, {"tools/real.py": "raise SystemExit(1)", "calc.py": ""})
    for folder in (left.start.folder, left.workspace):
        (folder / "check.py").symlink_to("tools/real.py")
    left.do({"calc.py": replaces})
    judged = await left.judge(shell(f"{PYTHON} -c 'import calc'; {PYTHON} check.py"))
    assert (judged.reward, judged.evidence["rewritten"]) == (0.0, ["check.py"])
    left.do({"out": "in place of a folder"})
    judged = await left.judge(shell("exit 1", writable=["/workspace/out"]))
    assert judged.evidence["refused"][:2] == ["out: protected"]


SCRIPT = "import os\nos.write(int(os.environ['ROLLTAP_REWARD_FD']), b'0.5')\n"
BY_FILE = 'test "$(sh ./tool.sh)" = 4 && echo 1 > /logs/reward.txt || echo 0 > /logs/reward.txt'
VERIFIER = {
    "mounts": {},
    "writable": ["/logs"],
    "reward_files": ["/logs/reward.txt", "/logs/reward.json"],
}
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
    spec = {**shell(BY_FILE, **VERIFIER), "paths": ["tool.sh"]}
    assert ((await left.judge(spec)).reward or 0.0) == 0.0, left.log
    left.do({"tool.sh": "printf 4"})
    assert (await left.judge(spec)).reward == 1.0, left.log


DIFFERS = """import os, resource, subprocess, sys
def run(out, *words): subprocess.run(words, stdout=open(out, "w"))
OWN
run("out.txt", sys.executable, "calc.py")
run("wrong.txt", "diff", "out.txt", "right.txt")
os.write(int(os.environ["ROLLTAP_REWARD_FD"]), b"0" if os.path.getsize("wrong.txt") else b"1")
"""
LOWERS = (
    "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))\nprint(5)\n"
)


@pytest.mark.parametrize("own", ["", "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"])
async def test_a_script_whose_limits_the_agents_program_lowers_gives_no_reward(tmp_path, own):
    start = {"calc.py": "print(5)\n", "right.txt": "4\n", "check.py": DIFFERS.replace("OWN", own)}
    left = Left(tmp_path, start, did={"calc.py": LOWERS})
    judged = await left.judge(command(PYTHON, "check.py", result="number", paths=["calc.py"]))
    assert (judged.reward, judged.evidence["rewritten"][-1:]) == (
        0.0,
        ["limits of the judge: RLIMIT_FSIZE"],
    ), left.log
    left.do({"calc.py": "print(4)\n"})
    assert (
        await left.judge(command(PYTHON, "check.py", result="number", paths=["calc.py"]))
    ).reward == 1.0, left.log


IMPORTS = "python3 -c 'import calc'"
RUN = "#!/bin/sh\ncd ${0%/*}/.. && exec python3 check.py\n"
USES_HELPER = "try: import helper\nexcept ImportError: pass\n"
EXITS = "raise SystemExit(0)\n"
TAKEN = {
    "the target of make": (
        "make -s it || exit 1",
        {"Makefile": "it:\n\tpython3 check.py\n"},
        {"Makefile": "it:\n"},
    ),
    "a script in a shell": (
        "cd tools; ./run.sh",
        {"tools/run.sh": RUN},
        {"tools/run.sh": "#!/bin/sh\n"},
    ),
    "a script in a variable": ("x=check; python3 $x.py check.py", {}, {"check.py": ""}),
    "a module": ("python3 -m check", {}, {"check.py": ""}),
    "a module beside the script": ("python3 check.py", {}, {"subprocess.py": EXITS}),
    "a library": (
        "python3 run/two.py",
        {"run/two.py": USES_HELPER + CHECK},
        {"run/helper.py": EXITS},
    ),
    "a module before Python's": (
        "python3 -m unittest units",
        {"units.py": CHECK},
        {"argparse.py": EXITS},
    ),
    "data of the tests": (
        f'test "$({IMPORTS})" = "$(cat tests/4)"',
        {"tests/4": "4\n"},
        {"tests/4": "0\n"},
    ),
    "what files name": ("./ci/go", {"ci/go": RUN}, {"ci/go": "#!/bin/sh\n"}),
}
PRINTS = {"calc.py": "print(2 - 2)\n", "check.py": CHECK}


@pytest.mark.parametrize("what", cases(TAKEN, 0, 3, 6))
async def test_what_is_the_judges_own_is_not_changed(tmp_path, what):
    script, files, cheat = TAKEN[what]
    left = Left(tmp_path, {**PRINTS, **files})
    for name in files:
        if "#!" in files[name]:
            (left.start.folder / name).chmod(0o755)
    spec = shell(script, files=["ci/**"], timeout=60)
    left.do(cheat)
    judged = await left.judge(spec)
    assert judged.reward == 0.0, left.log
    assert judged.evidence["refused_files"] >= 1
    left.do({"calc.py": "print(2 + 2)\n"})
    assert (await left.judge(spec)).reward == 1.0, left.log


DESELECTS = "addopts = --collect-only -q"
SETTINGS = {
    "a section that is there twice": {
        "setup.cfg": f"[tool:pytest]\n[metadata]\n[tool:pytest]\n{DESELECTS}\n"
    },
    "a byte order mark": {"setup.cfg": f"\ufeff[tool:pytest]\n{DESELECTS}\n"},
    "a key with a colon": {"setup.cfg": "[tool:pytest]\naddopts: --collect-only\n"},
    "a line that configparser does not take": {
        "setup.cfg": f"[tool:pytest]\n{DESELECTS}\n[x]\nno value\n"
    },
    "a default section": {"setup.cfg": f"[DEFAULT]\na = %(b)s\n[tool:pytest]\n{DESELECTS}\n"},
    "a comment in the line of a section": {"setup.cfg": f"[tool:pytest] ; x\n{DESELECTS}\n"},
    "two megabytes before it": {"setup.cfg": "#" * (2 << 20) + f"\n[tool:pytest]\n{DESELECTS}\n"},
    "six megabytes before it": {"setup.cfg": "#" * (6 << 20) + f"\n[tool:pytest]\n{DESELECTS}\n"},
    "a dotted key": {"pyproject.toml": "tool.pytest.ini_options.addopts = '--collect-only'\n"},
    "a quoted key": {
        "pyproject.toml": "[tool.'pytest'.\"ini_options\"]\naddopts = '--collect-only'\n"
    },
    "pytest's own table": {"pyproject.toml": "[tool.pytest]\naddopts = ['--collect-only']\n"},
    "a file of its own": {"tests/pytest.ini": f"[pytest]\n{DESELECTS}\n"},
    "a hidden file": {".pytest.ini": f"[pytest]\n{DESELECTS}\n"},
    "tox": {"tox.ini": f"[pytest]\n{DESELECTS}\n"},
    "a plugin in a hidden folder": {
        ".pytest_cache/conftest.py": "",
        "src/conftest.py": "import os; os._exit(0)\n",
    },
}


BY_REPORT = {**PYTEST, "command": [PYTHON, "-m", "pytest"]}


@pytest.mark.parametrize("what", cases(SETTINGS, 0, 8))
@pytest.mark.parametrize(
    "spec",
    cases(
        [
            command("sh", "-c", f"exec {PYTHON} -mpytest"),
            {**PYTEST, "command": [PYTHON, "-mpytest"]},
        ]
    ),
)
@pytest.mark.parametrize("paths", cases([None, ["**"]], 1))
async def test_settings_of_test_runners_are_not_the_agents(tmp_path, what, spec, paths):
    left = Left(tmp_path, START, did=SETTINGS[what])
    judged = await left.judge({**spec, "paths": paths})
    assert (judged.reward, judged.evidence["planted_files"] > 0) == (0.0, True), left.log
    left.do(RIGHT)
    assert (await left.judge({**spec, "paths": paths})).reward == 1.0, left.log


BY_PYTEST = command(PYTHON, "-m", "pytest", "-q")
UNITTEST = command(PYTHON, "-m", "unittest", "discover", "-q", "tests")
UNITS = "import unittest, sys\nsys.path += ['.']\nimport calc\nclass T(unittest.TestCase):\n"
UNITS += "    def test(self): self.assertEqual(calc.add(2, 2), 4)\n"
WRITES = (
    "import calc, pathlib\ndef test_w():\n    (pathlib.Path(__file__).parent /"
    " 'data/out.txt').write_text('4')\n"
)
WRITES += "    assert calc.add(2, 2) == 4\n"
GIVES_4 = 'test "$(python3 main.py)" = 4'
ANSWER = 'test "$(cat answer.txt)" = 1'
PYPROJECT = "[tool.pytest.ini_options]\naddopts = '-q'\n[project]\nname = 'a'\nversion = '1'\n"
SETUP = "[tool:pytest]\naddopts = -q\n[metadata]\n"
SCRIPTS = '{"scripts": {"test": "true"}'
FIXTURE = "import pytest\n@pytest.fixture\ndef four(): return 4\n"
ASKED = {"tests/test_new.py": "import calc\ndef test_add(): assert calc.add(1, 1) == 2\n"}
MAIN = {"main.py": "print(0)\n"}
HONEST = {
    "a module that was asked for beside the script": (
        {"check.py": CHECK.replace("calc.py", "solution.py")},
        command(PYTHON, "check.py"),
        {"solution.py": "print(4)\n"},
    ),
    "a file with the name of the script": (
        {"test/index.sh": "test $(sh src/index.sh) = 4 || exit 1\n", "src/index.sh": "echo 0\n"},
        command("sh", "test/index.sh"),
        {"src/index.sh": "echo 4\n"},
    ),
    "two pytests in one command": (
        START,
        shell(f"{PYTHON} -m pytest -q && {PYTHON} -m pytest -q"),
        RIGHT,
    ),
    "a path of Python in the command": (
        START,
        shell(f"PYTHONPATH=src {PYTHON} -m pytest -q || exit 1"),
        RIGHT,
    ),
    "another folder": (
        {f"back/{name}": text for name, text in START.items()},
        shell(f"cd back && {PYTHON} -m pytest -q"),
        {"back/calc.py": RIGHT["calc.py"]},
    ),
    "a report of the task's own": (
        START,
        shell(f"{PYTHON} -m pytest -q --junitxml=out.xml; grep -q 'failures=\"0\"' out.xml"),
        RIGHT,
    ),
    "a mended function": (START, BY_PYTEST, RIGHT),
    "a mended function, by the report": (START, BY_REPORT, RIGHT),
    "unittest": ({"tests/test_u.py": UNITS, **CALC}, UNITTEST, RIGHT),
    "an answer in a new file": ({"a.txt": ""}, shell(ANSWER), {"answer.txt": "1\n"}),
    "an answer in an old file": (
        {"answer.txt": ""},
        shell(ANSWER, paths=["answer.txt"]),
        {"answer.txt": "1\n"},
    ),
    "src/types.py": (START, BY_PYTEST, {"src/types.py": "X = 1\n", **RIGHT}),
    "queue.py in a package": (
        {"shop/__init__.py": "", **MAIN},
        shell(GIVES_4, paths=["**/*.py"]),
        {"shop/queue.py": "size = 4\n", "main.py": "from shop.queue import size\nprint(size)\n"},
    ),
    "queue.py that paths name": (
        {"check.sh": "python3 -c 'import queue; exit(getattr(queue, \"size\", 0) != 4)'"},
        command("sh", "check.sh", paths=["queue.py"]),
        {"queue.py": "size = 4\n"},
    ),
    "queue.py that no Python reads": (
        {"a": ""},
        shell("cat queue.py | grep -q Queue"),
        {"queue.py": "class Queue: pass\n"},
    ),
    "a new __init__.py": (
        {"pkg/a.py": "X = 4\n", **MAIN},
        shell(GIVES_4, paths=["main.py", "pkg/**"]),
        {"pkg/__init__.py": "from pkg.a import X\n", "main.py": "import pkg\nprint(pkg.X)\n"},
    ),
    "a new module in a package": (
        {"lib/__init__.py": "", **START},
        BY_PYTEST,
        {"lib/ops.py": RIGHT["calc.py"], "calc.py": "from lib.ops import add\n"},
    ),
    "a dependency in pyproject.toml": (
        {"pyproject.toml": PYPROJECT, **START},
        shell(
            f"grep -q attrs pyproject.toml && {PYTHON} -m pytest", paths=["pyproject.toml", "*.py"]
        ),
        {"pyproject.toml": PYPROJECT + "dependencies = ['attrs']\n", **RIGHT},
    ),
    "a dependency in pyproject.toml beside the change": (
        {"pyproject.toml": PYPROJECT, **START},
        BY_PYTEST,
        {"pyproject.toml": PYPROJECT + "dependencies = ['attrs']\n", **RIGHT},
    ),
    "a version in setup.cfg": (
        {"setup.cfg": SETUP + "version = 1\n", **START},
        BY_PYTEST,
        {"setup.cfg": SETUP + "version = 2\n", **RIGHT},
    ),
    "a dependency in package.json": (
        {"package.json": SCRIPTS + "}"},
        shell("grep -q left-pad package.json", paths=["package.json"]),
        {"package.json": SCRIPTS + ', "dependencies": {"left-pad": "1"}}'},
    ),
    "tests of one's own": (
        START,
        BY_PYTEST,
        {**RIGHT, "tests/test_more.py": "def test_it(): assert 0\n"},
    ),
    "tests that were asked for": (
        {**RIGHT, "grade.sh": f"{PYTHON} -m pytest -q tests || exit 1"},
        command("sh", "grade.sh", paths=["tests/**"]),
        ASKED,
    ),
    "a Makefile that was asked for": (
        {"a.txt": ""},
        shell("make -s build || exit 1", paths=["Makefile"]),
        {"Makefile": "build:\n\ttrue\n"},
    ),
    "a conftest.py that was asked for": (
        {"tests/test_a.py": "def test_a(four): assert four == 4\n"},
        {**BY_REPORT, "paths": ["tests/conftest.py"]},
        {"tests/conftest.py": FIXTURE},
    ),
    "a script of a shell": (
        {"a.txt": "b\na\n"},
        shell('test "$(sh sort.sh a.txt | head -1)" = a', paths=["sort.sh"]),
        {"sort.sh": 'sort "$1"\n'},
    ),
    "a deleted file": (
        {"old": "", "new": ""},
        shell("test ! -e old -a -e new", paths=["old"]),
        {"old": None},
    ),
    "tests that write beside their data": (
        {**CALC, "tests/data/a": "", "tests/test_w.py": WRITES},
        BY_PYTEST,
        RIGHT,
    ),
}


@pytest.mark.parametrize("what", cases(HONEST, 4, 7, 10, 13))
async def test_an_ordinary_solution_earns_what_it_should(tmp_path, what):
    start, spec, did = HONEST[what]
    left = Left(tmp_path, start)
    instruction = "Mend it, or write solution.py."
    assert (await left.judge(spec, instruction)).reward == 0.0, left.log
    left.do(did)
    judged = await left.judge(spec, instruction)
    assert (judged.reward, judged.unjudged) == (1.0, None), left.log
