"""Sub-agents that the program starts: their calls form a separate line within the session."""

import pytest

from rolltap.trainer.tasks.task import Task
from tests.harness.play import installed, shell, tool_call

pytestmark = pytest.mark.harness

TASK = Task(
    id="delegate", instruction="Let somebody else do it.", evaluate=["test", "-s", "helper.txt"]
)
ASKED = "You are to write helper.txt."
TOLD = "The helper has written it."
ASK = {"subagent_type": "general-purpose", "description": "Help", "prompt": ASKED}
START = {
    "claude-code": ("Agent", "header x-claude-code-request-class: subagent"),
    "qwen-code": ("agent", "metadata.promptId: "),
}
"""The tool that starts a sub-agent, and the evidence for the role of the sub-agent's calls."""


@pytest.mark.parametrize("name", START)
async def test_the_calls_of_a_subagent_are_a_line_of_their_own_and_answer_a_fork(
    name, lead, play, scripted_engine, tmp_path
):
    harness = installed(name)
    tool, evidence = START[name]

    def reply(prompt):
        worked = "<tool_response>" in prompt
        if TASK.instruction in prompt:
            return "Done." if worked else tool_call(tool, ASK)
        return TOLD if worked else shell(harness, "echo done > helper.txt")

    lead(reply)
    played = await play(harness, TASK)
    asked = len(scripted_engine.requests)
    played.check_won()
    played.check_whole()
    helper = [call for call in played.calls if call.role == "subagent"]
    assert len(helper) == 2
    assert all(call.role_evidence.startswith(evidence) for call in helper)
    for line in (played.main, helper):
        ids = [call.call_id for call in line]
        assert [call.parent_id for call in line] == [None, *ids[:-1]]
        assert {call.kind for call in line[1:]} == {"bridged"}
    before, last = played.main[-2:]
    assert TOLD in scripted_engine.tokenizer.decode(last.prompt_ids)
    trained = sum(len(call.completion_ids) for call in [*played.main, *helper])
    assert played.summary.ledger.trained == trained

    # a fork at the last call: the record answers the sub-agent, in another folder and at another
    # time
    fork = await play(harness, TASK, folder=tmp_path / "fork", **played.until(last))
    fork.check_won()
    given = {call.call_id for call in played.calls} - {last.call_id}
    assert {event["call_id"] for event in fork.of("rerun")} == given
    assert len(scripted_engine.requests) == asked + 1
    (own,) = fork.calls
    known = len(before.prompt_ids) + len(before.completion_ids)
    assert (own.kind, own.prompt_ids[:known]) == ("root", last.prompt_ids[:known])
    assert fork.summary.ledger.trained == fork.sampled
