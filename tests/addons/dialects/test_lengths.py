"""Names, ids and schemas have a maximum length in every dialect."""

import json

import pytest

from rolltap.addons.dialects import anthropic, google, openai_chat, openai_responses
from rolltap.addons.dialects.model_call import DialectError
from tests.addons.dialects.test_decoded import chat, contents, messages, responses

GOOGLE = "/v1beta/models/m:generateContent"
LONG = "x" * 2000
TOOL = {"name": LONG, "parameters": {}}
SCHEMA = {"type": "object", "description": "d" * (256 * 1024)}


def decode(dialect, target, body):
    return dialect.decode(json.dumps(body).encode(), target)


def with_ids(body):
    return json.loads(json.dumps(body).replace('"c1"', json.dumps(LONG)))


@pytest.mark.parametrize(
    ("dialect", "target", "body", "place"),
    [
        (openai_chat, "/", {**chat(), "model": LONG}, "'model'"),
        (openai_responses, "/", {**responses(), "model": LONG}, "'model'"),
        (anthropic, "/", {**messages(), "model": LONG}, "model: "),
        (google, f"/v1beta/models/{LONG}:generateContent", contents(), "'model'"),
        (openai_chat, "/", {**chat(), "tools": [{"type": "function", "function": TOOL}]}, "tools"),
        (openai_chat, "/", {**chat(), "tools": [{"type": "custom", "custom": TOOL}]}, "tools"),
        (openai_responses, "/", {**responses(), "tools": [{"type": "function", **TOOL}]}, "tools"),
        (openai_responses, "/", {**responses(), "tools": [{"type": "namespace", **TOOL}]}, "tools"),
        (anthropic, "/", {**messages(), "tools": [TOOL]}, "tools"),
        (google, GOOGLE, {**contents(), "tools": [{"functionDeclarations": [TOOL]}]}, "tools"),
        (openai_chat, "/", with_ids(chat()), "id'"),
        (openai_responses, "/", with_ids(responses()), "call_id'"),
        (anthropic, "/", with_ids(messages()), "id: "),
        (google, GOOGLE, with_ids(contents()), "id'"),
    ],
)
def test_a_name_or_an_id_that_is_too_long_is_refused_with_its_place(dialect, target, body, place):
    with pytest.raises(DialectError, match=r"a string of at most (256|1,024) characters") as refused:
        decode(dialect, target, body)
    assert place in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("dialect", "target", "body"),
    [
        (openai_chat, "/", {**chat(), "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        (openai_responses, "/", {**responses(), "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (anthropic, "/", {**messages(), "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (
            google,
            GOOGLE,
            {**contents(), "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}},
        ),
    ],
)
def test_a_schema_that_is_too_long_is_refused(dialect, target, body):
    with pytest.raises(DialectError, match="schema of the reply is longer than 262,144 characters"):
        decode(dialect, target, body)


def test_a_sampled_name_of_any_length_is_read_but_not_repeated_in_each_result():
    name = "x" * 100_000
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
    results = [{"role": "tool", "tool_call_id": "c", "content": ""}] * 1000
    decoded = decode(openai_chat, "/", {"messages": [{"role": "assistant", "tool_calls": [call]}, *results]})
    assert decoded.messages[0]["tool_calls"][0]["function"]["name"] == name
    assert all("name" not in message for message in decoded.messages[1:])


def test_many_hosted_tools_are_recorded_as_their_number():
    tools = [{"type": "web_search"}] * 1000
    hosted = decode(openai_responses, "/", {**responses(), "tools": tools}).hosted_tools
    assert (len(hosted), hosted[-1]) == (65, "(936 more)")


def test_a_signature_that_is_long_was_not_issued_here():
    block = {"type": "thinking", "thinking": "t", "signature": "cm9sbHRhcDo" + "A" * 1_000_001}
    turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": "Hi"}]
    assert "call_id" not in decode(anthropic, "/", {"max_tokens": 1, "messages": turns}).messages[0]
