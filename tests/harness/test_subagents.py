"""Sub-agents that the program starts: their calls form a separate line within the session."""

import json

import pytest

from rolltap.trainer.tasks.task import Task
from tests.harness.play import installed, shell, tool_call

pytestmark = pytest.mark.harness

TASK = Task(
    id="delegate", instruction="Let somebody else do it.", evaluate=["test", "-s", "helper.txt"]
)
ASKED, TOLD = "You are to write helper.txt.", "The helper has written it."

START = {
    "claude-code": (
        "Agent",
        {"subagent_type": "general-purpose"},
        "header x-claude-code-request-class: subagent",
    ),
    "qwen-code": ("agent", {"subagent_type": "general-purpose"}, "metadata.promptId: "),
}
"""The tool that starts a sub-agent, its further arguments, and the evidence for the role of the
sub-agent's calls."""


@pytest.mark.parametrize("name", START)
async def test_the_calls_of_a_subagent_are_a_line_of_their_own_and_answer_a_fork(
    name, lead, play, scripted_engine, tmp_path
):
    harness = installed(name)
    tool, arguments, evidence = START[name]

    def reply(prompt):
        worked = "<tool_response>" in prompt
        if TASK.instruction in prompt:
            return (
                "Done."
                if worked
                else tool_call(tool, {**arguments, "description": "Help", "prompt": ASKED})
            )
        return TOLD if worked else shell(harness, "echo done > helper.txt")

    lead(reply)
    played = await play(harness, TASK)
    asked = len(scripted_engine.requests)
    assert (played.session.status, played.session.reward) == ("completed", 1.0), played.log
    helper = [call for call in played.calls if call.role == "subagent"]
    assert len(helper) == 2
    assert all(call.role_evidence.startswith(evidence) for call in helper)
    for line in (played.main, helper):
        ids = [call.call_id for call in line]
        assert [call.parent_id for call in line] == [None, *ids[:-1]]
        assert [call.kind for call in line[1:]] == ["bridged"] * (len(line) - 1)
    assert TOLD in scripted_engine.tokenizer.decode(played.main[-1].prompt_ids)
    assert {(call.status, call.violation) for call in played.calls} == {("completed", None)}
    assert played.summary.uncaptured_calls == 0
    assert played.summary.ledger.trained == sum(
        len(call.completion_ids) for call in [*played.main, *helper]
    )

    # a fork at the last call: the record answers the sub-agent, in another folder and at another
    # time
    last = played.main[-1]
    source = {
        "run": str(played.run),
        "session": last.session_id,
        "until": last.started_at.isoformat(),
    }
    fork = await play(harness, TASK, folder=tmp_path / "fork", rolltap_rerun=json.dumps(source))
    assert (fork.session.status, fork.session.reward) == ("completed", 1.0), (
        fork.session.error or fork.log
    )
    given = {call.call_id for call in played.calls} - {last.call_id}
    assert {event["call_id"] for event in fork.of("rerun")} == given
    assert len(scripted_engine.requests) == asked + 1
    (own,) = fork.calls
    known = len(played.main[-2].prompt_ids) + len(played.main[-2].completion_ids)
    assert (own.kind, own.prompt_ids[:known]) == ("root", last.prompt_ids[:known])
    assert fork.summary.ledger.sampled == fork.summary.ledger.trained == len(own.completion_ids)
