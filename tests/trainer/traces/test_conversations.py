import json
from itertools import permutations

import pytest

from rolltap.trainer.traces.conversations import for_template, on_the_wire, rebuild_conversations
from tests.factories import make_call, says

HELLO = {"role": "user", "content": "Hello"}
MORE = {"role": "user", "content": "More"}
BASH = {"type": "function", "function": {"name": "bash"}}


def said(text):
    return {"role": "assistant", "content": text}


def asked(number, *messages, parent=None, reply="hi", tools=None):
    return make_call(
        number,
        parent_id=parent,
        messages=json.dumps(messages),
        tools=tools,
        reply=reply and says(reply),
    )


CHAIN = [
    asked(0, HELLO, reply="one", tools=json.dumps([BASH])),
    asked(1, MORE, parent="0", reply="two"),
    asked(2, HELLO, MORE, parent="1", reply="three"),
]


def test_a_call_has_the_messages_and_replies_before_it_whatever_the_order_and_other_branches():
    for calls in permutations([*CHAIN, asked(3, HELLO, parent="0")]):
        turns = rebuild_conversations(calls)
        assert [turn.call for turn in turns] == list(calls)
        assert [turn.tools for turn in turns] == [[BASH]] * 4  # the root's: the others have none
        by_id = {turn.call.call_id: turn for turn in turns}
        assert by_id["0"].messages() == [HELLO]
        whole = [HELLO, said("one"), MORE, said("two"), HELLO, MORE]
        assert by_id["2"].messages() == whole
        assert by_id["2"].reply == said("three")
        assert by_id["3"].messages() == [HELLO, said("one"), HELLO]


UNANSWERED = [asked(0, HELLO, reply=None), asked(1, MORE, parent="0")]
CYCLE = [asked(0, HELLO, parent="1"), asked(1, HELLO, parent="0"), asked(2, MORE, parent="1")]


@pytest.mark.parametrize(
    ("calls", "known", "incomplete"),
    [
        (CHAIN[1:], [MORE, said("two"), HELLO, MORE], ["its parent 0 is not in the run"] * 2),
        (UNANSWERED, [HELLO, MORE], [None, "its parent 0 has no reply"]),
        (CYCLE, [MORE], ["its ancestors form a cycle"] * 3),
        ([asked(0, reply=None)], [], ["its messages were not recorded"]),
    ],
)
def test_a_conversation_without_its_beginning_says_why_and_has_what_is_known(
    calls, known, incomplete
):
    turns = rebuild_conversations(calls)
    assert [turn.incomplete for turn in turns] == incomplete
    assert turns[-1].messages() == known
    assert turns[-1].tools is None


def test_thousands_of_turns_are_rebuilt():
    calls = [asked(0, HELLO, reply="0")]
    for number in range(1, 5000):
        calls.append(asked(number, MORE, parent=str(number - 1), reply=str(number)))
    last = rebuild_conversations(calls)[-1]
    assert len(last.messages()) == 9999
    assert last.messages()[-2:] == [said("4998"), MORE]


def calling(arguments):
    function = {"name": "bash", "arguments": arguments}
    tool_call = {"id": "1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "call_id": "c", "tool_calls": [tool_call]}


@pytest.mark.parametrize(
    ("recorded", "parsed", "text"),
    [
        ('{"a": 1}', {"a": 1}, '{"a": 1}'),
        ({"a": 1}, {"a": 1}, '{"a": 1}'),
        ('{"a"', '{"a"', '{"a"'),
    ],
)
def test_templates_get_parsed_arguments_without_our_own_key_and_the_wire_text(
    recorded, parsed, text
):
    message = calling(recorded)
    found = for_template(message)
    assert found["tool_calls"] == calling(parsed)["tool_calls"]
    assert "call_id" not in found
    assert on_the_wire(message)["tool_calls"] == calling(text)["tool_calls"]
    assert message == calling(recorded)
