"""Replies of this dialect, parsed by OpenAI's own SDK."""

import json

import pytest
from openai import BadRequestError, OpenAI
from openai.types.responses import Response

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.model_call import ContextOverflow, DialectError, Reply, ToolCall
from tests.addons.dialects.server import NOW, Server

FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
TOOLS = [
    FUNCTION,
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [{**FUNCTION, "name": "spawn"}]},
]
LOOK = ToolCall("call_1", "look", '{"at":  "é"}')
REPLIES = {
    "text": Reply("Hi <b>\u2028😀\n\nthere."),
    "nothing": Reply(""),
    "reasoning and text": Reply("Yes.", "Hm.\n\nYes?"),
    "only reasoning, cut": Reply("", "Hm, I", finish_reason="length"),
    "cut text": Reply("I was abou", finish_reason="length"),
    "one tool call": Reply("", "", [LOOK], "tool_calls"),
    "several tool calls": Reply(
        "All of them:",
        "I look, patch and spawn.",
        [
            LOOK,
            ToolCall("call_2", "look", "not JSON"),
            ToolCall("call_3", "patch", '{"input": "+ x\\n"}'),
            ToolCall("call_4", "agents__spawn", '{"n": 1}'),
        ],
        "tool_calls",
    ),
}
WIRE_CALLS = {
    "call_1": ("function_call", "look", None, LOOK.arguments),
    "call_2": ("function_call", "look", None, "not JSON"),
    "call_3": ("custom_tool_call", "patch", None, "+ x\n"),
    "call_4": ("function_call", "spawn", "agents", '{"n": 1}'),
}


def sdk(reply):
    """Return an SDK client whose requests are answered with `reply`, a `Reply` or a `DialectError`."""
    return OpenAI(api_key="x", http_client=Server(reply).client, max_retries=0).responses


def said(response):
    """Return what the SDK parsed: text, reasoning, tool calls, status."""
    reasoning = "".join(part.text for item in response.output if item.type == "reasoning" for part in item.summary)
    calls = {
        item.call_id: (
            item.type,
            item.name,
            item.namespace,
            item.arguments if item.type == "function_call" else item.input,
        )
        for item in response.output
        if item.type.endswith("_call")
    }
    return response.output_text, reasoning, calls, response.status


def expected(reply):
    calls = {call.id: WIRE_CALLS[call.id] for call in reply.tool_calls}
    return reply.content, reply.reasoning, calls, "incomplete" if reply.finish_reason == "length" else "completed"


def assert_valid(response):
    """Assert that each field has the type that the SDK declares. The SDK's own parsing does not validate types."""
    Response.model_validate_json(json.dumps(response.to_dict(mode="json", warnings=False)))


every_reply = pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)


@every_reply
def test_a_response_is_the_reply(reply):
    response = sdk(reply).create(model="gpt-x", input="Hi", tools=TOOLS)
    assert said(response) == expected(reply)
    assert_valid(response)
    assert (response.id, response.model, response.created_at) == ("resp_c9", "gpt-x", NOW)
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 3, 10)
    assert response.usage.input_tokens_details.cached_tokens == 4


@every_reply
def test_a_stream_adds_up_to_the_reply(reply):
    with sdk(reply).create(model="gpt-x", input="Hi", tools=TOOLS, stream=True) as stream:
        events = list(stream)
    assert said(events[-1].response) == expected(reply)
    assert_valid(events[-1].response)
    deltas = {
        kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
        for kind in ["reasoning_summary_text", "output_text", "function_call_arguments", "custom_tool_call_input"]
    }
    wire = [WIRE_CALLS[call.id] for call in reply.tool_calls]
    assert deltas == {
        "reasoning_summary_text": reply.reasoning,
        "output_text": reply.content,
        "function_call_arguments": "".join(c[3] for c in wire if c[0] == "function_call"),
        "custom_tool_call_input": "".join(c[3] for c in wire if c[0] == "custom_tool_call"),
    }
    for event in events:
        type(event).model_validate(event.to_dict(mode="json", warnings=False))


@pytest.mark.parametrize("name", [name for name, reply in REPLIES.items() if reply.finish_reason != "length"])
def test_the_sdks_accumulated_stream_is_the_reply(name):
    with sdk(REPLIES[name]).stream(model="gpt-x", input="Hi", tools=TOOLS) as stream:
        assert said(stream.get_final_response()) == expected(REPLIES[name])


@every_reply
def test_the_output_that_the_sdk_sends_back_is_the_reply(reply):
    create = sdk(reply).create
    output = create(model="gpt-x", input="Hi", tools=TOOLS).output
    body = {"model": "gpt-x", "tools": TOOLS, "input": [item.to_dict() for item in output]}
    (message,) = openai_responses.decode(json.dumps(body).encode(), "/v1/responses").messages
    assert message["content"] == reply.content
    assert message.get("reasoning_content", "") == reply.reasoning
    assert message.get("call_id") == ("c9" if reply.reasoning else None)
    calls = message.get("tool_calls", [])
    assert [(c["id"], c["function"]["name"]) for c in calls] == [(c.id, c.name) for c in reply.tool_calls]


def test_an_overflow_is_the_sdks_bad_request():
    with pytest.raises(BadRequestError) as refusal:
        sdk(ContextOverflow(9, 8)).create(model="gpt-x", input="Hi")
    assert refusal.value.code == "context_length_exceeded"
    assert "maximum context length is 8 tokens" in refusal.value.message


def test_a_failure_in_a_stream_is_a_failed_response():
    with sdk(DialectError("The engine is down.", status=503)).create(model="m", input="Hi", stream=True) as stream:
        *_, last = stream
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == ("server_error", "The engine is down.")
    assert_valid(last.response)


def test_the_sdk_reads_a_token_count():
    count = sdk(None).input_tokens.count(model="gpt-x", input="Hi")
    assert (count.object, count.input_tokens) == ("response.input_tokens", 42)
