"""A used-up budget ends a program at once. A prompt over its budget makes it compact its history,
or ends it."""

import pytest

from rolltap.trainer.tasks.task import Task
from rolltap.types import Budget
from tests.deep import cases
from tests.harness.play import installed, shell, tool_call

pytestmark = pytest.mark.harness

TASK = Task(id="work", instruction="Go on working.", evaluate=["true"])
MOST_REFUSALS = 2
"""Of a session. A program that retries has more: Codex 6 after status 403, mini-swe-agent 10 in
minutes after 400."""
SUMMARY = "I was looking at numbers."


@pytest.mark.parametrize(
    "name", cases(["claude-code", "codex", "mini-swe-agent", "qwen-code"], 0, 1)
)
async def test_a_program_ends_when_its_calls_are_used_up(name, lead, play):
    harness = installed(name)
    lead(lambda prompt: shell(harness, "echo hi"))
    played = await play(harness, TASK, budget=Budget(calls=2))
    assert (played.session.status, played.session.exit_status) != ("timeout", None), played.log
    assert [call.status for call in played.calls] == ["completed"] * 2
    assert 1 <= len(played.of("budget")) <= MOST_REFUSALS, played.log
    assert played.of("fault") == []
    assert "budget" in played.log


@pytest.mark.parametrize("name", cases(["claude-code", "codex"]))
async def test_a_program_ends_when_its_sampled_tokens_are_used_up(
    name, lead, play, scripted_engine
):
    harness = installed(name)
    said = shell(harness, "echo hi")
    lead(lambda prompt: said)
    turn = len(scripted_engine.ids(said)) + 1
    played = await play(harness, TASK, budget=Budget(sampled_tokens=2 * turn))
    assert (played.session.status, played.session.exit_status) != ("timeout", None), played.log
    assert sum(len(call.completion_ids) for call in played.calls) == 2 * turn
    assert 1 <= len(played.of("budget")) <= MOST_REFUSALS, played.log


async def test_a_program_compacts_its_history_when_a_prompt_is_over_its_budget(lead, play):
    def reply(prompt):
        if SUMMARY in prompt:
            return "Done."
        if "summary" in prompt.rsplit("<|im_start|>user", 1)[1]:
            return f"<summary>{SUMMARY}</summary>"
        command = "head -c 8000 /dev/zero | tr '\\0' 7"  # a digit is a token
        return tool_call("Bash", {"command": command, "description": "Look"})

    lead(reply)
    played = await play(installed("claude-code"), TASK, budget=Budget(prompt_tokens=45000))
    assert (played.session.status, played.session.exit_status) == ("completed", 0), played.log
    assert "compaction" in [call.role for call in played.calls]
    assert max(len(call.prompt_ids) for call in played.calls) <= 45_000
    (refused,) = played.of("budget")
    assert played.calls[-1].started_at > refused["at"]
