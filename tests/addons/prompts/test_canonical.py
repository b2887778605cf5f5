import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.prompts.canonical import canonical, tool_defaults

EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {"all": {"type": "boolean", "default": False}, "at": {"default": 5}, "text": {}},
        },
    },
}


def called(arguments, name="edit", text=""):
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def form(arguments, name="edit"):
    return canonical(called(arguments, name), tool_defaults([EDIT]))


@pytest.mark.parametrize(
    ("issued", "echoed"),
    [
        ('{"a":  1, "b": 2}', {"b": 2, "a": 1}),
        ('{"a": 1.0, "b": [2e0, -0.0]}', {"a": 1, "b": [2, 0]}),
        ('{"a": 9007199254740993, "b": 12345678901234567890}', {"a": 9007199254740992, "b": 12345678901234567000}),
        ("[1.0]", [1]),
        ('{"text": "b"}', {"text": "b", "all": False, "at": 5}),
        ('{"text": "b", "all": false, "at": 5.0}', {"text": "b"}),
        ('{"offset": "1", "limit": "-2.50"}', {"offset": 1, "limit": -2.5}),
        ('{"background": "false", "all": "true"}', {"background": False, "all": True}),
        ('{"text": "a \\t\\n\\n b\\r\\nc\\u00a0"}', {"text": "a\n\n b\nc"}),
        ('{"command": "cd /a b/c && ls && cd d && ls"}', {"command": "ls && cd d && ls"}),
        ('{"command": "find . -exec ls {} \\\\\\\\;"}', {"command": "find . -exec ls {} \\;"}),
    ],
    ids=[
        "key order",
        "numbers",
        "digits that JavaScript drops",
        "a list",
        "defaults added",
        "defaults left out",
        "quoted numbers",
        "quoted booleans",
        "blanks at line ends",
        "the folder that it is in",
        "backslashes before a semicolon",
    ],
)
def test_arguments_that_a_harness_rewrites_are_equal(issued, echoed):
    assert form(issued) == form(echoed) == form(json.dumps(echoed))


@pytest.mark.parametrize(
    ("issued", "echoed"),
    [
        ('{"a": "x"}', {"a": "y"}),
        ('{"a": 1}', {"b": 1}),
        ('{"a": 1}', {}),
        ('{"a": true}', {"a": 1}),
        ('{"a": null}', {"a": "null"}),
        ('{"text": "b"}', {"text": "b", "all": True}),
        ('{"text": "b"}', {"text": "b", "other": False}),
        ('{"text": "a\\n"}', {"text": "a"}),
        ('{"text": " a"}', {"text": "a"}),
        ('{"text": "cd a && ls"}', {"text": "ls"}),
        ('{"command": "cd a; ls"}', {"command": "ls"}),
        ("{'a': 1}", "{'a':1}"),
        ("[1]", [2]),
    ],
)
def test_other_arguments_are_not(issued, echoed):
    assert form(issued) != form(echoed)


def test_defaults_are_those_of_the_tool_that_is_called():
    assert form({"all": False}) == form({})
    assert form({"all": False}, "other") != form({}, "other")


def test_an_id_and_a_name_count():
    message = called("{}")
    other = {**message["tool_calls"][0], "id": "c2"}
    assert canonical(message, {}) != canonical({**message, "tool_calls": [other]}, {})
    assert form("{}") != form("{}", "look")


def test_what_is_empty_is_as_good_as_absent():
    assert canonical({"role": "tool", "content": "", "tool_call_id": ""}, {}) == canonical({"role": "tool"}, {})


def test_blank_text_before_a_call_is_no_text():
    assert (
        canonical(called("{}", text=" \n"), {}) == canonical(called("{}"), {}) != canonical(called("{}", text="."), {})
    )


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(anything)
def test_any_json_has_a_form_that_parsing_does_not_change(arguments):
    assert form(json.dumps(arguments)) == form(json.loads(json.dumps(arguments)))


@given(anything, anything)
def test_schemas_of_any_kind_are_read(properties, parameters):
    for schema in ({"properties": properties}, {"properties": {"a": properties}}, parameters):
        tool = {"type": "function", "function": {"name": "edit", "parameters": schema}}
        canonical(called({"a": 1}), tool_defaults([tool]))


def test_arguments_that_are_nested_too_deeply_are_compared_as_text():
    assert "[[[[" in form("[" * 50_000)
