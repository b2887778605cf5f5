"""Requests that forbid tool calls: the conversation goes on, and the reply is text."""

import json

import pytest

from rolltap.trainer.doctor.scripted_engine import Say
from tests.addons.harness import user

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "here"}}\n</tool_call>'


async def worked(harness, scripted_engine):
    """Let the model call its tool, and return the conversation with the result."""
    scripted_engine.replies.append(Say(CALL))
    _, body = await harness.ask(user(), tools=[TOOL])
    message = body["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Nothing."}
    return [user(), message, result]


async def test_the_last_answer_without_tools_continues_the_conversation_and_is_the_agents(harness, scripted_engine):
    conversation = await worked(harness, scripted_engine)
    scripted_engine.replies.append(Say("There is nothing."))
    status, body = await harness.ask(*conversation, tools=[TOOL], tool_choice="none")
    assert (status, body["choices"][0]["message"]["content"]) == (200, "There is nothing.")
    last = harness.calls()[-1]
    assert (last["kind"], last["role"]) == ("bridged", "agent")
    assert json.loads(last["sampling"])["asked"]["tool_choice"] == "none"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_forbidden_call_is_text_and_its_echo_is_continued(harness, scripted_engine, streamed):
    conversation = await worked(harness, scripted_engine)
    scripted_engine.replies.append(Say(f"Once more.\n{CALL}"))
    asked = {"tools": [TOOL], "tool_choice": "none"}
    if streamed:
        _, events = await harness.stream(*conversation, **asked)
        chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
        text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        assert not any("tool_calls" in chunk["delta"] for chunk in chunks)
        reason = chunks[-1]["finish_reason"]
    else:
        _, body = await harness.ask(*conversation, **asked)
        (choice,) = body["choices"]
        assert "tool_calls" not in choice["message"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert reason == "stop"
    first, second = text.split("\n")
    assert first == "Once more."
    assert json.loads(second)["name"] == "look"
    scripted_engine.replies.append(Say("Well."))
    await harness.ask(*conversation, {"role": "assistant", "content": text}, user("And?"), **asked)
    assert harness.calls()[-1]["kind"] == "bridged"


async def test_a_final_answer_without_tools_is_the_agents_also_when_it_gives_results_as_text(harness, scripted_engine):
    conversation = await worked(harness, scripted_engine)
    scripted_engine.replies.append(Say("There is nothing."))
    await harness.ask(*conversation[:2], user("The tool says: Nothing. Sum up."))
    last = harness.calls()[-1]
    assert (last["kind"], last["role"]) == ("rendered", "agent")
