import importlib.util
import sys
from pathlib import Path

import pytest

from rolltap.addons.errors import InputError
from rolltap.errors import MissingPackageError
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.judges import command as module
from rolltap.trainer.judges.command import judge_here, require_evaluator
from tests.boxes import sandboxed
from tests.trainer.judges.sessions import Left, command, shell

REWARDS = [
    ("exit 0", "status", 1.0),
    ("exit 1", "status", 0.0),
    ("echo 0.25", "status", 1.0),
    ("echo 1; exit 1", "status", 0.0),
    ("echo 0.5 > $ROLLTAP_REWARD_FILE; echo 1; exit 1", "number", 0.5),
    ("""echo '{"reward": 0.5, "parts": {"a": 10}}' > $ROLLTAP_REWARD_FILE""", "json", 0.5),
]
UNJUDGED = [
    ("exit 2", "status", "ended with status 2, and only 0 and 1 are a verdict"),
    ("no-such-program", "status", "'sh', or a program in it, is not there"),
    ("kill -9 $$", "status", "ended by signal 9"),
    ("echo 0.5", "number", "wrote no reward to ROLLTAP_REWARD_FILE"),
    ("echo 0.5 > $ROLLTAP_REWARD_FILE; exit 3", "number", "ended with status 3"),
    ("echo 1.5 > $ROLLTAP_REWARD_FILE", "number", "range [0.0, 1.0]: set its 'range'"),
    ("yes | head -c 70000 > $ROLLTAP_REWARD_FILE", "number", "verdict has more than 64 KiB"),
]


@pytest.mark.parametrize(("script", "result", "reward"), REWARDS)
async def test_the_reward_is_the_exit_status_or_a_value_in_the_file(
    tmp_path, script, result, reward
):
    await Left(tmp_path, {}, did={"b.txt": ""}).earns(reward, shell(script, result=result))


@pytest.mark.parametrize(("script", "result", "why"), UNJUDGED)
async def test_all_else_is_unjudged(tmp_path, script, result, why):
    left = Left(tmp_path, {}, did={"b.txt": ""})
    assert why in await left.is_unjudged(shell(script, result=result))


async def test_a_reward_may_be_as_large_as_the_range_says(tmp_path):
    spec = shell("echo -3 > $ROLLTAP_REWARD_FILE", result="number", range=[-5, 100])
    left = Left(tmp_path, {})
    await left.earns(-3.0, spec)
    with pytest.raises(InputError, match="give the smallest reward, then the largest"):
        await left.judge({**spec, "range": [1, 0]})


SCRIPT = """import os, subprocess
subprocess.run(["sh", "child.sh"])
os.write(int(os.environ["ROLLTAP_REWARD_FD"]), b"0.25")
"""
TO_ALL = """
for i in 3 4 5 6 7 8 9; do printf 1. >&$i; done
for f in /proc/$PPID/fd/*; do printf 1. > $f; done
true
"""


@sandboxed
@pytest.mark.parametrize("how", ["check.py", "-B check.py", "-m check"])
async def test_a_python_script_keeps_the_descriptor_to_itself(tmp_path, how):
    start = {"check.py": SCRIPT, "child.sh": "true"}
    left = Left(tmp_path, start, SandboxRuntime(), did={"child.sh": TO_ALL})
    await left.earns(0.25, command("python3", *how.split(), result="number"))
    assert "Permission denied" in left.log


async def test_children_of_another_program_have_no_descriptor(tmp_path):
    left = Left(tmp_path, {"child.sh": "true"}, did={"child.sh": TO_ALL})
    script = f"echo >> {tmp_path}/runs; sh child.sh; echo 0 > $ROLLTAP_REWARD_FILE"
    evidence = await left.earns(0.0, shell(script, result="number", paths=["child.sh"]))
    assert not {"broke_judge", "forged_report"} & evidence.keys()
    assert (tmp_path / "runs").read_text() == "\n"


@pytest.mark.parametrize("program", ["no-such-evaluator", "/dev/null"])
async def test_a_judge_that_cannot_be_started_is_unjudged(tmp_path, program):
    left = Left(tmp_path, {}, did={"a.txt": ""})
    why = await left.is_unjudged(command(program))
    assert f"the judge {program!r} could not be started" in why


@pytest.mark.parametrize(
    ("code", "reward"),
    [("import nosuch", None), ("import calc; calc.add", 0.0), ("import answer", 0.0)],
)
async def test_a_judge_without_a_module_has_no_verdict_unless_the_agent_was_asked_for_it(
    tmp_path, code, reward
):
    left = Left(tmp_path, {"calc.py": "add = 1"}, did={"calc.py": "ad = 1"})
    judged = await left.judge(command(sys.executable, "-c", code), "Write the module answer.")
    assert judged.reward == reward


async def test_a_time_limit_is_unjudged_when_the_start_takes_as_long(tmp_path):
    left = Left(tmp_path, {}, did={"a.txt": ""})
    why = await left.is_unjudged(shell("exec sleep 600", timeout=0.2))
    first, second = why.split("; on the untouched start: ")
    assert first == "the judge took more than 0.2 s; its output is in t-0.judge.log"
    assert second == "the judge took more than 0.2 s; its output is in t-0.start.judge.log"


async def test_the_environment_is_clean_and_has_the_judges_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    left = Left(tmp_path, {})
    (left.home / ".profile").write_text("planted")
    script = 'test -z "$SECRET_KEY" && test "$A" = b && test -z "$(ls -A $HOME)"'
    await left.earns(1.0, shell(script, env={"A": "b"}))


async def test_only_what_paths_name_is_applied(tmp_path):
    left = Left(tmp_path, {"src/a": "old", "b": "old", "src/c": "old"})
    left.do(dict.fromkeys(["src/a", "b", "src/c", "src/d"], "new"))
    spec = shell("cat src/a b src/c src/d; exit 0", paths=["src/**"], files=["**/c"])
    evidence = await left.earns(1.0, spec)
    assert left.log == "newoldnewnew"
    assert evidence["refused"] == ["b: protected"]
    left.do({"new": "new"})
    evidence = await left.earns(1.0, shell("true", files=["**/c", "n*"]))
    assert evidence["refused"] == ["new: protected", "src/c: protected"]


async def test_nothing_of_the_judging_is_left(tmp_path):
    deep = "import os\nfor i in range(1500):\n    os.mkdir('d' * 9)\n    os.chdir('d' * 9)\n"
    left = Left(tmp_path, {}, did={"deep.py": deep})
    await left.judge(shell("python3 deep.py; mkdir closed; chmod 0 closed"))
    left_over = {path.name for path in left.workspace.parent.iterdir()}
    assert left_over == {"home", "workspace"}


@pytest.fixture
def judge(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def judge(command):
        return judge_here(command, tmp_path / "logs" / "s.evaluate.log")

    return judge


def test_a_verdict_is_a_status_and_what_it_leaves_running_ends_with_it(judge, tmp_path):
    judged = judge("""setsid sleep 1000 & echo $! > pid; echo '{"reward": 0.5}'""")
    assert judged.reward == 1.0
    assert judged.parts == {}
    assert judged.evidence["log"] == "s.evaluate.log"
    pid = (tmp_path / "pid").read_text().strip()
    with pytest.raises(FileNotFoundError):
        Path(f"/proc/{pid}/stat").read_text()
    assert judge("echo 5 passed; exit 1").reward == 0.0


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python3 -c 'import nosuch'", "without the module nosuch"),
        ("kill -9 $$", "status -9"),
        ("no-such-program", "'no-such-program', or a program in it, is not there"),
    ],
)
def test_an_evaluator_that_breaks_gives_no_verdict(judge, command, why):
    judged = judge(command)
    assert judged.reward is None
    assert why in judged.unjudged


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("no-such-program -q | cat", "needs 'no-such-program', which is not on the PATH"),
        ("pytest -q '", "is no command of a shell: sh: "),
        (" ", "is no command of a shell: it is empty"),
    ],
)
def test_an_evaluator_that_cannot_run_is_refused(command, why):
    with pytest.raises(InputError) as refused:
        require_evaluator(command)
    assert f"the evaluator {command!r} {why}" in str(refused.value)


@pytest.mark.parametrize(
    "command", ["! false", "if true; then exit 1; fi", "test -e x", "./made --x", "A=1 sh -c :"]
)
def test_what_a_shell_knows_or_the_session_makes_is_not_looked_for(command):
    require_evaluator(command)


RUN = """
import sys, unittest, calc
class T(unittest.TestCase):
    def test_add(self): self.assertEqual(calc.add(2, 2), 4)
    def test_zero(self): self.assertEqual(calc.add(0, 0), 0)
unittest.main(verbosity=2)
"""
UNITTESTS = {"calc.py": "def add(a, b): return a - b\n", "run.py": RUN}
BY_LOG = {
    "kind": "pytest",
    "command": [sys.executable, "run.py"],
    "log_parser": "parse_log_django",
    "fail_to_pass": ["test_add (__main__.T.test_add)"],
    "pass_to_pass": ["test_zero (__main__.T.test_zero)"],
    "files": ["run.py"],
}


async def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swebench.harness.log_parsers", None)
    module._swebench.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install -e '\S+\[swe\]'"):
        await Left(tmp_path, UNITTESTS).judge(BY_LOG)


with_swebench = pytest.mark.skipif(
    importlib.util.find_spec("swebench") is None, reason="swebench is not installed"
)
GRADED = [
    ("def add(a, b): return a + b\n", 1.0, [1.0, 1.0]),
    ("def add(a, b): return 4\n", 0.0, [1.0, 0.0]),
    ("def add(a, b): return 2\n", 0.0, [0.0, 0.0]),
    ("import os; os._exit(0)\n", 0.0, []),
    ("import os; os._exit(3)\n", 0.0, []),
]


@with_swebench
@pytest.mark.parametrize(("code", "reward", "parts"), GRADED)
async def test_a_log_of_other_tests_than_pytests_is_graded(tmp_path, code, reward, parts):
    judged = await Left(tmp_path, UNITTESTS, did={"calc.py": code}).judge(BY_LOG)
    assert judged.reward == reward
    assert [*judged.parts.values()] == parts


@with_swebench
async def test_a_parser_that_is_not_there_is_unjudged(tmp_path):
    why = await Left(tmp_path, UNITTESTS).is_unjudged({**BY_LOG, "log_parser": "parse_log_no"})
    assert why.startswith("swebench has no log parser 'parse_log_no': name one of")
