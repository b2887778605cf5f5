import pytest

from rolltap.addons.dialects.call import Part, assistant_message, message_tool_call
from rolltap.addons.dialects.dialect import name_parts, name_results
from tests.addons.dialects.apis import CHAT


def called(tool_call_id, name):
    return assistant_message("", "", [message_tool_call(tool_call_id, name, {})])


def result(tool_call_id, **fields):
    return {"role": "tool", "content": "x", "tool_call_id": tool_call_id, **fields}


def names(messages):
    return [message.get("name") for message in messages]


def test_the_last_call_of_an_id_before_the_result_names_it_and_not_the_program():
    conversation = [
        result("c"),
        called("c", "look"),
        result("c"),
        called("c", "go"),
        result("c", name="other"),
    ]
    assert names(name_results(conversation)) == [None, None, "look", None, "go"]


@pytest.mark.parametrize("tool_call_id", ["c9", ""])
def test_a_result_of_an_unknown_call_has_no_name_but_its_own(tool_call_id):
    results = [result(tool_call_id), result(tool_call_id, name="wire")]
    named = name_results([called("c", "look"), called("", "go"), *results])
    assert names(named[2:]) == [None, "wire"]


def test_a_known_part_keeps_its_messages_in_a_request_with_other_calls_before_it():
    known = Part([result("c")])
    looks = name_parts([Part([called("c", "look")]), known])
    goes = name_parts([Part([called("c", "go")]), known])
    for parts, name in ((looks, "look"), (goes, "go"), ([known], None)):
        assert names(parts[-1].messages) == [name]
    for part, again in zip(looks, name_parts(looks), strict=True):
        assert part is again


def test_a_sampled_name_of_any_length_is_read_but_not_repeated_in_each_result():
    name = "x" * 100_000
    results = [{"role": "tool", "tool_call_id": "c", "content": ""}] * 1000
    decoded = CHAT.decode({"messages": [called("c", name), *results]})
    assert decoded.messages[0]["tool_calls"][0]["function"]["name"] == name
    assert {*names(decoded.messages[1:])} == {None}
