"""A real program against its record: another version of it, and forks at each of its calls."""

import os
import subprocess

import pytest

from rolltap.addons.prompts.canonical import steady
from rolltap.trainer.tasks.task import Task
from tests.deep import cases
from tests.harness.play import installed, shell
from tests.harness.test_harnesses import greeting

pytestmark = pytest.mark.harness

ASKED = "Write a greeting into greeting.txt, then read it."
OLDER = "@earendil-works/pi-coding-agent@0.86.1"


@pytest.mark.deep
def test_an_older_version_of_a_program_diverges_where_it_asks_something_else(
    lead, record, run_rerun, workspace, home, tmp_path, monkeypatch
):
    program = installed("pi")
    lead(greeting("pi"))
    record(ASKED, harness=program, keys={})
    older = tmp_path / "older"
    install = ["npm", "install", "--prefix", older, "--no-audit", "--no-fund", OLDER]
    subprocess.run(install, check=True)
    monkeypatch.setenv("PATH", str(older / "node_modules" / ".bin"), prepend=os.pathsep)
    ended = run_rerun(program, ASKED, {}, keys={})
    assert ended.returncode == 3
    assert "0 of 3 recorded calls answered" in ended.stderr
    assert "diverged at call 1: the system prompt is another one" in ended.stderr


TASK = Task(
    id="append",
    instruction="Append two lines to lines.txt.",
    evaluate=["sh", "-c", "test $(wc -l < lines.txt) = 2"],
)


def start_of(call):
    return call.started_at


@pytest.mark.parametrize("name", cases(["pi", "claude-code", "qwen-code"], 0))
async def test_a_fork_at_each_call_asks_what_was_asked_then_token_for_token(
    name, lead, play, scripted_engine, tmp_path
):
    harness = installed(name)

    def reply(prompt):
        worked = prompt.count("<tool_response>")
        if TASK.instruction not in prompt or "<tools>" not in prompt or worked == 2:
            return "Done."
        # the shell of Qwen Code loses an output at times
        show = "" if name == "qwen-code" else "; cat lines.txt"
        return shell(harness, f"echo line {worked} >> lines.txt{show}")

    lead(reply)
    played = await play(harness, TASK)
    played.check_won()
    assert len(played.main) == 3
    calls = sorted(played.calls, key=start_of)  # a side question is one of them
    for number, then in enumerate(calls):
        asked = len(scripted_engine.requests)
        folder = tmp_path / f"fork{number}"
        fork = await play(harness, TASK, folder=folder, **played.until(then))
        fork.check_won()
        given = {event["call_id"] for event in fork.of("rerun")}
        assert given == {call.call_id for call in calls[:number]}
        own = sorted(fork.calls, key=start_of)
        assert [call.role for call in own] == [call.role for call in calls[number:]]
        # the record answers without the engine
        sent = [request["token_ids"] for request in scripted_engine.requests[asked:]]
        assert [call.prompt_ids for call in own] == sent
        if number:
            assert own[0].prompt_ids == then.prompt_ids
        else:  # nothing is from the record: dates, ids and the folder are new
            ours = steady(scripted_engine.tokenizer.decode(own[0].prompt_ids))
            theirs = steady(scripted_engine.tokenizer.decode(then.prompt_ids))
            assert ours.replace("/fork0/", "/") == theirs
        ledger = fork.summary.ledger
        assert ledger.sampled == fork.sampled
        assert ledger.trained == sum(len(call.completion_ids) for call in fork.main)
