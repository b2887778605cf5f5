"""A conversation written by the real recorder, in each export format."""

import pytest

from rolltap.addons.store.records import Session
from rolltap.addons.store.tables import RunWriter
from rolltap.trainer.runs.exports.atif import trajectory
from rolltap.trainer.runs.exports.messages import session_conversations
from rolltap.trainer.traces.reader import iter_sessions
from tests.addons.harness import user
from tests.scripted_engine import Say
from tests.trainer.runs.exports.atif_schema import Trajectory
from tests.trainer.runs.exports.recording import BASH

TOOL_CALL = (
    '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"command":'
    ' "ls"}}\n</tool_call>'
)


@pytest.fixture
async def recorded(harness, scripted_engine):
    """Record two turns with a tool call between them, and a request for a title without tools. It
    has a reward."""
    scripted_engine.replies += [Say(TOOL_CALL), Say("Files"), Say("a.txt")]
    _, first = await harness.ask(user("List."), tools=[BASH])
    await harness.ask(user("Title?"))
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a.txt"}
    await harness.ask(user("List."), message, result, tools=[BASH])
    with RunWriter(harness.run) as writer:
        writer.add_session(Session(session_id="s1", status="completed", reward=1.0))
    (session,) = iter_sessions(harness.run)
    return session


async def test_the_conversation_is_trained_and_the_title_is_context_in_every_format(recorded):
    lines, faults = session_conversations(recorded)
    title, conversation = sorted(lines, key=lambda line: len(line["messages"]))
    assert (faults, title["role"], title["left_out"]) == ({}, "auxiliary", "auxiliary")
    assert [message["role"] for message in conversation["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    asked = conversation["messages"][1]
    assert asked["reasoning_content"] == "I look."
    assert asked["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}
    assert conversation["messages"][3]["content"] == "a.txt"
    assert conversation["call_ids"] == [recorded.calls[0].call_id, recorded.calls[2].call_id]

    document = trajectory(recorded, "tiny")
    Trajectory.model_validate(document)
    first, last = (step for step in document["steps"] if step["source"] == "agent")
    assert (first["observation"]["results"][0]["content"], last["message"]) == ("a.txt", "a.txt")
    (title,) = document["subagent_trajectories"]
    assert (title["extra"]["role"], title["steps"][-1]["message"]) == ("auxiliary", "Files")
