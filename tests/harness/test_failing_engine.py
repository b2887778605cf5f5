"""An engine that dies in the middle of a reply: the program sees one reply, or an error without
patience."""

import pytest

from rolltap.trainer.tasks.task import Task
from tests.deep import cases
from tests.harness.play import installed, shell
from tests.scripted_engine import Answer, Say

pytestmark = pytest.mark.harness

TASK = Task(
    id="lines",
    instruction="Write one line after the other.",
    evaluate=["grep", "-qz", "^0\n1\n$", "lines.txt"],
)
BREAK_AFTER = 8
"""Token count before the failure: in the middle of the reasoning."""


def lines(harness, fault=None):
    """Return two turns that write a line, then the end. The first attempt at the second turn is
    `fault` or breaks off.

    A later request gets the tokens that are missing in its prompt.
    """
    broken = []

    def reply(prompt):
        turn = prompt.count("<tool_response>")
        text = shell(harness, f"echo {turn} >> lines.txt") if turn < 2 else "Done."
        if turn == 1 and not broken:
            broken.append(turn)
            return fault or Say(text, break_after=BREAK_AFTER)
        return text.removeprefix(prompt.rsplit("<|im_start|>assistant\n", 1)[1])

    return reply


@pytest.mark.parametrize("name", cases(["claude-code", "codex"]))
async def test_the_program_sees_one_unbroken_reply(name, lead, play, scripted_engine):
    harness = installed(name)
    lead(lines(harness))
    played = await play(harness, TASK)
    played.check_won()
    played.check_whole()
    assert [call.kind for call in played.calls] == ["root", "bridged", "bridged"]
    second = played.calls[1]
    assert [event["call_id"] for event in played.of("continued")] == [second.call_id]
    sent = scripted_engine.requests[2]["token_ids"]
    assert sent == second.prompt_ids + second.completion_ids[:BREAK_AFTER]
    assert (played.summary.continued, played.summary.retried) == (1, 0)
    assert played.summary.ledger.trained == played.sampled


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("claude-code", None),
        # a broken connection is a 503, after which Qwen Code waits for a minute
        ("qwen-code", Answer(200, '{"error": {"message": "no memory left", "code": 500}}')),
    ],
)
async def test_without_patience_the_program_gets_an_error_and_retries(name, fault, lead, play):
    harness = installed(name)
    lead(lines(harness, fault))
    played = await play(harness, TASK, rolltap_patience="0")
    played.check_won()
    assert [call.kind for call in played.calls] == ["root", "bridged", "bridged", "bridged"]
    first, failed, again, last = played.calls
    assert failed.status == "failed"
    assert {call.status for call in (first, again, last)} == {"completed"}
    assert again.prompt_ids == failed.prompt_ids
    assert played.summary.uncaptured_calls == 0
    ledger = played.summary.ledger
    assert len(failed.completion_ids) == (0 if fault else BREAK_AFTER)
    assert sum(ledger.left_out.values()) == len(failed.completion_ids)
    assert ledger.sampled == played.sampled
