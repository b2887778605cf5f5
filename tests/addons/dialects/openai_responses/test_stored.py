"""Ids in a request stand for items, as if it had them in full."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import DialectError, Reply, ReplyContext, ToolCall, Usage
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.openai_responses.stored import NeedsStoredState
from tests.addons.dialects import hostile
from tests.addons.dialects.server import TALK, by_id, stored_call
from tests.addons.dialects.test_sdks import REPLIES, TOOLS
from tests.addons.harness import user
from tests.deep import examples

USER = user()
MORE = user("More")
SYSTEM = {"role": "system", "content": "Be brief."}
CALLS = [ToolCall("t1", "look", '{"at": 1}'), ToolCall("t2", "look", "{}")]
LOOK = Reply("", "I look.", CALLS, "tool_calls")
OUTPUT = {"type": "function_call_output", "call_id": "t1", "output": "ok"}
RESULT = {"role": "tool", "content": "ok", "tool_call_id": "t1", "name": "look"}
LOOKED = stored_call("c1", [SYSTEM, USER], LOOK, instructions=True)
STORED = by_id(LOOKED, stored_call("c2", [RESULT], TALK, parent=LOOKED, instructions=True))


def decode_body(**fields):
    body = json.dumps({"model": "gpt-x", **fields}).encode()
    return routes.RESPONSES.decode(parse_object(body), "/v1/responses")


def decode(*items, stored=STORED, **fields):
    with pytest.raises(NeedsStoredState) as named:
        decode_body(**{"input": list(items), **fields})
    return named.value.complete(stored.get)


def reference(item_id):
    return {"type": "item_reference", "id": item_id}


@pytest.mark.parametrize("name", REPLIES)
def test_references_to_all_items_of_a_reply_are_the_reply_sent_back(name):
    reply = REPLIES[name]
    context = ReplyContext("c9", 5, "", decode_body(input=[USER], tools=TOOLS))
    issued = json.loads(routes.RESPONSES.encode_reply(context, reply, Usage(7, 3)))["output"]
    echoed = decode_body(input=[USER, *issued], tools=TOOLS)
    references = [reference(item["id"]) for item in issued]
    stored = by_id(stored_call("c9", [USER], reply))
    assert decode(USER, *references, stored=stored, tools=TOOLS).messages == echoed.messages


def test_references_and_items_next_to_each_other_are_one_message():
    items = [reference("rs_c1_0"), reference("fc_c1_1"), {"type": None, "id": "fc_c1_2"}]
    [_, message, tool] = decode(USER, *items, OUTPUT).messages
    assert [call["id"] for call in message["tool_calls"]] == ["t1", "t2"]
    assert (message["reasoning_content"], message["call_id"]) == ("I look.", "c1")
    assert tool == RESULT


def test_a_previous_response_is_its_conversation_without_the_instructions():
    call = decode(MORE, previous_response_id="resp_c2", instructions="Be kind.")
    roles = [message["role"] for message in call.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert [call.messages[0]["content"], call.messages[-2]["content"]] == ["Be kind.", "Hi."]
    assert call.messages[2]["tool_calls"][0]["function"]["arguments"] == {"at": 1}
    call_ids = [message.get("call_id") for message in call.messages]
    assert call_ids == [None, None, "c1", None, "c2", None]


def test_a_result_of_a_call_in_a_previous_response_has_the_name_of_its_tool():
    assert decode(OUTPUT, previous_response_id="resp_c1").messages[-1] == RESULT


def test_a_system_message_among_the_items_of_a_previous_response_stays():
    stored = by_id(stored_call("c1", [SYSTEM, USER], TALK))
    assert decode(MORE, stored=stored, previous_response_id="resp_c1").messages[0] == SYSTEM


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"previous_response_id": "resp_c3"}, 400, "response with id 'resp_c3' not found."),
        ({"previous_response_id": "c1"}, 400, "Previous response with id 'c1' not found."),
        ({"previous_response_id": "resp_lost"}, 400, "response with id 'resp_lost' not found."),
        ({"previous_response_id": "my secret"}, 400, "a text of 9 characters not found"),
        ({"previous_response_id": 5}, 400, "'previous_response_id' must be a string"),
        ({"previous_response_id": "resp_c1", "prompt": True}, 400, "'prompt' is not supported"),
        ({"previous_response_id": "resp_c1", "background": True}, 400, "'background' is not"),
        ({"input": [reference("msg_c1_1")]}, 404, "Item with id 'msg_c1_1' not found."),
        ({"input": [reference("fc_c1_9")]}, 404, "Item with id 'fc_c1_9' not found."),
        ({"input": [USER, reference(None)]}, 400, "'input[1].id' must be a string"),
        ({"input": [reference("rs_c1_0")] * 2}, 400, "Duplicate item found with id 'rs_c1_0'."),
    ],
)
def test_an_id_that_stands_for_nothing_is_refused_in_the_words_of_the_api(fields, status, said):
    with pytest.raises(DialectError) as refusal:
        decode(USER, **fields)
    assert refusal.value.status == status
    assert said in str(refusal.value)


IDS = st.sampled_from(["rs_c1_0", "fc_c1_1", "msg_c2_1", "resp_c1", "resp_lost"])
MUTABLE = {
    "model": "gpt-x",
    "instructions": "Go.",
    "input": [USER, reference("rs_c1_0"), reference("fc_c1_1"), reference("fc_c1_2"), MORE],
    "previous_response_id": "resp_c2",
}
bodies = hostile.bodies(
    [MUTABLE], hostile.values(["item_reference", "rs_c1_0"], ["id", "type"]) | IDS
)


@given(bodies)
@examples(500)
def test_any_body_is_a_model_call_or_a_refusal(body):
    try:
        routes.RESPONSES.decode(parse_object(body), "/v1/responses")
    except NeedsStoredState as named:
        try:
            call = named.complete(STORED.get)
        except DialectError as refusal:
            json.loads(routes.RESPONSES.encode_error(refusal))
        else:
            json.dumps(asdict(call), ensure_ascii=False).encode()
            assert call.messages
    except DialectError:
        pass
