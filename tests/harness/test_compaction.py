"""Compaction by the program: before the history exceeds the context window, or after a call was
refused for that."""

import pytest

from rolltap.trainer.tasks.task import Task
from tests.harness.play import installed, shell

pytestmark = pytest.mark.harness

TASK = Task(
    id="numbers", instruction="Look at the numbers.", evaluate=["test", "-s", "afterwards.txt"]
)
SUMMARY = "I was looking at numbers."


@pytest.mark.parametrize(
    ("name", "env", "window", "digits", "refused"),
    [
        pytest.param("codex", {}, 12_000, 2_000, 0, id="codex-in-time"),
        pytest.param("claude-code", {}, 45_000, 8_000, 1, id="claude-code-when-refused"),
        # it uses the configured context window only for a model that it does not know
        pytest.param(
            "claude-code", {"ANTHROPIC_MODEL": "local"}, 64_000, 4_000, 0, id="claude-code-in-time"
        ),
    ],
)
async def test_the_session_continues_from_the_programs_own_summary(
    name, env, window, digits, refused, lead, play, scripted_engine
):
    harness = installed(name)
    harness = harness.model_copy(update={"env": {**harness.env, **env}})
    scripted_engine.max_model_len = window

    def reply(prompt):
        if SUMMARY in prompt:
            return (
                "Done."
                if "aft\\u0065rwards" in prompt
                else shell(harness, "echo done > afterwards.txt")
            )
        if "summary" in prompt.rsplit("<|im_start|>user", 1)[1]:
            return f"<think>\nI sum up.\n</think>\n\n<summary>{SUMMARY}</summary>"
        return shell(harness, f"head -c {digits} /dev/zero | tr '\\0' 7")  # a digit is a token

    lead(reply)
    played = await play(harness, TASK)
    assert (played.session.status, played.session.reward) == ("completed", 1.0), played.log
    assert len(played.of("rejected")) == refused
    roles = [call.role for call in played.calls]
    assert roles.count("compaction") == 1
    at = roles.index("compaction")
    assert at > 2
    before, compaction, first, *later = played.calls[at - 1 :]
    assert {call.role for call in [*played.calls[:at], first, *later]} == {"agent"}
    assert {call.kind for call in [*played.calls[1:at], compaction, *later]} == {"bridged"}
    assert first.parent_id is None
    assert (
        "is not that of call" in first.kind_reason
    )  # the summary replaced a message of the history
    assert len(first.prompt_ids) < len(before.prompt_ids)
    assert {(call.status, call.violation) for call in played.calls} == {("completed", None)}
    assert played.summary.uncaptured_calls == 0
    assert played.summary.ledger.trained == sum(len(call.completion_ids) for call in played.calls)
