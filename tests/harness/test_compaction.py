"""Compaction by the program: before the history exceeds the context window, or after a call was
refused for that, or for its budget."""

import pytest

from rolltap.trainer.tasks.task import Task
from rolltap.types import Budget
from tests.harness.play import installed, shell

pytestmark = pytest.mark.harness

TASK = Task(
    id="numbers", instruction="Look at the numbers.", evaluate=["test", "-s", "afterwards.txt"]
)
SUMMARY = "I was looking at numbers."
WIDE = 200_000
LOCAL = {"ANTHROPIC_MODEL": "local"}
"""A model that Claude Code does not know. For another it does not use the configured window."""


@pytest.mark.parametrize(
    ("name", "env", "window", "most", "digits", "refused"),
    [
        pytest.param("codex", {}, 12_000, None, 2_000, set(), id="codex-in-time"),
        pytest.param("claude-code", {}, 45_000, None, 8_000, {"rejected"}, id="when-refused"),
        pytest.param("claude-code", LOCAL, 64_000, None, 4_000, set(), id="claude-code-in-time"),
        pytest.param("claude-code", {}, WIDE, 45_000, 8_000, {"budget"}, id="over-its-budget"),
    ],
)
async def test_the_session_continues_from_the_programs_own_summary(
    name, env, window, most, digits, refused, lead, play, scripted_engine
):
    harness = installed(name)
    harness = harness.model_copy(update={"env": {**harness.env, **env}})
    scripted_engine.max_model_len = window

    def reply(prompt):
        if SUMMARY in prompt and "aft\\u0065rwards" in prompt:
            return "Done."
        if SUMMARY in prompt:
            return shell(harness, "echo done > afterwards.txt")
        if "summary" in prompt.rsplit("<|im_start|>user", 1)[1]:
            return f"<think>\nI sum up.\n</think>\n\n<summary>{SUMMARY}</summary>"
        return shell(harness, f"head -c {digits} /dev/zero | tr '\\0' 7")  # a digit is a token

    lead(reply)
    played = await play(harness, TASK, budget=Budget(prompt_tokens=most))
    played.check_won()
    for kind in ("rejected", "budget"):
        assert len(played.of(kind)) == (kind in refused)
    assert max(len(call.prompt_ids) for call in played.calls) <= (most or window)
    roles = [call.role for call in played.calls]
    assert roles.count("compaction") == 1
    at = roles.index("compaction")
    assert at > 2
    before, compaction, first, *later = played.calls[at - 1 :]
    assert {call.role for call in [*played.calls[:at], first, *later]} == {"agent"}
    assert {call.kind for call in [*played.calls[1:at], compaction, *later]} == {"bridged"}
    # the summary replaced a message of the history
    assert first.parent_id is None
    assert "is not that of call" in first.kind_reason
    assert len(first.prompt_ids) < len(before.prompt_ids)
    assert all(first.started_at > event["at"] for event in played.of("budget"))
    played.check_whole()
    assert played.summary.ledger.trained == played.sampled
