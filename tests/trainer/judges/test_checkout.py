"""A checkout that is prepared while the session runs."""

from dataclasses import replace

import pytest

from rolltap.addons.errors import InputError
from rolltap.trainer.boxes.process import ProcessRuntime
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from rolltap.trainer.judges import checkout, layout
from rolltap.trainer.judges.changes import AgentResult
from rolltap.trainer.judges.judge import judge, prepare_ahead
from rolltap.trainer.judges.layout import JudgeJob
from rolltap.trainer.tasks.task import Task
from tests.trainer.judges.sessions import Left, shell


def job_of(left, spec, **given):
    task = Task.model_validate({"id": "t", "instruction": "Mend it.", "judge": spec})
    result = AgentResult(left.workspace, left.home)
    return JudgeJob(
        task=task,
        start=left.start,
        runtime=left.runtime,
        result=result,
        name="t-0",
        logs=left.logs,
        **given,
    )


@pytest.fixture
def made(monkeypatch):
    """The folders of the checkouts that were laid out."""
    made, lay_out = [], layout.lay_out

    async def laid(job, spec):
        found = await lay_out(job, spec)
        made.append(found[0])
        return found

    for module in (layout, checkout):
        monkeypatch.setattr(module, "lay_out", laid)
    return made


@pytest.mark.parametrize(
    ("spec", "checkouts"),
    [
        (shell("test $(cat ?.txt) = newnew"), 1),
        # a command that names pytest is judged by its report if there is one on the start: by a
        # second checkout
        ({"kind": "command", "command": ["pytest", "-q", "test_a.py"]}, 2),
    ],
)
async def test_it_is_prepared_before_the_agent_has_ended_and_is_the_one_that_judges(
    tmp_path, made, spec, checkouts
):
    tests = "def test_a():\n    assert open('a.txt').read() == 'new'\n"
    left = Left(tmp_path, {"a.txt": "old", "c.txt": "old", "test_a.py": tests}, SandboxRuntime())
    ahead = prepare_ahead(job := job_of(left, spec))
    folder, _ = await ahead._laid
    left.do({"a.txt": "new", "b.txt": "new", "c.txt": None})
    judged = await judge(replace(job, ahead=ahead))
    assert judged.reward == 1.0, judged
    assert (len(made), made[0], folder.exists()) == (checkouts, folder, False)


async def test_a_judge_in_a_box_with_hosts_needs_a_recorder(tmp_path):
    left = Left(tmp_path, {}, SandboxRuntime())
    with pytest.raises(
        InputError, match=r"its judge may reach pypi\.org .* only the recorder of a rollout"
    ):
        await left.judge(shell("true", allow=["pypi.org"]))
    assert (await left.judge(shell("true", allow=[]))).reward == 1.0


async def test_what_the_agent_did_to_the_judges_own_files_is_refused_there_too(tmp_path):
    left = Left(
        tmp_path, {"check.sh": "exit 1"}, SandboxRuntime(), did={"check.sh": "exit 0", "a.txt": "x"}
    )
    judged = await left.judge({"kind": "command", "command": ["sh", "check.sh"]})
    assert (judged.reward, judged.evidence["refused"]) == (0.0, ["check.sh: protected"])


async def test_a_judge_can_write_nothing_of_its_own_there(tmp_path):
    left = Left(
        tmp_path,
        {"check.sh": "echo exit 0 > check.sh || exit 1"},
        SandboxRuntime(),
        did={"a.txt": "x"},
    )
    assert (await left.judge({"kind": "command", "command": ["sh", "check.sh"]})).reward == 0.0


async def test_why_one_cannot_be_prepared_is_said_by_the_judge(tmp_path):
    left = Left(tmp_path, {"a.txt": "old"}, SandboxRuntime(), did={"a.txt": "new"})
    judged = await left.judge(
        {"kind": "pytest", "test_patch": "--- a/none\n+++ b/none\n@@ -1 +1 @@\n-a\n+b\n"}
    )
    assert "test_patch does not fit its start" in judged.unjudged
    assert not [*left.workspace.parent.glob("judge-*")]


async def test_none_is_prepared_where_the_agent_could_reach_it(tmp_path):
    left = Left(tmp_path, {"a.txt": "old"}, ProcessRuntime())
    assert prepare_ahead(job_of(left, shell("true"))) is None


async def test_it_can_be_ended_while_it_is_laid_out_and_leaves_nothing(tmp_path):
    left = Left(tmp_path, {"a.txt": "old"}, SandboxRuntime())
    await prepare_ahead(job_of(left, shell("true"))).close()
    assert not [*left.workspace.parent.glob("judge-*")]


async def test_only_the_first_who_asks_gets_it(tmp_path):
    left = Left(tmp_path, {"a.txt": "old"}, SandboxRuntime(), did={"b.txt": "new"})
    job = job_of(left, shell("test -e b.txt"))
    job = replace(job, ahead=prepare_ahead(job))
    assert [(await judge(job)).reward for _ in range(2)] == [1.0, 1.0]
