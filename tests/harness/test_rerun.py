"""A real program against its record: another version of it, and forks at each of its calls."""

import json
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
    subprocess.run(
        ["npm", "install", "--prefix", tmp_path / "older", "--no-audit", "--no-fund", OLDER],
        check=True,
    )
    monkeypatch.setenv(
        "PATH", f"{tmp_path / 'older' / 'node_modules' / '.bin'}:{os.environ['PATH']}"
    )
    ended = run_rerun(program, ASKED, {}, keys={})
    assert ended.returncode == 3
    assert "0 of 3 recorded calls answered" in ended.stderr
    assert "diverged at call 1: the system prompt is another one" in ended.stderr


TASK = Task(
    id="append",
    instruction="Append two lines to lines.txt.",
    evaluate=["sh", "-c", "test $(wc -l < lines.txt) = 2"],
)


@pytest.mark.parametrize("name", cases(["pi", "claude-code", "qwen-code"], 0))
async def test_a_fork_at_each_call_asks_what_was_asked_then_token_for_token(
    name, lead, play, scripted_engine, tmp_path
):
    harness = installed(name)

    def reply(prompt):
        worked = prompt.count("<tool_response>")
        show = (
            "" if name == "qwen-code" else "; cat lines.txt"
        )  # its shell loses an output at times
        append = shell(harness, f"echo line {worked} >> lines.txt{show}")
        return (
            append if TASK.instruction in prompt and "<tools>" in prompt and worked < 2 else "Done."
        )

    lead(reply)
    played = await play(harness, TASK)
    assert (played.session.status, played.session.reward) == ("completed", 1.0), played.log
    assert len(played.main) == 3
    calls = sorted(played.calls, key=lambda call: call.started_at)  # a side question is one of them
    for number, then in enumerate(calls):
        asked = len(scripted_engine.requests)
        source = {
            "run": str(played.run),
            "session": then.session_id,
            "until": then.started_at.isoformat(),
        }
        fork = await play(
            harness, TASK, folder=tmp_path / f"fork{number}", rolltap_rerun=json.dumps(source)
        )
        assert (fork.session.status, fork.session.reward) == ("completed", 1.0), (
            fork.session.error or fork.log
        )
        assert {event["call_id"] for event in fork.of("rerun")} == {
            call.call_id for call in calls[:number]
        }
        own = sorted(fork.calls, key=lambda call: call.started_at)
        assert [call.role for call in own] == [call.role for call in calls[number:]]
        # the record answers without the engine
        assert [call.prompt_ids for call in own] == [
            each["token_ids"] for each in scripted_engine.requests[asked:]
        ]
        prompts = own[0].prompt_ids, then.prompt_ids
        if number:
            assert prompts[0] == prompts[1]
        else:  # nothing is from the record: dates, ids and the folder are new
            texts = (steady(scripted_engine.tokenizer.decode(prompt)) for prompt in prompts)
            assert next(texts).replace("/fork0/", "/") == next(texts)
        ledger = fork.summary.ledger
        assert ledger.sampled == sum(len(call.completion_ids) for call in own)
        assert ledger.trained == sum(len(call.completion_ids) for call in fork.main)
