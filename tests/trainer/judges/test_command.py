import importlib.util
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rolltap.addons.errors import InputError
from rolltap.errors import MissingPackageError
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.judges import command
from rolltap.trainer.judges.command import judge_here, require_evaluator
from tests.boxes import sandboxed
from tests.trainer.judges.sessions import Left, shell


@pytest.mark.parametrize(
    ("script", "result", "reward", "why"),
    [
        ("exit 0", "status", 1.0, None),
        ("exit 1", "status", 0.0, None),
        ("echo 0.25", "status", 1.0, None),
        ("echo 1; exit 1", "status", 0.0, None),
        ("exit 2", "status", None, "ended with status 2, and only 0 and 1 are a verdict"),
        ("no-such-program", "status", None, "'sh', or a program in it, is not there"),
        ("kill -9 $$", "status", None, "ended by signal 9"),
        ("echo 0.5", "number", None, "wrote no reward to ROLLTAP_REWARD_FILE"),
        ("echo 0.5 > $ROLLTAP_REWARD_FILE; echo 1; exit 1", "number", 0.5, None),
        ('echo \'{"reward": 0.5, "parts": {"a": 10}}\' > $ROLLTAP_REWARD_FILE', "json", 0.5, None),
        ("echo 0.5 > $ROLLTAP_REWARD_FILE; exit 3", "number", None, "ended with status 3"),
        (
            "echo score: 0.3 > $ROLLTAP_REWARD_FILE",
            "number",
            None,
            "'score: 0.3' is not one number",
        ),
        (
            "echo 1.5 > $ROLLTAP_REWARD_FILE",
            "number",
            None,
            "is not in the judge's range [0.0, 1.0]: set its 'range'",
        ),
        ("echo 1e300 > $ROLLTAP_REWARD_FILE", "number", None, "is no reward: "),
        (
            "yes | head -c 70000 > $ROLLTAP_REWARD_FILE",
            "number",
            None,
            "its verdict has more than 64 KiB",
        ),
    ],
)
async def test_the_reward_is_the_exit_status_or_a_value_in_the_file_and_all_else_is_unjudged(
    tmp_path, script, result, reward, why
):
    judged = await Left(tmp_path, {}, did={"b.txt": "made"}).judge(shell(script, result=result))
    assert judged.reward == reward
    assert judged.unjudged is None if why is None else why in judged.unjudged


async def test_a_reward_may_be_as_large_as_the_range_says(tmp_path):
    spec = shell("echo -3 > $ROLLTAP_REWARD_FILE", result="number", range=[-5, 100])
    assert (await Left(tmp_path, {}).judge(spec)).reward == -3.0
    with pytest.raises(ValidationError, match="give the smallest reward, then the largest"):
        await Left(tmp_path / "other", {}).judge({**spec, "range": [1, 0]})


SCRIPT = """import os, subprocess
subprocess.run(["sh", "child.sh"])
os.write(int(os.environ["ROLLTAP_REWARD_FD"]), b"0.25")
"""
TO_ALL = (
    "for i in 3 4 5 6 7 8 9; do printf 1. >&$i; done; for f in /proc/$PPID/fd/*; do printf 1. > $f;"
    " done; true"
)


@sandboxed
@pytest.mark.parametrize("how", [["check.py"], ["-B", "check.py"], ["-m", "check"]])
async def test_a_python_script_keeps_the_descriptor_to_itself(tmp_path, how):
    left = Left(
        tmp_path,
        {"check.py": SCRIPT, "child.sh": "true"},
        SandboxRuntime(),
        did={"child.sh": TO_ALL},
    )
    judged = await left.judge({"kind": "command", "command": ["python3", *how], "result": "number"})
    assert (judged.reward, "Permission denied" in left.log) == (0.25, True), left.log


@pytest.mark.parametrize("program", [f"{TO_ALL}; exec true", "printf 1. > $ROLLTAP_REWARD_FILE"])
async def test_children_of_another_program_have_no_descriptor_and_two_rewards_are_none(
    tmp_path, program
):
    left = Left(tmp_path, {"child.sh": "true"}, did={"child.sh": program})
    script = f"echo >> {tmp_path}/runs; sh child.sh; echo 0 > $ROLLTAP_REWARD_FILE"
    judged = await left.judge(shell(script, result="number", paths=["child.sh"]))
    assert judged.reward == 0.0
    assert (
        ("broke_judge" in judged.evidence)
        == ("forged_report" in judged.evidence)
        == ("FILE" in program)
    )
    assert (tmp_path / "runs").read_text() == "\n" * (
        1 + ("FILE" in program)
    )  # the start's, and one of the changes


@pytest.mark.parametrize("program", ["no-such-evaluator", "/dev/null"])
async def test_a_judge_that_cannot_be_started_is_unjudged(tmp_path, program):
    judged = await Left(tmp_path, {}, did={"a.txt": "made"}).judge(
        {"kind": "command", "command": [program]}
    )
    assert f"the judge {program!r} could not be started" in judged.unjudged


@pytest.mark.parametrize(
    ("code", "reward"),
    [("import nosuch", None), ("import calc; calc.add", 0.0), ("import answer", 0.0)],
)
async def test_a_judge_without_a_module_has_no_verdict_unless_the_agent_was_asked_for_it(
    tmp_path, code, reward
):
    left = Left(tmp_path, {"calc.py": "add = 1"}, did={"calc.py": "ad = 1"})
    spec = {"kind": "command", "command": [sys.executable, "-c", code]}
    assert (await left.judge(spec, "Write the module answer.")).reward == reward


async def test_a_time_limit_is_unjudged_when_the_start_takes_as_long(tmp_path):
    judged = await Left(tmp_path, {}, did={"a.txt": "made"}).judge(
        shell("exec sleep 600", timeout=0.2)
    )
    assert (
        judged.unjudged
        == "the judge took more than 0.2 s; its output is in t-0.judge.log; on the untouched"
        " start: "
        "the judge took more than 0.2 s; its output is in t-0.start.judge.log"
    )


async def test_the_environment_is_clean_and_has_the_judges_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    script = 'test -z "$SECRET_KEY" && test "$A" = b && test -z "$(ls -A $HOME)"'
    left = Left(tmp_path, {})
    (left.home / ".profile").write_text("planted")
    assert (await left.judge(shell(script, env={"A": "b"}))).reward == 1.0


async def test_only_what_paths_name_is_applied(tmp_path):
    left = Left(tmp_path, {"src/a": "old", "b": "old", "src/c": "old"})
    left.do({"src/a": "new", "b": "new", "src/c": "new", "src/d": "new"})
    judged = await left.judge(
        shell("cat src/a b src/c src/d; exit 0", paths=["src/**"], files=["**/c"])
    )
    assert left.log == "newoldnewnew"
    assert judged.evidence["refused"] == ["b: protected"]
    left.do({"new": "new"})
    assert (await left.judge(shell("true", files=["**/c", "n*"]))).evidence["refused"] == [
        "new: protected",
        "src/c: protected",
    ]


async def test_nothing_of_the_judging_is_left(tmp_path):
    deep = "import os\nfor i in range(1500):\n    os.mkdir('d' * 9)\n    os.chdir('d' * 9)\n"
    left = Left(tmp_path, {}, did={"deep.py": deep})
    await left.judge(shell("python3 deep.py; mkdir closed; chmod 0 closed"))
    assert sorted(path.name for path in Path(left.workspace.parent).iterdir()) == [
        "home",
        "workspace",
    ]


@pytest.fixture
def judge(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda command: judge_here(command, tmp_path / "logs" / "s.evaluate.log")


def test_a_verdict_is_a_status(judge):
    judged = judge("""echo '{"reward": 0.5}'""")
    assert (judged.reward, judged.parts, judged.evidence["log"]) == (1.0, {}, "s.evaluate.log")
    assert judge("echo 5 passed; exit 1").reward == 0.0


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python3 -c 'import nosuch'", "without the module nosuch"),
        ("kill -9 $$", "status -9"),
        ("no-such-program", "'no-such-program', or a program in it, is not there"),
    ],
)
def test_all_else_is_no_verdict(judge, command, why):
    judged = judge(command)
    assert (judged.reward, why in judged.unjudged) == (None, True), judged.unjudged


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


def test_what_it_leaves_running_ends_with_it(judge, tmp_path):
    judged = judge("sh -c 'setsid sleep 1000 & echo $! > pid; echo 1'")
    assert judged.reward == 1.0
    pid = (tmp_path / "pid").read_text().strip()
    with pytest.raises(FileNotFoundError):
        Path(f"/proc/{pid}/stat").read_text()


UNITTESTS = {
    "calc.py": "def add(a, b): return a - b\n",
    "run.py": (
        "import sys, unittest, calc\n"
        "class T(unittest.TestCase):\n"
        "    def test_add(self): self.assertEqual(calc.add(2, 2), 4)\n"
        "    def test_zero(self): self.assertEqual(calc.add(0, 0), 0)\n"
        "unittest.main(verbosity=2)\n"
    ),
}
NAMES = [f"{name} (__main__.T.{name})" for name in ("test_add", "test_zero")]
BY_LOG = {
    "kind": "pytest",
    "command": [sys.executable, "run.py"],
    "log_parser": "parse_log_django",
    "fail_to_pass": NAMES[:1],
    "pass_to_pass": NAMES[1:],
    "files": ["run.py"],
}


async def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swebench.harness.log_parsers", None)
    command._swebench.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install -e '\S+\[swe\]'"):
        await Left(tmp_path, UNITTESTS).judge(BY_LOG)


@pytest.mark.skipif(
    importlib.util.find_spec("swebench") is None, reason="swebench is not installed"
)
class TestWithThePackage:
    @pytest.mark.parametrize(
        ("code", "reward", "parts"),
        [
            ("def add(a, b): return a + b\n", 1.0, (1.0, 1.0)),
            ("def add(a, b): return 4\n", 0.0, (1.0, 0.0)),
            ("def add(a, b): return 2\n", 0.0, (0.0, 0.0)),
            ("import os; os._exit(0)\n", 0.0, ()),
            ("import os; os._exit(3)\n", 0.0, ()),
        ],
    )
    async def test_a_log_of_other_tests_than_pytests_is_graded(self, tmp_path, code, reward, parts):
        left = Left(tmp_path, UNITTESTS, did={"calc.py": code})
        judged = await left.judge(BY_LOG)
        assert (judged.reward, tuple(judged.parts.values())) == (reward, parts), left.log

    async def test_a_parser_that_is_not_there_is_unjudged(self, tmp_path):
        judged = await Left(tmp_path, UNITTESTS).judge({**BY_LOG, "log_parser": "parse_log_no"})
        assert judged.unjudged == (
            "swebench has no log parser 'parse_log_no':"
            " name one of swebench.harness.log_parsers.PARSER_REGISTRY"
        )
