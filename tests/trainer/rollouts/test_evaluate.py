import os

import pytest

from rolltap.trainer.rollouts import evaluate as module
from rolltap.trainer.rollouts.evaluate import evaluate
from rolltap.trainer.rollouts.tasks.task import Task


async def judge(command, tmp_path):
    task = Task(id="t", instruction="x", evaluate=command)
    return await evaluate(task, tmp_path, dict(os.environ), tmp_path / "log")


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        ("exit 0", 1.0),
        ("exit 1", 0.0),
        ("echo text", 1.0),
        ("echo 0.25", 0.25),
        ("echo first; echo -3", -3.0),
        ("echo 0.5; exit 1", 0.5),
        ("echo nan", 1.0),
        ("echo inf; exit 2", 0.0),
        ("printf '\\377\\n0.5'", 0.5),
        ("./solve", 0.0),
        ("touch solve; ./solve", 0.0),
    ],
)
async def test_the_reward_is_the_number_printed_or_the_exit_status(tmp_path, script, reward):
    assert await judge(["sh", "-c", script], tmp_path) == (reward, None)


async def test_it_runs_in_the_workspace(tmp_path):
    (tmp_path / "answer.txt").write_text("7")
    assert await judge(["cat", "answer.txt"], tmp_path) == (7.0, None)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no-such-evaluator"], "'no-such-evaluator' could not be started"),
        (["/dev/null"], "'/dev/null' could not be started"),
        (["sh", "-c", "kill -9 $$"], "the evaluator was ended by signal 9"),
    ],
)
async def test_an_evaluator_that_does_not_judge_gives_no_reward(tmp_path, command, message):
    reward, error = await judge(command, tmp_path)
    assert reward is None
    assert message in error


async def test_a_workspace_that_the_agent_removed_has_the_reward_0(tmp_path):
    workspace = tmp_path / "workspace"
    task = Task(id="t", instruction="x", evaluate=["true"])
    assert await evaluate(task, workspace, dict(os.environ), tmp_path / "log") == (0.0, None)


async def test_an_evaluator_that_takes_too_long_gives_no_reward(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EVALUATE_SECONDS", 0.1)
    reward, error = await judge(["sleep", "600"], tmp_path)
    assert reward is None
    assert "took more than" in error
