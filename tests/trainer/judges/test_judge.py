import asyncio
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
from tests.trainer.judges.sessions import Left, shell, write

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml", "{report}"]
START = {
    "calc.py": "def add(a, b): return a - b\n",
    "test_calc.py": (
        "import calc\ndef test_add(): assert calc.add(2, 2) == 4\ndef test_zero(): assert"
        " calc.add(0, 0) == 0\n"
    ),
}
GOOD = "def add(a, b): return a + b\n"
LISTS = {"fail_to_pass": ["test_calc.py::test_add"], "pass_to_pass": ["test_calc.py::test_zero"]}
SPEC = {"kind": "pytest", "command": PYTEST, "timeout": 60, **LISTS}


def several(first, second, result="status"):
    second = shell(second, result=result)
    judges = [
        {"name": "a", "weight": 3, "judge": shell(first)},
        {"name": "b", "weight": 1, "judge": second},
    ]
    return {"kind": "several", "judges": judges}


EARNED = [
    (GOOD, 1.0, (1.0, 1.0)),
    ("def add(a, b): return 4\n", 0.0, (1.0, 0.0)),
    ("def add(a, b): return a - b + 0\n", 0.0, (0.0, 1.0)),
    ("def add(a, b): raise OSError\n", 0.0, (0.0, 0.0)),
]


@pytest.mark.parametrize(("code", "reward", "parts"), cases(EARNED, 0, 1))
async def test_the_reward_is_1_when_both_lists_pass(tmp_path, code, reward, parts):
    left = Left(tmp_path, START, did={"calc.py": code})
    judged = await left.judge(SPEC)
    assert (judged.reward, tuple(judged.parts.values())) == (reward, parts)
    assert judged.evidence["canary"] == "failed"
    assert {*judged.evidence["tests"]} == {"test_calc.py::test_add", "test_calc.py::test_zero"}
    assert judged.evidence["changed"] == ["calc.py"]
    assert (left.logs / "t-0.diff").read_text().startswith("--- a/calc.py\n+++ b/calc.py\n")


async def test_a_report_and_the_changes_however_large_do_not_hold_up_the_loop(
    tmp_path, monkeypatch
):
    threads = {}

    def noting(where, name):
        function = getattr(where, name)

        def note(*arguments):
            threads[name] = threading.current_thread()
            return function(*arguments)

        monkeypatch.setattr(where, name, note)

    for name in ("read_report", "compare", "read_marks", "tell_tests"):
        noting(tests, name)
    noting(changes.Changes, "evidence")
    assert (await Left(tmp_path, START, did={"calc.py": GOOD}).judge(SPEC)).reward == 1.0
    assert len(threads) == 5
    assert threading.main_thread() not in threads.values()


@pytest.mark.parametrize("module_name", ["pytest", "no_such_module"])
async def test_a_judge_without_its_module_is_unjudged_whatever_the_agent_did(tmp_path, module_name):
    left = Left(
        tmp_path, {**START, "conftest.py": f"import {module_name}\n"}, did={"calc.py": GOOD}
    )
    command = [sys.executable, "-S", "-m", *PYTEST[2:]] if module_name == "pytest" else PYTEST
    judged = await left.judge({**SPEC, "command": command})
    assert judged.reward is None
    assert "wrote no report" in judged.unjudged
    assert "on the untouched start" in judged.unjudged


async def test_tests_of_which_none_passes_on_the_start_are_unjudged(tmp_path):
    tests = "import numpie\n" + START["test_calc.py"]
    judged = await Left(tmp_path, {**START, "test_calc.py": tests}, did={"calc.py": GOOD}).judge(
        SPEC
    )
    assert judged.unjudged.startswith(
        "no test of 'pass_to_pass' passes on the untouched start; the output of the judge is in t-0"
    )


async def test_a_module_that_the_agent_was_asked_for_is_the_agents(tmp_path):
    tests = {"test_new.py": "import solver\ndef test_it(): assert solver.one() == 1\n"}
    left = Left(tmp_path, tests, did={"other.py": ""})
    spec = {**SPEC, "fail_to_pass": ["test_new.py::test_it"], "pass_to_pass": []}
    assert (await left.judge(spec, "Write solver.py with a function one.")).reward == 0.0
    left.do({"solver.py": "def one(): return 1\n"})
    assert (await left.judge(spec, "Write solver.py with a function one.")).reward == 1.0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os._exit(0)\n", "ended with status 0 and wrote no report"),
        ("import os; os.abort()\n", "ended by signal 6"),
        pytest.param("while True: pass\n", "took more than 30 s", marks=pytest.mark.deep),
    ],
)
async def test_a_judge_that_works_on_the_start_and_breaks_with_the_changes_was_broken_by_them(
    tmp_path, code, why
):
    left = Left(tmp_path, START, did={"calc.py": code})
    judged = await left.judge({**SPEC, "timeout": 30 if "took" in why else 60})
    assert (judged.reward, judged.evidence["untouched_start"]) == (0.0, 0.0)
    assert why in judged.evidence["broke_judge"]


async def test_a_start_is_judged_once_for_all_sessions_of_a_task_also_as_an_untouched_workspace(
    tmp_path, monkeypatch
):
    judged = await Left(tmp_path / "untouched", {}).judge(
        shell(f"echo x >> {tmp_path}/untouched/count; exit 7")
    )
    assert judged.unjudged.startswith("the judge ended with status 7")
    assert (tmp_path / "untouched/count").read_text() == "x\n"
    left = Left(tmp_path, {"run.sh": "echo x >> $COUNT; exit 0\n"}, did={"run.sh": "exit 7\n"})
    spec = {
        "kind": "command",
        "command": ["sh", "run.sh"],
        "paths": ["**"],
        "env": {"COUNT": str(tmp_path / "count")},
    }
    for _ in range(3):
        assert (await left.judge(spec)).reward == 0.0
    assert (tmp_path / "count").read_text() == "x\n"
    monkeypatch.setattr(module, "_MAX_BASELINES", 0)
    monkeypatch.setattr(module, "_baselines", Once(module._is_kept))
    assert (await left.judge(spec)).reward == 0.0
    assert len(module._baselines) == 0


@pytest.mark.parametrize(("status", "reward"), [(0, 1.0), (7, None)])
async def test_sessions_that_need_it_together_have_the_start_judged_once(tmp_path, status, reward):
    left = Left(tmp_path, {})
    job = left.job(
        shell(f"echo x >> {tmp_path}/count; exit {status}", result="status" if reward else "number")
    )
    judge = left.task.effective_judge
    baselines = await asyncio.gather(*(module._judge_start(judge, job) for _ in range(4)))
    assert [baseline.reward for baseline in baselines] == [reward] * 4
    assert (tmp_path / "count").read_text() == "x\n"


async def test_a_session_that_is_cancelled_while_it_has_the_start_judged_leaves_that_to_the_next(
    tmp_path,
):
    left = Left(tmp_path, {})
    job = left.job(shell("exit 0"))
    baselines = [
        asyncio.create_task(module._judge_start(left.task.effective_judge, job)) for _ in range(2)
    ]
    await asyncio.sleep(0)  # the first one has it judged now
    baselines[0].cancel()
    assert (await baselines[1]).reward == 1.0
    assert baselines[0].cancelled()


NO_PLUGINS = ["env", "-u", "PYTEST_PLUGINS", *PYTEST, "test_calc.py"]
ARGUMENTS = [
    ([*PYTEST, "-x"], "a + b", "failed"),
    ([*PYTEST, "-k", "zero"], "a - b", "failed"),
    ([*PYTEST, "-q", "-q"], "a + b", "failed"),
    (NO_PLUGINS, "a + b", "absent"),  # trusted when the start says the same
]


@pytest.mark.parametrize(("command", "code", "canary"), cases(ARGUMENTS, 1, 3))
async def test_the_arguments_of_a_task_do_not_silence_the_tests_that_must_fail(
    tmp_path, command, code, canary
):
    left = Left(tmp_path, START, did={"calc.py": f"def add(a, b): return {code}\n"})
    fields = {"fail_to_pass": []} if canary == "failed" else {}
    judged = await left.judge({**SPEC, "command": command, **fields})
    assert (judged.reward, judged.evidence["canary"]) == (1.0, canary), left.log


async def test_a_patch_that_does_not_fit_is_unjudged(tmp_path):
    judged = await Left(tmp_path, START).judge(
        {**SPEC, "test_patch": "--- a/no\n+++ b/no\n@@ -1 +1 @@\n-a\n+b\n"}
    )
    assert judged.unjudged.startswith("the task's test_patch does not fit its start:")


async def test_several_judges_give_the_weighted_mean_unless_one_cannot_judge(tmp_path):
    left = Left(tmp_path, {})
    judged = await left.judge(
        several(
            "exit 0", 'echo \'{"reward": 0.5, "parts": {"c": 2}}\' > $ROLLTAP_REWARD_FILE', "json"
        )
    )
    assert judged.reward == pytest.approx(0.875)
    assert judged.parts == {"a": 1.0, "b": 0.5, "b.c": 2.0}
    assert [evidence["judge"] for evidence in judged.evidence["judges"].values()] == [
        "command",
        "command",
    ]
    judged = await left.judge(several("exit 0", "exit 9"))
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


@pytest.mark.parametrize(
    ("function", "reward", "why"),
    [
        ("number", 7.0, None),
        ("parts", 0.5, None),
        ("Judges.inner", 1.0, None),
        ("true", None, "is not one number"),
        ("nan", None, "is not one number"),
        ("raises", None, "gave no result (status 3): KeyError: 'why'"),
        ("slow", None, "took more than 2 s"),
        ("dies", None, "gave no result (status 0)"),
        ("missing", None, "has no attribute 'missing'"),
    ],
)
async def test_a_function_of_the_users_judges_in_a_process_of_its_own(
    tmp_path, monkeypatch, function, reward, why
):
    write(tmp_path / "modules", {"my_judges.py": FUNCTIONS})
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    left = Left(tmp_path / "left", {"a.txt": "6"})
    left.do(
        {
            "a.txt": "7",
            "my_judges.py": "def number(folder): return 1000\n",
            "json.py": "raise OSError\n",
        }
    )
    timeout = 2 if function == "slow" else 60
    spec = {
        "kind": "python",
        "function": f"my_judges:{function}",
        "timeout": timeout,
        "range": [0, 10],
    }
    judged = await left.judge(spec)
    assert judged.reward == reward
    assert judged.unjudged is None or why in judged.unjudged
    if function == "parts":
        assert (judged.parts, judged.evidence["reason"]) == ({"files": 3.0}, "half")


MARKS = "def judge(folder): return {}\n"


async def test_a_function_is_found_in_its_folder_first_and_never_in_a_workspace(
    tmp_path, monkeypatch
):
    write(tmp_path, {"tasks/marks.py": MARKS.format(1), "modules/marks.py": MARKS.format(2)})
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    left = Left(
        tmp_path / "left", {}, did={"marks.py": MARKS.format(3), "plain.py": MARKS.format(3)}
    )
    spec = {"kind": "python", "function": "marks:judge", "range": [0, 3]}
    assert (await left.judge(spec)).reward == 2.0
    assert (await left.judge({**spec, "folder": tmp_path / "tasks"})).reward == 1.0
    judged = await left.judge({**spec, "function": "plain:judge", "folder": tmp_path / "tasks"})
    assert "No module named 'plain'" in judged.unjudged
    # a task whose start is this folder keeps its digest
    assert [file.name for file in (tmp_path / "tasks").iterdir()] == ["marks.py"]


async def test_the_start_is_judged_by_the_function_of_the_same_folder(tmp_path):
    breaks = "def judge(folder): return float((folder / 'done').read_text() or 'nan')\n"
    write(tmp_path, {"one/marks.py": breaks, "two/marks.py": ""})
    left = Left(tmp_path / "left", {"done": "0"}, did={"done": ""})
    spec = {"kind": "python", "function": "marks:judge", "range": [0, 3]}
    first = await left.judge({**spec, "folder": tmp_path / "one"})
    assert (first.reward, first.evidence["untouched_start"]) == (0.0, 0.0)
    second = await left.judge({**spec, "folder": tmp_path / "two"})
    assert "on the untouched start" in second.unjudged


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
    shows = {"nothing": [], "a link": [environment], "all": [environment, base.parent]}
    left = Left(tmp_path / "left", {}, SandboxRuntime(tools=shows[shown]))
    folders = {"nothing": environment, "a link": base.parent}
    spec = {"kind": "command", "command": [str(program)]}
    why = await left.fault_on_start(spec)
    judged = await left.judge(spec)
    if shown == "all":
        assert (why, judged.reward) == ("", 1.0)
    else:
        advice = (
            f". A box does not show this machine's {folders[shown]}: name it with --tools DIR"
            " (tools in a recipe)"
        )
        assert advice in why
        assert advice in judged.unjudged


BENCH = (
    "import os, metric\nos.write(int(os.environ['ROLLTAP_REWARD_FD']),"
    " str(metric.speed()).encode())\n"
)


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
    judged = await left.judge(
        {"kind": "command", "command": [sys.executable, "bench.py"], "result": "number"}
    )
    assert (judged.reward, judged.evidence["untouched_start"]) == (0.0, 0.25)


BY_NUMBER = f"{sys.executable} -c 'import calc'; echo -0.5 > $ROLLTAP_REWARD_FILE"
SPOILED = {
    "broken": "import os; os.kill(os.getppid(), 9)",
    "its files changed": "open('own.txt', 'w').write('mine')",
    "too much": "",
}


@pytest.mark.parametrize("how", SPOILED)
async def test_the_worst_reward_is_the_end_of_the_range(tmp_path, monkeypatch, how):
    left = Left(tmp_path, {"calc.py": "", "own.txt": "own"}, did={"calc.py": SPOILED[how]})
    spec = shell(BY_NUMBER, result="number", range=[-1, 0], files=["own.txt"])
    if how == "too much":
        monkeypatch.setattr(changes, "MAX_CHANGED_BYTES", 0)
        left.do({"big": "x"})
    assert (await left.judge(spec)).reward == -1.0
    weighted = [{"name": "a", "weight": 3, "judge": spec}, {"name": "b", "judge": shell("exit 1")}]
    assert (await left.judge({"kind": "several", "judges": weighted})).reward == -0.75


async def test_an_exit_status_is_an_end_of_the_range(tmp_path):
    left = Left(tmp_path, START)
    for spec in (
        shell(f"{sys.executable} -m pytest -q || exit 1"),
        shell("grep -q 'a + b' calc.py"),
    ):
        left.do({"calc.py": START["calc.py"]})
        assert (await left.judge({**spec, "range": [-1, 0], "paths": ["*.py"]})).reward == -1.0
        left.do({"calc.py": GOOD})
        assert (await left.judge({**spec, "range": [-1, 0], "paths": ["*.py"]})).reward == 0.0


async def test_a_judge_that_breaks_once_is_asked_again(tmp_path):
    left = Left(tmp_path, {"a.txt": "old"}, did={"a.txt": "new"})
    script = (
        f"test ! -e {tmp_path}/once && grep -q new a.txt && touch {tmp_path}/once && kill -9 $$;"
        " exit 0"
    )
    judged = await left.judge(shell(script, paths=["**"]))
    assert judged.reward == 1.0
    assert judged.evidence["first_judged"].startswith("the judge was ended by signal 9")


async def test_a_start_without_a_verdict_is_judged_again_for_the_next_session(tmp_path):
    left = Left(tmp_path, {"a.txt": "old"}, did={"a.txt": "new"})
    script = f"grep -q new a.txt && exit 7; test -e {tmp_path}/up || exit 8"
    spec = shell(script, paths=["**"])
    assert (await left.judge(spec)).unjudged is not None
    (tmp_path / "up").touch()
    assert (await left.judge(spec)).reward == 0.0


@pytest.mark.parametrize(
    "fault",
    [BlockingIOError(11, "no processes left"), FileNotFoundError(2, "gone", "/usr/bin/bwrap")],
)
async def test_a_fault_of_the_machine_is_no_verdict_on_the_agent(tmp_path, fault):
    class Faulty(ProcessRuntime):
        @asynccontextmanager
        async def box(self, spec):
            async with super().box(spec) as box:
                run = box.run

                async def fails(*command, **how):
                    if (spec.workspace / "made").exists():
                        raise fault
                    return await run(*command, **how)

                box.run = fails
                yield box

    left = Left(tmp_path, {}, Faulty(), did={"made": ""})
    with pytest.raises(OSError, match=fault.strerror):
        await left.judge({"kind": "command", "command": ["true"]})


async def test_a_report_without_the_tests_that_must_fail_is_unjudged_when_the_start_has_none(
    tmp_path,
):
    tests = "import calc\ndef test_add(): assert calc.add(2, 2) == 4\n"
    report = "<a><testcase classname='test_calc' name='test_add'/></a>"
    forger = (
        "import os, rolltap_report\nos.write(rolltap_report.PIPE,"
        f" {report!r}.encode())\nos._exit(0)\n"
    )
    left = Left(
        tmp_path, {"test_calc.py": tests, "conftest.py": "import calc\n"}, did={"calc.py": forger}
    )
    judged = await left.judge({**SPEC, "pass_to_pass": []})
    assert judged.unjudged.startswith(
        "the report lacks the tests that must fail, and the untouched start has no report"
    )


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


@pytest.mark.parametrize(
    "names",
    [[], ["test_by_itself", "test_marked", "test_expected", "T::test_skip", "T::test_failure"]],
)
async def test_what_the_start_or_a_mark_skips_is_no_failure(tmp_path, names):
    left = Left(tmp_path, {**START, "test_calc.py": SKIPS}, did={"calc.py": GOOD})
    lists = {
        "fail_to_pass": LISTS["fail_to_pass"][: len(names)],
        "pass_to_pass": [f"test_calc.py::{n}" for n in names],
    }
    judged = await left.judge({**SPEC, **lists})
    assert (judged.reward, judged.evidence["canary"]) == (1.0, "failed"), left.log


TWO_RUNS = [
    "sh",
    "-c",
    f"{sys.executable} -m pytest -q test_calc.py && {sys.executable} -m pytest -q test_more.py",
]
STARTS_PYTEST = f"""
import calc, subprocess
def test_add(): assert calc.add(2, 2) == 4
def test_inner(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(): pass")
    assert subprocess.run([{sys.executable!r}, "-m", "pytest", "-q", str(tmp_path)]).returncode == 0
"""


NAMES_PYTEST = {
    "two pytests": ({"test_more.py": START["test_calc.py"]}, TWO_RUNS),
    "a pytest in a test": ({"test_more.py": STARTS_PYTEST}, [sys.executable, "-m", "pytest", "-q"]),
    "xdist": ({}, ["sh", "-c", f"{sys.executable} -m pytest -q -n 2 || exit 1"]),
    "without variables": (
        {},
        ["env", "-i", "PATH=/usr/bin:/bin", sys.executable, "-m", "pytest", "-q"],
    ),
    "no pytest": ({"a.txt": ""}, ["sh", "-c", "grep -q 'a + b' calc.py # not by pytest"]),
}


@pytest.mark.parametrize("kind", cases(NAMES_PYTEST, 3))
async def test_a_command_that_names_pytest_earns_by_its_status_and_report(tmp_path, kind):
    tests, command = NAMES_PYTEST[kind]
    left = Left(tmp_path, {**START, **tests})
    spec = {"kind": "command", "command": command, "paths": ["calc.py"]}
    assert (await left.judge(spec)).reward == 0.0, left.log
    left.do({"calc.py": GOOD})
    assert (await left.judge(spec)).reward == 1.0, left.log
    left.do({"calc.py": "import os; os._exit(0)\n"})
    assert (await left.judge(spec)).reward == (1.0 if "-i" in command else 0.0), left.log
