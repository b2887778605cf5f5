"""Each dialect names the results of tools by the calls that they answer."""

import json

import pytest

from rolltap.addons.dialects import anthropic, google, openai_chat, openai_responses
from rolltap.addons.dialects.dialect import name_results

CALLS = [("c1", "look"), ("c2", "go"), ("c3", "look")]
ANSWERED = ["c3", "c1", "c2"]
"""The ids of the results, in another order than the calls."""
NAMES = dict(CALLS)


def chat():
    calls = [{"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}} for i, name in CALLS]
    results = [{"role": "tool", "tool_call_id": i, "content": "x"} for i in ANSWERED]
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}, *results]}


def responses():
    calls = [{"type": "function_call", "call_id": i, "name": name, "arguments": "{}"} for i, name in CALLS]
    results = [{"type": "function_call_output", "call_id": i, "output": "x"} for i in ANSWERED]
    return {"input": [{"role": "user", "content": "Hi"}, *calls, *results]}


def messages():
    calls = [{"type": "tool_use", "id": i, "name": name, "input": {}} for i, name in CALLS]
    results = [{"type": "tool_result", "tool_use_id": i, "content": "x"} for i in ANSWERED]
    turns = [("user", "Hi"), ("assistant", calls), ("user", results)]
    return {"max_tokens": 1, "messages": [{"role": role, "content": content} for role, content in turns]}


def contents():
    calls = [{"functionCall": {"id": i, "name": name}} for i, name in CALLS]
    results = [{"functionResponse": {"id": i, "name": NAMES[i], "response": {"output": "x"}}} for i in ANSWERED]
    turns = [("user", [{"text": "Hi"}]), ("model", calls), ("user", results)]
    return {"contents": [{"role": role, "parts": parts} for role, parts in turns]}


@pytest.mark.parametrize(
    ("dialect", "target", "body"),
    [
        (openai_chat, "/v1/chat/completions", chat()),
        (openai_responses, "/v1/responses", responses()),
        (anthropic, "/v1/messages", messages()),
        (google, "/v1beta/models/m:generateContent", contents()),
    ],
    ids=lambda value: getattr(value, "NAME", None),
)
def test_a_result_has_the_name_of_its_tool_in_every_dialect(dialect, target, body):
    decoded = dialect.decode(json.dumps(body).encode(), target).messages
    assert decoded[-3:] == [{"role": "tool", "content": "x", "tool_call_id": i, "name": NAMES[i]} for i in ANSWERED]


def called(tool_call_id, name):
    call = {"id": tool_call_id, "type": "function", "function": {"name": name, "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(tool_call_id, **fields):
    return {"role": "tool", "content": "x", "tool_call_id": tool_call_id, **fields}


def test_an_id_that_is_used_again_names_the_last_tool_before_the_result():
    conversation = [called("c", "look"), result("c"), called("c", "go"), result("c")]
    assert [message.get("name") for message in name_results(conversation)] == [None, "look", None, "go"]


def test_the_call_decides_and_not_the_name_that_the_result_came_with():
    assert name_results([called("c", "look"), result("c", name="other")])[1]["name"] == "look"


@pytest.mark.parametrize("tool_call_id", ["c9", ""])
def test_a_result_of_an_unknown_call_has_no_name_but_its_own(tool_call_id):
    conversation = [called("c", "look"), called("", "go"), result(tool_call_id), result(tool_call_id, name="wire")]
    assert [message.get("name") for message in name_results(conversation)[2:]] == [None, "wire"]


def test_a_result_before_its_call_has_no_name():
    assert "name" not in name_results([result("c"), called("c", "look")])[0]
