import json
from itertools import permutations

import pytest

from rolltap.trainer.traces.conversations import for_template, on_the_wire, rebuild_conversations
from tests.factories import make_call, says

HELLO, MORE = {"role": "user", "content": "Hello"}, {"role": "user", "content": "More"}
BASH = {"type": "function", "function": {"name": "bash"}}


def said(text):
    return {"role": "assistant", "content": text}


def asked(number, *messages, parent=None, reply="hi", tools=None):
    return make_call(
        number,
        parent_id=parent,
        messages=json.dumps(messages),
        tools=None if tools is None else json.dumps(tools),
        reply=None if reply is None else says(reply),
    )


def chain():
    return [
        asked(0, HELLO, reply="one", tools=[BASH]),
        asked(1, MORE, parent="0", reply="two"),
        asked(2, HELLO, MORE, parent="1", reply="three"),
    ]


class TestRebuildTurns:
    def test_a_call_has_the_messages_and_replies_before_it(self):
        turns = rebuild_conversations(chain())
        assert turns[0].messages() == [HELLO]
        assert turns[2].messages() == [HELLO, said("one"), MORE, said("two"), HELLO, MORE]
        assert turns[2].reply == said("three")
        assert [turn.tools for turn in turns] == [
            [BASH]
        ] * 3  # the parent's, where the row has none

    def test_neither_the_order_of_the_calls_nor_another_branch_matters(self):
        expected = [HELLO, said("one"), MORE, said("two"), HELLO, MORE]
        for calls in permutations([*chain(), asked(3, HELLO, parent="0")]):
            turns = rebuild_conversations(calls)
            assert [turn.call for turn in turns] == list(calls)
            messages = {turn.call.call_id: turn.messages() for turn in turns}
            assert (messages["2"], messages["3"]) == (expected, [HELLO, said("one"), HELLO])

    UNANSWERED = (asked(0, HELLO, reply=None), asked(1, MORE, parent="0"))
    CYCLE = (asked(0, HELLO, parent="1"), asked(1, HELLO, parent="0"), asked(2, MORE, parent="1"))

    @pytest.mark.parametrize(
        ("calls", "known", "incomplete"),
        [
            (chain()[1:], [MORE, said("two"), HELLO, MORE], ["its parent 0 is not in the run"] * 2),
            (UNANSWERED, [HELLO, MORE], [None, "its parent 0 has no reply"]),
            (CYCLE, [MORE], ["its ancestors form a cycle"] * 3),
            ([asked(0, reply=None)], [], ["its messages were not recorded"]),
        ],
    )
    def test_a_conversation_without_its_beginning_says_why_and_has_what_is_known(
        self, calls, known, incomplete
    ):
        turns = rebuild_conversations(calls)
        assert [turn.incomplete for turn in turns] == incomplete
        assert (turns[-1].messages(), turns[-1].tools) == (known, None)

    def test_thousands_of_turns_are_rebuilt(self):
        calls = [asked(0, HELLO, reply="0")]
        calls += [asked(n, MORE, parent=str(n - 1), reply=str(n)) for n in range(1, 5000)]
        last = rebuild_conversations(calls)[-1]
        assert len(last.messages()) == 9999
        assert last.messages()[-2:] == [said("4998"), MORE]


class TestForms:
    @staticmethod
    def message(arguments):
        function = {"name": "bash", "arguments": arguments}
        tool_call = {"id": "1", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "call_id": "c", "tool_calls": [tool_call]}

    @pytest.mark.parametrize(
        ("change", "recorded", "arguments"),
        [
            (for_template, '{"a": 1}', {"a": 1}),
            (for_template, {"a": 1}, {"a": 1}),
            (for_template, '{"a"', '{"a"'),
            (on_the_wire, '{"a": 1}', '{"a": 1}'),
            (on_the_wire, {"a": 1}, '{"a": 1}'),
            (on_the_wire, '{"a"', '{"a"'),
        ],
    )
    def test_templates_get_parsed_arguments_and_the_wire_text(self, change, recorded, arguments):
        assert change(self.message(recorded))["tool_calls"][0]["function"]["arguments"] == arguments

    def test_our_own_key_is_left_out_and_the_message_unchanged(self):
        message = self.message("{}")
        assert "call_id" not in for_template(message)
        assert message == self.message("{}")
