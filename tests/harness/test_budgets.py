"""A used-up budget ends a program at once. A prompt over its budget makes it compact its history, or ends it."""

import pytest

from rolltap.trainer.doctor.scripted_engine import Say
from rolltap.trainer.tasks.task import Task
from rolltap.types import Budget
from tests.deep import cases
from tests.harness.play import installed, play, tool_call

pytestmark = pytest.mark.harness

TASK = Task(id="work", instruction="Go on working.", evaluate=["true"])
TOOLS = {
    "claude-code": ("Bash", {"command": "echo hi", "description": "Work"}),
    "codex": ("exec_command", {"cmd": "echo hi"}),
    "mini-swe-agent": ("bash", {"command": "echo hi"}),
    "qwen-code": ("run_shell_command", {"command": "echo hi", "is_background": False}),
}
MOST_REFUSALS = 2
"""Of a session. A program that retries has more: Codex 6 after status 403, mini-swe-agent 10 in minutes after 400."""


def work(scripted_engine, name):
    """Script a session that never ends by itself."""
    scripted_engine.otherwise = lambda request: Say(tool_call(*TOOLS[name]))


@pytest.mark.parametrize("name", cases(TOOLS, 0, 1))
async def test_a_program_ends_when_its_calls_are_used_up(name, scripted_engine, tokenizer_folder, tmp_path):
    harness = installed(name)
    work(scripted_engine, name)
    played = await play(harness, TASK, scripted_engine, tokenizer_folder, tmp_path, budget=Budget(calls=2))
    assert (played.session.status, played.session.exit_status) != ("timeout", None), played.log
    assert [call.status for call in played.calls] == ["completed"] * 2
    assert 1 <= len(played.of("budget")) <= MOST_REFUSALS, played.log
    assert played.of("fault") == []
    assert "budget" in played.log


@pytest.mark.parametrize("name", cases(["claude-code", "codex"]))
async def test_a_program_ends_when_its_sampled_tokens_are_used_up(name, scripted_engine, tokenizer_folder, tmp_path):
    harness = installed(name)
    work(scripted_engine, name)
    turn = len(scripted_engine.ids(tool_call(*TOOLS[name]))) + 1
    budget = Budget(sampled_tokens=2 * turn)
    played = await play(harness, TASK, scripted_engine, tokenizer_folder, tmp_path, budget=budget)
    assert (played.session.status, played.session.exit_status) != ("timeout", None), played.log
    assert sum(len(call.completion_ids) for call in played.calls) == 2 * turn
    assert 1 <= len(played.of("budget")) <= MOST_REFUSALS, played.log


SUMMARY = "I was looking at numbers."


async def test_a_program_compacts_its_history_when_a_prompt_is_over_its_budget(
    scripted_engine, tokenizer_folder, tmp_path
):
    harness = installed("claude-code")

    def reply(request):
        prompt = scripted_engine.tokenizer.decode(request["token_ids"])
        if SUMMARY in prompt:
            return Say("Done.")
        if "summary" in prompt.rsplit("<|im_start|>user", 1)[1]:
            return Say(f"<summary>{SUMMARY}</summary>")
        command = "head -c 8000 /dev/zero | tr '\\0' 7"  # a digit is a token
        return Say(tool_call("Bash", {"command": command, "description": "Look"}))

    scripted_engine.otherwise = reply
    budget = Budget(prompt_tokens=45000)
    played = await play(harness, TASK, scripted_engine, tokenizer_folder, tmp_path, budget=budget)
    assert (played.session.status, played.session.exit_status) == ("completed", 0), played.log
    assert "compaction" in [call.role for call in played.calls]
    assert max(len(call.prompt_ids) for call in played.calls) <= 45_000
    (refused,) = played.of("budget")
    assert played.calls[-1].started_at > refused["at"]
