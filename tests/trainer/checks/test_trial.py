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
from tests.trainer.judges.sessions import write

WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = WRONG.replace("-", "+")
PATCH = (
    "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return"
    " a + b\n"
)
IN_PROCESS = "import calc\n\nraise SystemExit(calc.add(2, 2) != 4)\n"
AS_CHILD = """import subprocess, sys

run = [sys.executable, "-c", "import calc; print('sum', calc.add(2, 2))"]
child = subprocess.run(run, capture_output=True, text=True)
raise SystemExit(child.stdout != "sum 4" + chr(10))
"""
EXIT = "an exit with status 0 at the import"
NUMBER = "a number as the reward, by the agent's code"
EMPTIED = "data emptied by the agent's code"


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


def make_task(folder, check=IN_PROCESS, **fields):
    write(folder / "start", {"calc.py": WRONG, "check.py": check, "expected.txt": "4\n"})
    given = {"id": "t", "instruction": "Mend it.", "workspace": folder / "start", **fields}
    given |= {} if "judge" in fields else {"evaluate": ["python", "check.py"]}
    return rolltap.Task(**given)


def check(*tasks, **settings):
    return rolltap.check_tasks(tasks, progress=False, **settings)


def command(script, **fields):
    return {"kind": "command", "command": ["sh", "-c", script], **fields}


WEAK = {
    "a check that imports the agent's module": (None, EXIT),
    "a number that the agent's code prints": (
        command(
            'echo "0$(python -c "import calc" 9>&- | tail -n 1)" > $ROLLTAP_REWARD_FILE',
            result="number",
        ),
        NUMBER,
    ),
    "expected data in the workspace": (
        command("python -c 'import calc; print(calc.add(2, 2))' > out; cmp out expected*"),
        EMPTIED,
    ),
}


@sandboxed
@pytest.mark.parametrize("kind", cases(WEAK, 0, 2))
def test_a_weak_judge_is_found_with_the_cheat_its_diff_and_what_to_set(tmp_path, kind, only):
    judge, cheat = WEAK[kind]
    only(cheat)
    task = make_task(tmp_path, gold_patch=PATCH, **({"judge": judge} if judge else {}))
    (found,) = check(task, runtime="sandbox")
    assert not found.passed
    weak = {weakness.cheat: weakness for weakness in found.weaknesses}
    assert weak[cheat].reward == 1.0
    assert weak[cheat].diff.startswith("--- a/calc.py\n+++ b/calc.py\n")
    assert weak[cheat].advice


@sandboxed
def test_expected_data_that_the_agents_code_can_read_are_found_unless_it_is_run_before(
    tmp_path, only
):
    told = "expected data that the agent's code prints"
    only(told)
    write(tmp_path / "hidden", {"expected.txt": "5\n"})
    hidden = {"mounts": {"/hidden": tmp_path / "hidden"}, "paths": ["calc.py", "out"]}
    solution = {"solution": tmp_path / "solution"}
    write(tmp_path / "solution", {"calc.py": f"{RIGHT}\n\nprint(add(2, 3))\n"})
    weak = command("python calc.py > out; cmp out /hidden/expected.txt || exit 1", **hidden)
    (found,) = check(make_task(tmp_path / "weak", judge=weak, **solution), runtime="sandbox")
    assert told in [weakness.cheat for weakness in found.weaknesses]
    assert found.solution == 1.0
    assert "'run'" in found.weaknesses[0].advice
    strong = command(
        "cmp out /hidden/expected.txt || exit 1", run=["sh", "-c", "python calc.py > out"], **hidden
    )
    (found,) = check(make_task(tmp_path / "strong", judge=strong, **solution), runtime="sandbox")
    assert (found.weaknesses, found.wrong, found.solution) == ((), (), 1.0)


def test_files_that_the_judges_own_files_name_are_told_without_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "CHEATS", [])
    text = 'test "$(python calc.py)" = "$(cat expected.txt)" || exit 1\n'
    for name, fields, reachable in (
        ("any", {}, ("expected.txt",)),
        ("paths", {"paths": ["calc.py"]}, ()),
    ):
        write(tmp_path / name / "start", {"run.sh": text})
        task = make_task(tmp_path / name, judge=command("sh run.sh", **fields), gold_patch=PATCH)
        (found,) = check(task)
        assert found.reachable == reachable


@sandboxed
def test_a_judge_that_runs_the_agents_code_as_a_child_is_not_found(tmp_path, only):
    only(EXIT, NUMBER)
    (found,) = check(make_task(tmp_path, AS_CHILD, gold_patch=PATCH), runtime="sandbox")
    assert (found.passed, found.start, found.solution, found.weaknesses) == (True, 0.0, 1.0, ())
    assert {EXIT, NUMBER} <= {*found.tried}


def solution_of(folder, kind):
    script = (
        "cd . && patch=/solution/fix.patch; [ -f $patch ] || patch=${0%/*}/fix.patch; git apply"
        " $patch"
    )
    files = {
        "a script": {"solution/solve.sh": script, "solution/fix.patch": PATCH},
        "a folder": {"solution/calc.py": RIGHT},
        "a diff": {"fix.diff": PATCH},
    }
    write(folder, files[kind])
    return {"solution": folder / next(iter(files[kind])).partition("/")[0]}


@pytest.mark.parametrize("runtime", ["process", pytest.param("sandbox", marks=sandboxed)])
@pytest.mark.parametrize("kind", ["a script", "a folder", "a diff"])
def test_a_solution_of_every_kind_must_earn_the_best(tmp_path, kind, runtime, monkeypatch):
    monkeypatch.setattr(trial, "CHEATS", [])
    task = make_task(tmp_path, **solution_of(tmp_path, kind))
    (found,) = check(task, runtime=runtime)
    assert (found.start, found.solution, found.wrong) == (0.0, 1.0, ())


def test_what_is_wrong_with_a_start_or_a_solution_is_said_and_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "CHEATS", [])
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
        "a-model": {"judge": several(LLMJudge(rubric="r", url="http://127.0.0.1:1", model="m"))},
        "right": {"gold_patch": PATCH},
    }
    tasks = [
        make_task(tmp_path, id=name, **fields)
        for name, fields in given.items()
        if "evaluate" not in fields
    ]
    others = ("solved", "unjudged", "no-verdict")
    tasks += [make_task(tmp_path).model_copy(update={"id": name, **given[name]}) for name in others]
    said = {found.task: " ".join(found.wrong) for found in check(*tasks)}
    assert said.pop("right") == ""
    for name, words in {
        "solved": "the untouched start earns 1, the best reward",
        "unjudged": "could not be judged: the judge 'missing-program' could not be started",
        "no-verdict": (
            "only 0 and 1 are a verdict; its output is in start.judge.log; its last line: no such"
            " test"
        ),
        "unsolved": "does not solve it: it earns 0, and the best is 1",
        "fails": "its script says: no network",
        "misfit": "`git apply` failed",
        "binary": "it could not be tried: UnicodeDecodeError(",
        "misplaced": f"the workspace {tmp_path / 'nowhere'} is not a folder",
        "a-model": "a model judges it",
    }.items():
        assert words in said.pop(name)
    assert not said


def several(model):
    program = {"kind": "command", "command": ["true"]}
    return SeveralJudges(
        judges=[WeightedJudge(name="a", judge=program), WeightedJudge(name="b", judge=model)]
    )


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


def test_an_image_is_built_before_its_task_is_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "CHEATS", [])
    write(tmp_path, {"good/Dockerfile": "FROM x", "bad/Dockerfile": "RUN fails"})
    task = make_task(tmp_path, gold_patch=PATCH, build={"folder": tmp_path / "good"})
    other = make_task(tmp_path, id="bad", build={"folder": tmp_path / "bad"})
    good, bad = check(task, other, runtime=Builder())
    assert (good.passed, good.solution) == (True, 1.0)
    assert "its image cannot be built: exit 1" in bad.wrong[0]


def test_a_task_that_cannot_be_loaded_is_one_of_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "CHEATS", [])
    (tmp_path / "answer").mkdir()
    line = {"id": "t", "instruction": "Do it.", "evaluate": ["false"], "solution": "answer"}
    (tmp_path / "tasks.jsonl").write_text(
        f"{json.dumps(line)}\n{json.dumps({**line, 'id': 'u', 'evaluated': 1})}\n"
    )
    tried, refused = rolltap.check_tasks(tmp_path / "tasks.jsonl", progress=False)
    assert (tried.task, tried.solution, len(tried.wrong)) == ("t", 0.0, 1)
    assert (refused.task, refused.passed) == ("", False)
    assert "line 2: unknown key 'evaluated'" in refused.wrong[0]
    with pytest.raises(InputError, match="the list of tasks is empty"):
        check()


def test_the_code_that_cheats_stand_in_is_what_the_solution_changes_and_never_the_judges(
    tmp_path, monkeypatch
):
    seen = []
    spy = CHEATS[0]._replace(change=lambda ground: seen.append(ground) or {})
    monkeypatch.setattr(trial, "CHEATS", [spy])
    more = {"other.py": "", "run.sh": "", "tests/test_calc.py": ""}
    for fields in ({}, {"gold_patch": PATCH}):
        task = make_task(tmp_path, **fields)
        write(tmp_path / "start", more)
        check(task)
    assert [ground.code for ground in seen] == [["calc.py", "other.py", "run.sh"], ["calc.py"]]
    assert seen[0].own == {"check.py", "tests/test_calc.py"}


def test_a_solution_counts_in_no_digest_and_is_hidden_from_sessions(tmp_path):
    task = make_task(tmp_path)
    solved = make_task(tmp_path, gold_patch=PATCH, **solution_of(tmp_path, "a diff"))
    assert solved.digest() == task.digest()
    assert tmp_path / "fix.diff" in private_paths(tmp_path, [solved], [])


def test_a_rollout_warns_of_tasks_that_were_not_tried_or_have_findings(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(trial, "CHEATS", [])
    right = make_task(tmp_path, gold_patch=PATCH)
    wrong = right.model_copy(update={"id": "u", "gold_patch": "no patch"})
    check(right, wrong)
    other = right.model_copy(
        update={"id": "other", "gold_patch": "", **solution_of(tmp_path, "a diff")}
    )
    gone = right.model_copy(update={"id": "gone", "gold_patch": "", "solution": tmp_path / "gone"})
    digests = {task.id: task.digest() for task in (right, wrong)}
    digests |= {"other": right.digest(), "gone": right.digest()}
    assert json.loads(kept_check(right, digests[right.id], "process").read_text())["passed"]
    with caplog.at_level(logging.WARNING):
        warn_of_unchecked([right], digests, ProcessRuntime())
        assert not caplog.records
        # another solution of a task that was tried is not tried, and a rollout needs none
        warn_of_unchecked([right, wrong, other, gone], digests, ProcessRuntime())
        warn_of_unchecked([right, wrong], digests, ProcessRuntime())
        # a sandbox holds what another runtime does not
        warn_of_unchecked([right], digests, SandboxRuntime())
    assert [record.message for record in caplog.records] == [
        (
            "tasks not tried with cheats: other, gone; tasks with findings: u: "
            "run `rolltap tasks check TASKS --runtime process`"
        ),
        "tasks with findings: u: run `rolltap tasks check TASKS --runtime process`",
        "tasks not tried with cheats: t: run `rolltap tasks check TASKS --runtime sandbox`",
    ]


def test_a_rollout_names_the_build_in_its_warning_and_no_task_that_cannot_be_tried(
    tmp_path, caplog
):
    write(tmp_path, {"image/Dockerfile": "FROM x"})
    model = several(LLMJudge(rubric="r", url="http://127.0.0.1:1", model="m"))
    built = make_task(tmp_path, id="built", build={"folder": tmp_path / "image"})
    judged = make_task(tmp_path, id="judged", judge=model)
    asks = make_task(tmp_path, id="asks", judge=command("true", allow=["pypi.org"]))
    digests = {"built": "1", "judged": "2", "asks": "3"}
    with caplog.at_level(logging.WARNING):
        warn_of_unchecked([judged, asks], digests, SandboxRuntime())
        assert not caplog.records
        warn_of_unchecked([built, judged, asks], digests, Builder())
    told = "tasks not tried with cheats: built, asks: run `rolltap tasks check TASKS"
    assert caplog.messages == [f"{told} --runtime container --build`"]
