"""Bodies of megabytes that once cost quadratic time. A quadratic way takes minutes for each in the
deep suite."""

import pytest

from rolltap.addons.dialects.claude_code import normal_arguments
from rolltap.addons.dialects.tools import function_tool
from tests.addons.dialects.apis import GEMINI, MESSAGES, RESPONSES
from tests.deep import DEEP

MANY = 20_000 if DEEP else 2_000


def contents(*turns):
    turns = [{"role": role, "parts": parts} for role, parts in turns]
    return GEMINI.decode({"contents": turns}).messages


def names_of(tools):
    """Return the names under which tools of the Responses API are shown."""
    call = RESPONSES.decode({"input": "Hi", "tools": tools})
    return [tool["function"]["name"] for tool in call.tools]


def test_many_tools_have_their_own_names():
    names = [f"n{i}" for i in range(MANY)]
    assert names_of([{"type": "function", "name": name} for name in names]) == names


def test_many_tools_that_would_have_the_same_name_have_different_ones():
    parts = ["a"] * 80
    tools = []
    for cut in range(1, len(parts)):
        tool = {"type": "function", "name": "__".join(parts[cut:])}
        tools.append({"type": "namespace", "name": "__".join(parts[:cut]), "tools": [tool]})
    assert len({*names_of(tools)}) == len(tools)


@pytest.mark.parametrize("ids", [True, False], ids=["by id", "by name"])
def test_many_function_responses_find_their_calls(ids):
    calls = [{"name": "look"} for _ in range(MANY)]
    if ids:
        calls = [{"name": "look", "id": f"c{i}"} for i in range(MANY)]
    answers = [{"functionResponse": call} for call in calls]
    asked, *results = contents(
        ("model", [{"functionCall": call} for call in calls]), ("user", answers[::-1])
    )
    answered = [result["tool_call_id"] for result in results]
    assert sorted(answered) == sorted(call["id"] for call in asked["tool_calls"])
    assert answered[0] == (f"c{MANY - 1}" if ids else "call_1")


def test_many_pieces_of_one_turn_are_one_text():
    parts = [{"text": "a"}, {"text": "b", "thought": True}] * MANY
    hi = ("user", [{"text": "Hi"}])
    whole, _ = contents(("model", parts), hi)
    split, _ = contents(*[("model", [part]) for part in parts], hi)
    assert whole == split
    assert (len(whole["content"]), len(whole["reasoning_content"])) == (MANY, MANY)


def test_many_references_to_a_tool_define_it_once():
    tool = {"name": "later", "description": "x" * 200_000, "defer_loading": True}
    references = [{"type": "tool_reference", "tool_name": "later"}] * 10_000
    message = {"role": "user", "content": references}
    (decoded,) = MESSAGES.decode({"max_tokens": 1, "messages": [message], "tools": [tool]}).messages
    assert decoded["content"].count("x" * 200_000) == 1


@pytest.mark.parametrize(
    ("command", "normal"),
    [
        ("cd a " * 600_000, "cd a " * 600_000),
        ("\\" * 3_000_000, "\\" * 3_000_000),
        ("\\" * 3_000_000 + ";", "\\;"),
        ("cd a && " * 300_000 + "ls", "ls"),
        ("cd " + "a" * 3_000_000 + " && ls", "ls"),
    ],
    ids=[
        "folders without an end",
        "backslashes",
        "backslashes before a semicolon",
        "many folders",
        "a long folder",
    ],
)
def test_a_long_command_has_its_normal_form(command, normal):
    assert normal_arguments({"command": command}, None) == {"command": normal.rstrip()}


def test_a_tool_of_many_defaults_costs_a_call_the_arguments_that_it_has():
    properties = {f"p{i}": {"default": "x" * 100} for i in range(MANY)}
    tool = function_tool("look", "", {"properties": properties})
    for i in range(MANY):
        assert normal_arguments({f"p{i}": "x" * 100, "q": "y"}, tool) == {"q": "y"}
