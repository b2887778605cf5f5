import asyncio
import re
import sys
import threading
from contextlib import asynccontextmanager

import pytest

from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.concurrency import Once
from rolltap.trainer.judges import changes, tests
from rolltap.trainer.judges import judge as module
from tests.boxes import sandboxed
from tests.deep import cases
from tests.trainer.judges.sessions import Left, command, shell, write

PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml", "{report}"]
TESTS = """
import calc
def test_add(): assert calc.add(2, 2) == 4
def test_zero(): assert calc.add(0, 0) == 0
"""
START = {"calc.py": "def add(a, b): return a - b\n", "test_calc.py": TESTS}
GOOD = "def add(a, b): return a + b\n"
SPEC = {
    "kind": "pytest",
    "command": PYTEST,
    "fail_to_pass": ["test_calc.py::test_add"],
    "pass_to_pass": ["test_calc.py::test_zero"],
}


async def test_the_right_change_earns_1_with_evidence_of_what_was_changed_and_tested(tmp_path):
    left = Left(tmp_path, START, did={"calc.py": GOOD})
    evidence = await left.earns(1.0, SPEC)
    assert evidence["canary"] == "failed"
    assert {*evidence["tests"]} == {"test_calc.py::test_add", "test_calc.py::test_zero"}
    assert evidence["changed"] == ["calc.py"]
    assert (left.logs / "t-0.diff").read_text().startswith("--- a/calc.py\n+++ b/calc.py\n")


async def test_a_report_and_the_changes_however_large_do_not_hold_up_the_loop(
    tmp_path, monkeypatch
):
    threads = {}

    def note(where, name):
        function = getattr(where, name)

        def noting(*arguments):
            threads[name] = threading.current_thread()
            return function(*arguments)

        monkeypatch.setattr(where, name, noting)

    for name in ("read_report", "compare", "read_marks", "tell_tests"):
        note(tests, name)
    note(changes.Changes, "evidence")
    await Left(tmp_path, START, did={"calc.py": GOOD}).earns(1.0, SPEC)
    assert len(threads) == 5
    assert threading.main_thread() not in threads.values()


FORGER = """
import os, rolltap_report
report = b"<a><testcase classname='test_calc' name='test_add'/></a>"
os.write(rolltap_report.PIPE, report)
os._exit(0)
"""
BROKEN = {
    "a judge without pytest": (
        {},
        {"command": [PYTHON, "-S", "-m", *PYTEST[2:]]},
        "wrote no report.*on the untouched start",
    ),
    "a judge without a module of its own": (
        {"conftest.py": "import no_such_module\n"},
        {},
        "wrote no report.*on the untouched start",
    ),
    "tests of which none passes": (
        {"test_calc.py": "import numpie\n" + TESTS},
        {},
        "^no test of 'pass_to_pass' passes on the untouched start; the output .* is in t-0",
    ),
    "a patch that does not fit": (
        {},
        {"test_patch": "--- a/no\n+++ b/no\n@@ -1 +1 @@\n-a\n+b\n"},
        "^the task's test_patch does not fit its start:",
    ),
}


@pytest.mark.parametrize("why", BROKEN)
async def test_a_judge_that_is_broken_on_the_start_is_unjudged_whatever_the_agent_did(
    tmp_path, why
):
    files, fields, message = BROKEN[why]
    left = Left(tmp_path, {**START, **files}, did={"calc.py": GOOD})
    assert re.search(message, await left.is_unjudged({**SPEC, **fields}))


async def test_a_report_without_the_tests_that_must_fail_is_unjudged_when_the_start_has_none(
    tmp_path,
):
    tests = TESTS.partition("def test_zero")[0]
    start = {"conftest.py": "import calc\n", "test_calc.py": tests}
    left = Left(tmp_path, start, did={"calc.py": FORGER})
    why = await left.is_unjudged({**SPEC, "pass_to_pass": []})
    assert why.startswith(
        "the report lacks the tests that must fail, and the untouched start has no"
    )


@pytest.mark.parametrize(
    ("code", "timeout", "why"),
    [
        ("import os; os._exit(0)\n", 60, "ended with status 0 and wrote no report"),
        ("import os; os.abort()\n", 60, "ended by signal 6"),
        pytest.param("while True: pass\n", 30, "took more than 30 s", marks=pytest.mark.deep),
    ],
)
async def test_a_judge_that_works_on_the_start_and_breaks_with_the_changes_was_broken_by_them(
    tmp_path, code, timeout, why
):
    left = Left(tmp_path, START, did={"calc.py": code})
    evidence = await left.earns(0.0, {**SPEC, "timeout": timeout})
    assert evidence["untouched_start"] == 0.0
    assert why in evidence["broke_judge"]


async def test_an_untouched_workspace_is_judged_once(tmp_path):
    why = await Left(tmp_path, {}).is_unjudged(shell(f"echo x >> {tmp_path}/count; exit 7"))
    assert why.startswith("the judge ended with status 7")
    assert (tmp_path / "count").read_text() == "x\n"


async def test_a_start_is_judged_once_for_all_sessions_of_a_task(tmp_path, monkeypatch):
    left = Left(tmp_path, {"run.sh": "echo x >> $COUNT; exit 0\n"}, did={"run.sh": "exit 7\n"})
    spec = command("sh", "run.sh", paths=["**"], env={"COUNT": str(tmp_path / "count")})
    for _ in range(3):
        await left.earns(0.0, spec)
    assert (tmp_path / "count").read_text() == "x\n"
    monkeypatch.setattr(module, "_MAX_BASELINES", 0)
    monkeypatch.setattr(module, "_baselines", Once(module._is_kept))
    await left.earns(0.0, spec)
    assert len(module._baselines) == 0


@pytest.mark.parametrize(("status", "reward"), [(0, 1.0), (7, None)])
async def test_sessions_that_need_it_together_have_the_start_judged_once(tmp_path, status, reward):
    result = "status" if reward else "number"
    script = f"echo x >> {tmp_path}/count; exit {status}"
    job = Left(tmp_path, {}).job(shell(script, result=result))
    # a start without a verdict is judged again by who asks later: all ask at once
    asked = [module._judge_start(job.task.judge, job) for _ in range(4)]
    starts = await asyncio.gather(*asked)
    assert [start.reward for start in starts] == [reward] * 4
    assert (tmp_path / "count").read_text() == "x\n"


async def test_a_session_that_is_cancelled_while_it_has_the_start_judged_leaves_that_to_the_next(
    tmp_path,
):
    job = Left(tmp_path, {}).job(shell("exit 0"))
    judging = module._judge_start
    first, second = [asyncio.create_task(judging(job.task.judge, job)) for _ in range(2)]
    await asyncio.sleep(0)  # the first one has it judged now
    first.cancel()
    assert (await second).reward == 1.0
    assert first.cancelled()


ARGUMENTS = [
    ([*PYTEST, "-x"], "a + b", "failed"),
    ([*PYTEST, "-k", "zero"], "a - b", "failed"),
    ([*PYTEST, "-q", "-q"], "a + b", "failed"),
    # trusted when the start says the same
    (["env", "-u", "PYTEST_PLUGINS", *PYTEST, "test_calc.py"], "a + b", "absent"),
]


@pytest.mark.parametrize(("words", "code", "canary"), cases(ARGUMENTS, 1, 3))
async def test_the_arguments_of_a_task_do_not_silence_the_tests_that_must_fail(
    tmp_path, words, code, canary
):
    left = Left(tmp_path, START, did={"calc.py": f"def add(a, b): return {code}\n"})
    spec = {**SPEC, "command": words}
    if canary == "failed":
        spec["fail_to_pass"] = []
    assert (await left.earns(1.0, spec))["canary"] == canary


async def test_several_judges_give_the_weighted_mean_unless_one_cannot_judge(tmp_path):
    left = Left(tmp_path, {})
    half = """echo '{"reward": 0.5, "parts": {"c": 2}}' > $ROLLTAP_REWARD_FILE"""
    first = {"name": "a", "weight": 3, "judge": shell("exit 0")}
    second = {"name": "b", "weight": 1, "judge": shell(half, result="json")}
    judged = await left.judge({"kind": "several", "judges": [first, second]})
    assert judged.reward == pytest.approx(0.875)
    assert judged.parts == {"a": 1.0, "b": 0.5, "b.c": 2.0}
    assert judged.evidence["judges"]["b"]["judge"] == "command"
    broken = {"name": "b", "judge": shell("exit 9")}
    judged = await left.judge({"kind": "several", "judges": [first, broken]})
    assert judged.unjudged.startswith("b: the judge ended with status 9")
    assert judged.parts == {"a": 1.0}


FUNCTIONS = """
import os, time
def number(folder): return float((folder / "a.txt").read_text())
def parts(folder): return {"reward": 0.5, "parts": {"files": len(list(folder.iterdir()))}, "reason": "half"}
def true(folder): return True
def nan(folder): return float("nan")
def raises(folder): raise KeyError("why")
def slow(folder): time.sleep(600)
def dies(folder): os._exit(0)
class Judges:
    @staticmethod
    def inner(folder): return 1
"""
GIVEN = [("number", 7.0), ("parts", 0.5), ("Judges.inner", 1.0)]
NOT_GIVEN = [
    ("true", "is not one number"),
    ("nan", "is not one number"),
    ("raises", "gave no result (status 3): KeyError: 'why'"),
    ("slow", "took more than 2 s"),
    ("dies", "gave no result (status 0)"),
    ("missing", "has no attribute 'missing'"),
]


@pytest.fixture
def judge_by(tmp_path, monkeypatch):
    """Return a function that judges a session by a function of the user's."""
    write(tmp_path / "modules", {"my_judges.py": FUNCTIONS})
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    left = Left(tmp_path / "left", {"a.txt": "6"}, did={"a.txt": "7", "json.py": "raise OSError"})
    left.do({"my_judges.py": "def number(folder): return 1000\n"})
    timeouts = {"slow": 2}

    async def judge_by(name):
        spec = {"kind": "python", "function": f"my_judges:{name}", "range": [0, 10]}
        return await left.judge({**spec, "timeout": timeouts.get(name, 120)})

    return judge_by


@pytest.mark.parametrize(("function", "reward"), GIVEN)
async def test_a_function_of_the_users_judges_in_a_process_of_its_own(judge_by, function, reward):
    judged = await judge_by(function)
    assert judged.reward == reward
    if function == "parts":
        assert judged.parts == {"files": 3.0}
        assert judged.evidence["reason"] == "half"


@pytest.mark.parametrize(("function", "why"), NOT_GIVEN)
async def test_a_function_that_gives_no_reward_has_no_verdict(judge_by, function, why):
    judged = await judge_by(function)
    assert judged.reward is None
    assert why in judged.unjudged


async def test_a_function_is_found_in_its_folder_first_and_never_in_a_workspace(
    tmp_path, monkeypatch
):
    marks = "def judge(folder): return {}\n"
    write(tmp_path, {"tasks/marks.py": marks.format(1), "modules/marks.py": marks.format(2)})
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    planted = dict.fromkeys(["marks.py", "plain.py"], marks.format(3))
    left = Left(tmp_path / "left", {}, did=planted)
    spec = {"kind": "python", "function": "marks:judge", "range": [0, 3]}
    await left.earns(2.0, spec)
    spec["folder"] = tmp_path / "tasks"
    await left.earns(1.0, spec)
    why = await left.is_unjudged({**spec, "function": "plain:judge"})
    assert "No module named 'plain'" in why
    # a task whose start is this folder keeps its digest
    assert [file.name for file in (tmp_path / "tasks").iterdir()] == ["marks.py"]


async def test_the_start_is_judged_by_the_function_of_the_same_folder(tmp_path):
    breaks = "def judge(folder): return float((folder / 'done').read_text() or 'nan')\n"
    write(tmp_path, {"one/marks.py": breaks, "two/marks.py": ""})
    left = Left(tmp_path / "left", {"done": "0"}, did={"done": ""})
    spec = {"kind": "python", "function": "marks:judge", "range": [0, 3]}
    evidence = await left.earns(0.0, {**spec, "folder": tmp_path / "one"})
    assert evidence["untouched_start"] == 0.0
    why = await left.is_unjudged({**spec, "folder": tmp_path / "two"})
    assert "on the untouched start" in why


@sandboxed
@pytest.mark.parametrize("shown", ["nothing", "a link", "all"])
async def test_a_judges_program_in_a_folder_that_a_box_does_not_show_names_the_folder(
    tmp_path, shown
):
    environment = tmp_path / "venv"
    program = environment / "bin" / "checks"
    base = tmp_path / "base" / "checks"
    write(tmp_path, {"base/checks": "#!/bin/sh\nexit 0\n", "venv/bin/other": ""})
    base.chmod(0o755)
    program.symlink_to(base)
    tools = {"nothing": [], "a link": [environment], "all": [environment, base.parent]}[shown]
    left = Left(tmp_path / "left", {}, SandboxRuntime(tools=tools))
    spec = command(str(program))
    why = await left.fault_on_start(spec)
    if shown == "all":
        assert why == ""
        await left.earns(1.0, spec)
        return
    folder = {"nothing": environment, "a link": base.parent}[shown]
    advice = f". A box does not show this machine's {folder}: name it with --tools DIR"
    assert advice in why
    assert advice in await left.is_unjudged(spec)


BENCH = """
import os, metric
os.write(int(os.environ['ROLLTAP_REWARD_FD']), str(metric.speed()).encode())
"""


@pytest.mark.parametrize(
    "code",
    [
        "print('1', flush=True); import os; os._exit(0)",
        "def speed(): return float('nan')",
        "def speed(): return 'fast'",
        "def speed(): return 1000000",
        "import os; os.write(int(os.environ['ROLLTAP_REWARD_FD']), b'none'); os._exit(0)",
    ],
)
async def test_a_reward_that_the_changes_spoiled_is_0(tmp_path, code):
    start = {"metric.py": "def speed(): return 0.25\n", "bench.py": BENCH}
    left = Left(tmp_path, start, did={"metric.py": code})
    evidence = await left.earns(0.0, command(PYTHON, "bench.py", result="number"))
    assert evidence["untouched_start"] == 0.25


SPOILED = {
    "broken": "import os; os.kill(os.getppid(), 9)",
    "its files changed": "open('own.txt', 'w').write('mine')",
    "too much": "",
}


@pytest.mark.parametrize("how", SPOILED)
async def test_the_worst_reward_is_the_end_of_the_range(tmp_path, monkeypatch, how):
    left = Left(tmp_path, {"calc.py": "", "own.txt": "own"}, did={"calc.py": SPOILED[how]})
    script = f"{PYTHON} -c 'import calc'; echo -0.5 > $ROLLTAP_REWARD_FILE"
    spec = shell(script, result="number", range=[-1, 0], files=["own.txt"])
    if how == "too much":
        monkeypatch.setattr(changes, "MAX_CHANGED_BYTES", 0)
        left.do({"big": "x"})
    await left.earns(-1.0, spec)
    weighted = [{"name": "a", "weight": 3, "judge": spec}, {"name": "b", "judge": shell("exit 1")}]
    assert (await left.judge({"kind": "several", "judges": weighted})).reward == -0.75


@pytest.mark.parametrize("script", [f"{PYTHON} -m pytest -q || exit 1", "grep -q 'a + b' calc.py"])
async def test_an_exit_status_is_an_end_of_the_range(tmp_path, script):
    left = Left(tmp_path, START, did={"a.py": ""})
    spec = shell(script, range=[-1, 0], paths=["*.py"])
    await left.earns(-1.0, spec)
    left.do({"calc.py": GOOD})
    await left.earns(0.0, spec)


async def test_a_judge_that_breaks_once_is_asked_again(tmp_path):
    left = Left(tmp_path, {"a.txt": "old"}, did={"a.txt": "new"})
    once = f"{tmp_path}/once"
    script = f"test ! -e {once} && grep -q new a.txt && touch {once} && kill -9 $$; exit 0"
    evidence = await left.earns(1.0, shell(script, paths=["**"]))
    assert evidence["first_judged"].startswith("the judge was ended by signal 9")


async def test_a_start_without_a_verdict_is_judged_again_for_the_next_session(tmp_path):
    left = Left(tmp_path, {"a.txt": "old"}, did={"a.txt": "new"})
    script = f"grep -q new a.txt && exit 7; test -e {tmp_path}/up || exit 8"
    spec = shell(script, paths=["**"])
    await left.is_unjudged(spec)
    (tmp_path / "up").touch()
    await left.earns(0.0, spec)


class Faulty(ProcessRuntime):
    """Processes that a fault of the machine keeps from being started where the agent was."""

    def __init__(self, fault):
        self.fault = fault

    @asynccontextmanager
    async def box(self, spec):
        async def fails(*_, **__):
            raise self.fault

        async with super().box(spec) as box:
            if (spec.workspace / "made").exists():
                box.run = fails
            yield box


@pytest.mark.parametrize(
    "fault",
    [BlockingIOError(11, "no processes left"), FileNotFoundError(2, "gone", "/usr/bin/bwrap")],
)
async def test_a_fault_of_the_machine_is_no_verdict_on_the_agent(tmp_path, fault):
    left = Left(tmp_path, {}, Faulty(fault), did={"made": ""})
    with pytest.raises(OSError, match=fault.strerror):
        await left.judge(command("true"))


SKIPS = """
import sys, unittest
import calc, pytest
def test_add(): assert calc.add(2, 2) == 4
def test_by_itself(): pytest.skip("no")
@pytest.mark.skipif(sys.version_info > (3,), reason="old")
def test_marked(): pass
@pytest.mark.xfail
def test_expected(): assert 0
class T(unittest.TestCase):
    @unittest.skip("no")
    def test_skip(self): pass
    @unittest.expectedFailure
    def test_failure(self): self.fail()
"""
SKIPPED = ["test_by_itself", "test_marked", "test_expected", "T::test_skip", "T::test_failure"]


@pytest.mark.parametrize("listed", [False, True])
async def test_what_the_start_or_a_mark_skips_is_no_failure(tmp_path, listed):
    left = Left(tmp_path, {**START, "test_calc.py": SKIPS}, did={"calc.py": GOOD})
    spec = {**SPEC, "pass_to_pass": [f"test_calc.py::{name}" for name in SKIPPED]}
    if not listed:
        spec.update(fail_to_pass=[], pass_to_pass=[])
    assert (await left.earns(1.0, spec))["canary"] == "failed"


STARTS_PYTEST = f"""
import calc, subprocess
def test_add(): assert calc.add(2, 2) == 4
def test_inner(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(): pass")
    assert subprocess.run([{PYTHON!r}, "-m", "pytest", "-q", str(tmp_path)]).returncode == 0
"""
TWO = f"{PYTHON} -m pytest -q test_calc.py && {PYTHON} -m pytest -q test_more.py"
NAMES_PYTEST = {
    "two pytests": ({"test_more.py": TESTS}, shell(TWO)),
    "a pytest in a test": (
        {"test_more.py": STARTS_PYTEST},
        command(PYTHON, "-m", "pytest", "-q"),
    ),
    "xdist": ({}, shell(f"{PYTHON} -m pytest -q -n 2 || exit 1")),
    "without variables": ({}, shell(f"env -i PATH=/usr/bin:/bin {PYTHON} -m pytest -q")),
    "no pytest": ({"a.txt": ""}, shell("grep -q 'a + b' calc.py # not by pytest")),
}


@pytest.mark.parametrize("kind", cases(NAMES_PYTEST, 3))
async def test_a_command_that_names_pytest_earns_by_its_status_and_report(tmp_path, kind):
    tests, spec = NAMES_PYTEST[kind]
    spec = {**spec, "paths": ["calc.py"]}
    left = Left(tmp_path, {**START, **tests}, did={"a.py": ""})
    await left.earns(0.0, spec)
    left.do({"calc.py": GOOD})
    await left.earns(1.0, spec)
    left.do({"calc.py": "import os; os._exit(0)\n"})
    await left.earns(1.0 if kind == "without variables" else 0.0, spec)
