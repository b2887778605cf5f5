import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects.claude_code import is_claude_code, normal_arguments
from rolltap.addons.dialects.tools import function_tool

PROPERTIES = {"all": {"type": "boolean", "default": False}, "at": {"default": 5}, "text": {}}
EDIT = function_tool("edit", "", {"type": "object", "properties": PROPERTIES})
REWRITTEN = {
    "defaults added": ({"text": "b"}, {"text": "b", "all": False, "at": 5}),
    "defaults left out": ({"text": "b", "all": False, "at": 5.0}, {"text": "b"}),
    "quoted numbers": ({"offset": "1", "limit": "-2.50"}, {"offset": 1, "limit": -2.5}),
    "quoted booleans": ({"background": "false", "all": "true"}, {"background": False, "all": True}),
    "blanks at line ends": ({"text": "a \t\n\n b\r\nc\u00a0"}, {"text": "a\n\n b\nc"}),
    "the folder that it is in": (
        {"command": "cd /a b/c && ls && cd d && ls"},
        {"command": "ls && cd d && ls"},
    ),
    "backslashes before a semicolon": (
        {"command": r"find . -exec ls {} \\;"},
        {"command": r"find . -exec ls {} \;"},
    ),
}
"""Arguments as sampled, and as Claude Code sent them back: tests of the canonical form compare
them."""


DIFFERENT = """
{"a": "x"}              {"a": "y"}
{"a": 1}                {"b": 1}
{"a": 1}                {}
{"a": true}             {"a": 1}
{"a": null}             {"a": "null"}
{"text": "b"}           {"text": "b", "all": true}
{"text": "b"}           {"text": "b", "all": 0}
{"text": "b"}           {"text": "b", "other": false}
{"text": "a\\n"}         {"text": "a"}
{"text": " a"}          {"text": "a"}
{"text": "cd a && ls"}  {"text": "ls"}
{"command": "cd a; ls"}  {"command": "ls"}
"""


@pytest.mark.parametrize("row", DIFFERENT.strip().splitlines())
def test_different_arguments_are_not_equal(row):
    issued, echoed = map(json.loads, row.split("  ", 1))
    assert normal_arguments(issued, EDIT) != normal_arguments(echoed, EDIT)


def containers(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), containers
)


@given(anything, anything)
def test_schemas_of_any_kind_are_read(properties, parameters):
    for schema in ({"properties": properties}, {"properties": {"a": properties}}, parameters):
        tool = function_tool("edit", "", schema)
        assert normal_arguments({"b": 1}, tool) in ({"b": "1"}, {})


@pytest.mark.parametrize(
    ("user_id", "known"),
    [
        (json.dumps({"device_id": "d", "account_uuid": "", "session_id": "s"}), True),
        (json.dumps({"session_id": "s"}), False),
        (json.dumps(["device_id", "session_id"]), False),
        ("user-17", False),
        (None, False),
    ],
)
def test_claude_code_is_identified_by_its_user_id(user_id, known):
    assert is_claude_code(user_id) is known
