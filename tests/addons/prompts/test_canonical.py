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

EXACT = ModelCall("m", [], [EDIT])
CLAUDE_CODE = ModelCall("m", [], [EDIT], echo_rule=normal_arguments)


def called(arguments, name="edit", text=""):
    return assistant_message(text, "", [message_tool_call("c1", name, arguments)])


def form(arguments, name="edit", call=EXACT):
    return canonical(called(arguments, name), call)


@pytest.mark.parametrize(
    ("issued", "echoed", "equal"),
    [
        ('{"a":  1, "b": 2}', {"b": 2, "a": 1}, True),  # key order
        ('{"a": 1.0, "b": [2e0, -0.0]}', {"a": 1, "b": [2, 0]}, True),
        (
            '{"a": 9007199254740993, "b": 12345678901234567890}',
            {"a": 2**53, "b": 12345678901234567000},
            True,
        ),
        ("[1.0]", [1], True),
        ('{"a": "x"}', {"a": "y"}, False),
        ('{"a": 1}', {"a": "1"}, False),
        ('{"a": true}', {"a": 1}, False),
        ('{"a": null}', {}, False),
        ("{'a': 1}", "{'a':1}", False),
        ("[1]", [2], False),
    ],
)
def test_arguments_that_json_clients_reformat_are_equal_and_no_others(issued, echoed, equal):
    assert (form(issued) == form(echoed)) is equal
    assert not equal or form(issued) == form(json.dumps(echoed))


@pytest.mark.parametrize(("issued", "echoed"), REWRITTEN.values(), ids=REWRITTEN)
def test_what_claude_code_rewrites_is_equal_in_its_own_requests_only(issued, echoed):
    for written in (issued, json.dumps(issued)):
        assert form(written, call=CLAUDE_CODE) == form(echoed, call=CLAUDE_CODE)
        assert form(written) != form(echoed)


def test_defaults_are_those_of_the_tool_that_is_called():
    assert form({"all": False}, call=CLAUDE_CODE) == form({}, call=CLAUDE_CODE)
    assert form({"all": False}, "other", CLAUDE_CODE) != form({}, "other", CLAUDE_CODE)


def test_ids_and_names_are_compared():
    message = called("{}")
    other = {**message["tool_calls"][0], "id": "c2"}
    assert canonical(message, EXACT) != canonical({**message, "tool_calls": [other]}, EXACT)
    assert form("{}") != form("{}", "look")


def test_an_empty_field_equals_an_absent_one_and_blank_text_no_text():
    assert canonical({"role": "tool", "content": "", "tool_call_id": ""}, EXACT) == canonical(
        {"role": "tool"}, EXACT
    )
    blank, none, some = (canonical(called("{}", text=text), EXACT) for text in (" \n", "", "."))
    assert blank == none != some


@given(anything)
@example("null")
@example('"null"')
@example("abc")
def test_any_json_has_a_form_that_parsing_does_not_change(arguments):
    for call in (EXACT, CLAUDE_CODE):
        assert form(json.dumps(arguments), call=call) == form(
            json.loads(json.dumps(arguments)), call=call
        )


def test_arguments_that_are_nested_too_deeply_are_compared_as_text():
    assert "[[[[" in form("[" * 50_000)


def test_an_opening_does_not_depend_on_the_echo_rule():
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Go"}]
    claude, other = (
        ModelCall("m", messages, [], echo_rule=rule) for rule in (normal_arguments, None)
    )
    assert first_digest(claude) != first_digest(other)
    assert (
        opening_digest(claude)
        == opening_digest(other)
        != opening_digest(ModelCall("m", messages[1:], []))
    )


LITELLM = "[System: Empty message content sanitised to satisfy protocol]"


def forms(content, **more):
    echo = {"role": "assistant", "content": content, **more}
    return [(form["content"], reasoning) for form, reasoning in issued_forms(echo)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", []),
        ("Hi.", [("Hi.\n", None)]),
        ("Hi.\n", [("Hi.", None)]),
        ("<think>\nHm.\n</think>\n\nHi.", [("Hi.", "Hm."), ("Hi.\n", "Hm.")]),
        ("<think>Hm.</think>", [("", "Hm.")]),
        ("<think>Hm.", [("<think>Hm.\n", None)]),
        (LITELLM, [(LITELLM + "\n", None)]),
    ],
)
def test_the_forms_of_an_echo(content, expected):
    assert forms(content) == expected


def test_a_text_for_no_text_counts_only_beside_tool_calls():
    assert ("", None) in forms(LITELLM, tool_calls=[{"id": "c1"}])


def test_the_reasoning_of_an_echo_is_its_field_or_its_text_in_front():
    assert echoed_reasoning({"content": "<think>a</think>Hi.", "reasoning_content": "b"}) == "b"
    assert echoed_reasoning({"content": "<think>\na\n</think>Hi."}) == "a"
    assert echoed_reasoning({"content": "Hi."}) == ""
