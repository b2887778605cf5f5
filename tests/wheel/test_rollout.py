import asyncio
import sys

import pytest

import rolltap
from tests.scripted_engine import Say

HARNESS = """
import json, os, urllib.request
ask = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
headers = {"content-type": "application/json"}
url = "https://api.openai.com/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(ask).encode(), headers)
with urllib.request.urlopen(request, timeout=600) as reply:
    answer = json.load(reply)["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
"""


@pytest.fixture
def rollout_arguments(scripted_engine, tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scripted_engine.otherwise = lambda request: Say("0.5")
    harness = rolltap.Harness(name="x", program=sys.executable, headless=["-I", "-c", HARNESS])
    command = ["sh", "-c", "cat answer.txt > $ROLLTAP_REWARD_FILE"]
    judge = {"kind": "command", "command": command, "result": "number"}
    task = rolltap.Task(id="t", instruction="Say it.", judge=judge)
    engine = {"engine": scripted_engine.url, "model": tokenizer_folder}
    return [task], {"harness": harness, "out": "runs/a", **engine}


def check(run, sessions):
    batch = run.traces(strategy="prefix_merging").batch()
    assert [session.status for session in run.sessions()] == ["completed"] * sessions
    assert {session.reward for session in run.sessions()} == {0.5}
    assert len(run.calls) == len(batch.traces) == len(batch.rewards) == sessions
    assert batch.ledger.sampled == batch.ledger.trained > 0


def test_a_script_rolls_out_tasks_and_gets_a_batch(rollout_arguments, capfd):
    tasks, rest = rollout_arguments
    run = rolltap.rollout(tasks, **rest, sessions=8)
    check(run, sessions=8)
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.startswith(f"the engine at {rest['engine']} serves ")


def test_a_notebook_in_whose_thread_an_event_loop_runs_does_so_too(rollout_arguments):
    tasks, rest = rollout_arguments

    async def cell():
        return rolltap.rollout(tasks, **rest, sessions=1)

    run = asyncio.run(cell())
    check(run, sessions=1)


async def test_a_coroutine_does_so_too(rollout_arguments):
    tasks, rest = rollout_arguments
    run = await rolltap.rollout_async(tasks, **rest, sessions=1)
    check(run, sessions=1)
