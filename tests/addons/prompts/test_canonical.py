import json

import pytest
from hypothesis import example, given

from rolltap.addons.dialects.call import ModelCall, assistant_message, message_tool_call
from rolltap.addons.dialects.claude_code import normal_arguments
from rolltap.addons.prompts.canonical import (
    canonical,
    echoed_reasoning,
    first_digest,
    issued_forms,
    opening_digest,
)
from tests.addons.dialects.test_claude_code import EDIT, REWRITTEN, anything
from tests.addons.harness import user
from tests.addons.prompts.talks import LITELLM, said

EXACT = ModelCall("m", [], [EDIT])
CLAUDE_CODE = ModelCall("m", [], [EDIT], echo_rule=normal_arguments)


def form(arguments, name="edit", call=EXACT, text=""):
    message = assistant_message(text, "", [message_tool_call("c1", name, arguments)])
    return canonical(message, call)


EQUAL = """
{"a":   1, "b": 2} -> {"b": 2, "a": 1}
{"a": 1.0, "b": [2e0, -0.0]} -> {"a": 1, "b": [2, 0]}
{"a": 9007199254740993} -> {"a": 9007199254740992}
{"a": 12345678901234567890} -> {"a": 12345678901234567000}
[1.0] -> [1]
"""
DIFFERENT = """
{"a": "x"} -> {"a": "y"}
{"a": 1} -> {"a": "1"}
{"a": true} -> {"a": 1}
{"a": null} -> {}
{'a': 1} -> "{'a':1}"
[1] -> [2]
"""
"""Arguments as they were sampled, and their echo."""


@pytest.mark.parametrize("row", EQUAL.strip().splitlines())
def test_arguments_that_json_clients_reformat_are_equal(row):
    issued, echoed = row.split(" -> ")
    assert form(issued) == form(json.loads(echoed)) == form(echoed)


@pytest.mark.parametrize("row", DIFFERENT.strip().splitlines())
def test_other_arguments_are_not(row):
    issued, echoed = row.split(" -> ")
    assert form(issued) != form(json.loads(echoed))


@pytest.mark.parametrize(("issued", "echoed"), REWRITTEN.values(), ids=REWRITTEN)
def test_what_claude_code_rewrites_is_equal_in_its_own_requests_only(issued, echoed):
    for written in (issued, json.dumps(issued)):
        assert form(written, call=CLAUDE_CODE) == form(echoed, call=CLAUDE_CODE)
        assert form(written) != form(echoed)


def test_defaults_are_those_of_the_tool_that_is_called():
    assert form({"all": False}, call=CLAUDE_CODE) == form({}, call=CLAUDE_CODE)
    assert form({"all": False}, "other", CLAUDE_CODE) != form({}, "other", CLAUDE_CODE)


def test_names_of_tools_are_compared():
    assert form("{}") != form("{}", "look")


def test_an_empty_field_equals_an_absent_one_and_blank_text_no_text():
    empty = {"role": "tool", "content": "", "tool_call_id": ""}
    assert canonical(empty, EXACT) == canonical({"role": "tool"}, EXACT)
    assert form("{}", text=" \n") == form("{}", text="") != form("{}", text=".")


@given(anything)
@example("null")
@example('"null"')
@example("abc")
def test_any_json_has_a_form_that_parsing_does_not_change(arguments):
    text = json.dumps(arguments)
    for call in (EXACT, CLAUDE_CODE):
        assert form(text, call=call) == form(json.loads(text), call=call)


def test_arguments_that_are_nested_too_deeply_are_compared_as_text():
    assert "[[[[" in form("[" * 50_000)


def test_an_opening_does_not_depend_on_the_echo_rule():
    messages = [{"role": "system", "content": "You help."}, user("Go")]
    claude = ModelCall("m", messages, [], echo_rule=normal_arguments)
    other = ModelCall("m", messages, [])
    assert first_digest(claude) != first_digest(other)
    assert opening_digest(claude) == opening_digest(other)
    assert opening_digest(other) != opening_digest(ModelCall("m", messages[1:], []))


def test_a_text_for_no_text_counts_only_beside_tool_calls():
    called = {**said(LITELLM), "tool_calls": [{"id": "c1"}]}
    for echo, counts in ((called, True), (said(LITELLM), False)):
        texts = [form["content"] for form, _ in issued_forms(echo)]
        assert ("" in texts) == counts


def test_the_reasoning_of_an_echo_is_its_field_before_its_text_in_front():
    echo = said("<think>\na\n</think>Hi.")
    assert echoed_reasoning(echo) == "a"
    assert echoed_reasoning({**echo, "reasoning_content": "b"}) == "b"
