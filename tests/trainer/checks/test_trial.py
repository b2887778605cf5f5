"""Trying tasks: weak judges are found, strong ones are not, and a solution must solve its task."""

import json
import logging
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

import rolltap
from rolltap.errors import InputError
from rolltap.trainer.boxes.hiding import private_paths
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.checks import trial
from rolltap.trainer.checks.cheats import CHEATS
from rolltap.trainer.rollouts.check import kept_check, warn_of_unchecked
from rolltap.types import LLMJudge, SeveralJudges, WeightedJudge
from tests.boxes import sandboxed
from tests.deep import DEEP, cases
from tests.trainer.judges.sessions import shell, write

WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = WRONG.replace("-", "+")
PATCH = """--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
IN_PROCESS = "import calc\n\nraise SystemExit(calc.add(2, 2) != 4)\n"
AS_CHILD = """import subprocess, sys

run = [sys.executable, "-c", "import calc; print('sum', calc.add(2, 2))"]
child = subprocess.run(run, capture_output=True, text=True)
raise SystemExit(child.stdout != "sum 4" + chr(10))
"""
EXIT = "an exit with status 0 at the import"
NUMBER = "a number as the reward, by the agent's code"
EMPTIED = "data emptied by the agent's code"
TOLD = "expected data that the agent's code prints"
MODEL = SeveralJudges(
    judges=[
        WeightedJudge(name="a", judge=shell("true")),
        WeightedJudge(name="b", judge=LLMJudge(rubric="r", url="http://127.0.0.1:1", model="m")),
    ]
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def only(monkeypatch):
    """Return a function that leaves these cheats alone in the short suite; the deep one tries
    all."""

    def only(*names):
        if not DEEP:
            monkeypatch.setattr(trial, "CHEATS", [cheat for cheat in CHEATS if cheat.name in names])

    return only


@pytest.fixture
def without_cheats(monkeypatch):
    monkeypatch.setattr(trial, "CHEATS", [])


def make_task(folder, check=IN_PROCESS, **fields):
    start = folder / "start"
    write(start, {"calc.py": WRONG, "check.py": check, "expected.txt": "4\n"})
    if "judge" not in fields:
        fields.setdefault("evaluate", ["python", "check.py"])
    return rolltap.Task(**{"id": "t", "instruction": "Mend it.", "workspace": start, **fields})


def check(*tasks, **settings):
    return rolltap.check_tasks(tasks, progress=False, **settings)


PRINTS = 'echo "0$(python -c "import calc" 9>&- | tail -n 1)" > $ROLLTAP_REWARD_FILE'
COMPARES = "python -c 'import calc; print(calc.add(2, 2))' > out; cmp out expected*"
WEAK = {
    "a check that imports the agent's module": ({}, EXIT),
    "a number that the agent's code prints": ({"judge": shell(PRINTS, result="number")}, NUMBER),
    "expected data in the workspace": ({"judge": shell(COMPARES)}, EMPTIED),
}


@sandboxed
@pytest.mark.parametrize("kind", cases(WEAK, 0, 2))
def test_a_weak_judge_is_found_with_the_cheat_its_diff_and_what_to_set(tmp_path, kind, only):
    judge, cheat = WEAK[kind]
    only(cheat)
    (found,) = check(make_task(tmp_path, gold_patch=PATCH, **judge), runtime="sandbox")
    assert not found.passed
    weak = {weakness.cheat: weakness for weakness in found.weaknesses}[cheat]
    assert weak.reward == 1.0
    assert weak.diff.startswith("--- a/calc.py\n+++ b/calc.py\n")
    assert weak.advice


@sandboxed
def test_expected_data_that_the_agents_code_can_read_are_found_unless_it_is_run_before(
    tmp_path, only
):
    only(TOLD)
    write(tmp_path, {"hidden/expected.txt": "5\n"})
    write(tmp_path, {"solution/calc.py": f"{RIGHT}\n\nprint(add(2, 3))\n"})
    laid = {"mounts": {"/hidden": tmp_path / "hidden"}, "paths": ["calc.py", "out"]}
    compare = "cmp out /hidden/expected.txt || exit 1"
    run = "python calc.py > out"
    weak = shell(f"{run}; {compare}", **laid)
    strong = shell(compare, run=["sh", "-c", run], **laid)
    tasks = []
    for name, judge in (("weak", weak), ("strong", strong)):
        solution = tmp_path / "solution"
        tasks.append(make_task(tmp_path / name, id=name, judge=judge, solution=solution))
    weak, strong = check(*tasks, runtime="sandbox")
    assert TOLD in [weakness.cheat for weakness in weak.weaknesses]
    assert "'run'" in weak.weaknesses[0].advice
    assert weak.solution == strong.solution == 1.0
    assert (strong.weaknesses, strong.wrong) == ((), ())


@pytest.mark.usefixtures("without_cheats")
@pytest.mark.parametrize(("paths", "reachable"), [(None, ("expected.txt",)), (["calc.py"], ())])
def test_files_that_the_judges_own_files_name_are_told_without_paths(tmp_path, paths, reachable):
    text = 'test "$(python calc.py)" = "$(cat expected.txt)" || exit 1\n'
    write(tmp_path, {"start/run.sh": text})
    (found,) = check(make_task(tmp_path, judge=shell("sh run.sh", paths=paths), gold_patch=PATCH))
    assert found.reachable == reachable


@sandboxed
def test_a_judge_that_runs_the_agents_code_as_a_child_is_not_found(tmp_path, only):
    only(EXIT, NUMBER)
    (found,) = check(make_task(tmp_path, AS_CHILD, gold_patch=PATCH), runtime="sandbox")
    assert found.passed
    assert found.start == 0.0
    assert found.solution == 1.0
    assert found.weaknesses == ()
    assert {EXIT, NUMBER} <= {*found.tried}


SCRIPT = """
patch=/solution/fix.patch
[ -f $patch ] || patch=${0%/*}/fix.patch
git apply $patch
"""
SOLUTIONS = {
    "a script": {"solution/solve.sh": SCRIPT, "solution/fix.patch": PATCH},
    "a folder": {"solution/calc.py": RIGHT},
    "a diff": {"fix.diff": PATCH},
}


def solution_of(folder, kind):
    write(folder, SOLUTIONS[kind])
    return folder / ("fix.diff" if kind == "a diff" else "solution")


@pytest.mark.usefixtures("without_cheats")
@pytest.mark.parametrize("runtime", ["process", pytest.param("sandbox", marks=sandboxed)])
@pytest.mark.parametrize("kind", SOLUTIONS)
def test_a_solution_of_every_kind_must_earn_the_best(tmp_path, kind, runtime):
    task = make_task(tmp_path, solution=solution_of(tmp_path, kind))
    (found,) = check(task, runtime=runtime)
    assert found.start == 0.0
    assert found.solution == 1.0
    assert found.wrong == ()


FAULTS = {
    "solved": "the untouched start earns 1, the best reward",
    "unjudged": "could not be judged: the judge 'missing-program' could not be started",
    "no-verdict": "its output is in start.judge.log; its last line: no such test",
    "unsolved": "does not solve it: it earns 0, and the best is 1",
    "fails": "its script says: no network",
    "misfit": "`git apply` failed",
    "binary": "it could not be tried: UnicodeDecodeError(",
    "misplaced": "/nowhere is not a folder",
    "a-model": "a model judges it",
    "right": "",
}


@pytest.mark.usefixtures("without_cheats")
def test_what_is_wrong_with_a_start_or_a_solution_is_said_and_ends_nothing(tmp_path):
    (tmp_path / "solution.bin").write_bytes(b"\xff\xff")
    write(tmp_path, {"wrong/calc.py": WRONG, "fails/solve.sh": "echo no network; exit 3"})
    given = {
        "solved": {"evaluate": ["true"]},
        "unjudged": {"evaluate": ["missing-program"]},
        "no-verdict": {"evaluate": ["sh", "-c", "echo no such test; exit 4"]},
        "unsolved": {"solution": tmp_path / "wrong"},
        "fails": {"solution": tmp_path / "fails"},
        "misfit": {"gold_patch": PATCH.replace("a - b", "a * b")},
        "binary": {"solution": tmp_path / "solution.bin"},
        "misplaced": {"workspace": tmp_path / "nowhere"},
        "a-model": {"judge": MODEL},
        "right": {"gold_patch": PATCH},
    }
    tasks = [make_task(tmp_path, id=name, **fields) for name, fields in given.items()]
    said = {found.task: " ".join(found.wrong) for found in check(*tasks)}
    assert said.keys() == FAULTS.keys()
    assert said["right"] == ""
    assert [name for name, words in FAULTS.items() if words not in said[name]] == []


class Builder(ProcessRuntime):
    """A runtime that builds images, unless the Dockerfile fails. Its boxes are processes."""

    name = "container"
    builds = True

    def __init__(self):
        self.images = []

    def copy_out(self, image, workdir, dest):
        raise AssertionError("the tasks have workspaces")

    async def build(self, image, build, log):
        if "fails" in (build.folder / "Dockerfile").read_text():
            raise InputError("its image cannot be built: exit 1")
        self.images.append(image)

    @asynccontextmanager
    async def box(self, spec):
        assert spec.image in self.images
        async with super().box(replace(spec, image=None)) as box:
            yield box


@pytest.mark.usefixtures("without_cheats")
def test_an_image_is_built_before_its_task_is_tried(tmp_path):
    write(tmp_path, {"good/Dockerfile": "FROM x", "bad/Dockerfile": "RUN fails"})
    task = make_task(tmp_path, gold_patch=PATCH, build={"folder": tmp_path / "good"})
    other = make_task(tmp_path, id="bad", build={"folder": tmp_path / "bad"})
    good, bad = check(task, other, runtime=Builder())
    assert good.passed
    assert good.solution == 1.0
    assert "its image cannot be built: exit 1" in bad.wrong[0]


@pytest.mark.usefixtures("without_cheats")
def test_a_task_that_cannot_be_loaded_is_one_of_the_results(tmp_path):
    (tmp_path / "answer").mkdir()
    line = {"id": "t", "instruction": "Do it.", "evaluate": ["false"], "solution": "answer"}
    unknown = {**line, "id": "u", "evaluated": 1}
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(unknown)}\n")
    tried, refused = rolltap.check_tasks(tmp_path / "tasks.jsonl", progress=False)
    assert tried.task == "t"
    assert tried.solution == 0.0
    assert len(tried.wrong) == 1
    assert refused.task == ""
    assert not refused.passed
    assert "line 2: unknown key 'evaluated'" in refused.wrong[0]
    with pytest.raises(InputError, match="the list of tasks is empty"):
        check()


@pytest.mark.parametrize(
    ("fields", "code"),
    [({}, ["calc.py", "other.py", "run.sh"]), ({"gold_patch": PATCH}, ["calc.py"])],
)
def test_the_code_that_cheats_stand_in_is_what_the_solution_changes_and_never_the_judges(
    tmp_path, monkeypatch, fields, code
):
    seen = []

    def change(ground):
        seen.append(ground)
        return {}

    monkeypatch.setattr(trial, "CHEATS", [CHEATS[0]._replace(change=change)])
    task = make_task(tmp_path, **fields)
    write(tmp_path / "start", {"other.py": "", "run.sh": "", "tests/test_calc.py": ""})
    check(task)
    assert seen[0].code == code
    assert seen[0].own == {"check.py", "tests/test_calc.py"}


def test_a_solution_counts_in_no_digest_and_is_hidden_from_sessions(tmp_path):
    solution = solution_of(tmp_path, "a diff")
    solved = make_task(tmp_path, gold_patch=PATCH, solution=solution)
    assert solved.digest() == make_task(tmp_path).digest()
    assert solution in private_paths(tmp_path, [solved], [])


@pytest.mark.usefixtures("without_cheats")
def test_a_rollout_warns_of_tasks_that_were_not_tried_or_have_findings(tmp_path, caplog):
    right = make_task(tmp_path, gold_patch=PATCH)
    wrong = right.model_copy(update={"id": "u", "gold_patch": "no patch"})
    check(right, wrong)
    digest = right.digest()
    assert json.loads(kept_check(right, digest, "process").read_text())["passed"]
    unsolved = right.model_copy(update={"gold_patch": ""})
    # another solution of a task that was tried is not tried, and a rollout needs none
    other = unsolved.model_copy(update={"id": "other", "solution": solution_of(tmp_path, "a diff")})
    gone = unsolved.model_copy(update={"id": "gone", "solution": tmp_path / "gone"})
    digests = {"t": digest, "u": wrong.digest(), "other": digest, "gone": digest}

    def warns(runtime, *tasks):
        caplog.clear()
        warn_of_unchecked(tasks, digests, runtime)
        return caplog.messages

    process = ProcessRuntime()
    fix = "run `rolltap tasks check TASKS --runtime"
    findings = f"tasks with findings: u: {fix} process`"
    with caplog.at_level(logging.WARNING):
        assert warns(process, right) == []
        untried = "tasks not tried with cheats: other, gone; "
        assert warns(process, right, wrong, other, gone) == [untried + findings]
        assert warns(process, right, wrong) == [findings]
        # a sandbox holds what another runtime does not
        assert warns(SandboxRuntime(), right) == [f"tasks not tried with cheats: t: {fix} sandbox`"]


def test_a_rollout_names_the_build_in_its_warning_and_no_task_that_cannot_be_tried(
    tmp_path, caplog
):
    write(tmp_path, {"image/Dockerfile": "FROM x"})
    built = make_task(tmp_path, id="built", build={"folder": tmp_path / "image"})
    judged = make_task(tmp_path, id="judged", judge=MODEL)
    asks = make_task(tmp_path, id="asks", judge=shell("true", allow=["pypi.org"]))
    digests = {"built": "1", "judged": "2", "asks": "3"}
    with caplog.at_level(logging.WARNING):
        warn_of_unchecked([judged, asks], digests, SandboxRuntime())
        assert not caplog.records
        warn_of_unchecked([built, judged, asks], digests, Builder())
    told = "tasks not tried with cheats: built, asks: run `rolltap tasks check TASKS"
    assert caplog.messages == [f"{told} --runtime container --build`"]
