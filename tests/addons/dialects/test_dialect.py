import pytest

from rolltap.addons.dialects.call import Part, assistant_message, message_tool_call
from rolltap.addons.dialects.dialect import name_parts, name_results
from tests.addons.dialects.apis import CHAT


def called(tool_call_id, name):
    return assistant_message("", "", [message_tool_call(tool_call_id, name, {})])


def result(tool_call_id, **fields):
    return {"role": "tool", "content": "x", "tool_call_id": tool_call_id, **fields}


def test_the_last_call_of_an_id_before_the_result_decides_and_not_the_name_that_the_result_came_with():
    conversation = [
        result("c"),
        called("c", "look"),
        result("c"),
        called("c", "go"),
        result("c", name="other"),
    ]
    assert [message.get("name") for message in name_results(conversation)] == [
        None,
        None,
        "look",
        None,
        "go",
    ]


@pytest.mark.parametrize("tool_call_id", ["c9", ""])
def test_a_result_of_an_unknown_call_has_no_name_but_its_own(tool_call_id):
    conversation = [
        called("c", "look"),
        called("", "go"),
        result(tool_call_id),
        result(tool_call_id, name="wire"),
    ]
    assert [message.get("name") for message in name_results(conversation)[2:]] == [None, "wire"]


def test_a_known_part_keeps_its_messages_in_a_request_with_other_calls_before_it():
    known = Part([result("c")])
    looks, goes = (name_parts([Part([called("c", name)]), known]) for name in ("look", "go"))
    assert [parts[-1].messages[0].get("name") for parts in (looks, goes, [known])] == [
        "look",
        "go",
        None,
    ]
    assert all(part is again for part, again in zip(looks, name_parts(looks), strict=True))


def test_a_sampled_name_of_any_length_is_read_but_not_repeated_in_each_result():
    name = "x" * 100_000
    results = [{"role": "tool", "tool_call_id": "c", "content": ""}] * 1000
    decoded = CHAT.decode({"messages": [called("c", name), *results]})
    assert decoded.messages[0]["tool_calls"][0]["function"]["name"] == name
    assert all("name" not in message for message in decoded.messages[1:])
