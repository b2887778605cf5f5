"""Bodies of megabytes that once cost quadratic time. A quadratic way takes minutes for each in the deep suite."""

import json

import pytest

from rolltap.addons.dialects import anthropic, google, openai_responses
from rolltap.addons.dialects.anthropic.claude_code import normal_arguments
from tests.deep import DEEP

MANY = 20_000 if DEEP else 2_000
USER = {"role": "user", "content": "Hi"}


def decode(dialect, target, body):
    return dialect.decode(json.dumps(body).encode(), target)


def responses(tools):
    return decode(openai_responses, "/v1/responses", {"input": "Hi", "tools": tools})


def contents(*turns):
    body = {"contents": [{"role": role, "parts": parts} for role, parts in turns]}
    return decode(google, "/v1beta/models/m:generateContent", body).messages


def test_many_tools_have_their_own_names():
    names = [f"n{i}" for i in range(MANY)]
    call = responses([{"type": "function", "name": name} for name in names])
    assert [tool["function"]["name"] for tool in call.tools] == names


def test_many_tools_that_would_have_the_same_name_have_different_ones():
    parts = ["a"] * 80
    tools = [
        {
            "type": "namespace",
            "name": "__".join(parts[:i]),
            "tools": [{"type": "function", "name": "__".join(parts[i:])}],
        }
        for i in range(1, len(parts))
    ]
    assert len({tool["function"]["name"] for tool in responses(tools).tools}) == len(tools)


@pytest.mark.parametrize("ids", [True, False], ids=["by id", "by name"])
def test_many_function_responses_find_their_calls(ids):
    numbers = range(MANY)
    calls = [{"functionCall": {"name": "look"} | ({"id": f"c{i}"} if ids else {})} for i in numbers]
    answers = [
        {"functionResponse": {"name": "look"} | ({"id": f"c{i}"} if ids else {})}
        for i in (reversed(numbers) if ids else numbers)
    ]
    asked, *results = contents(("model", calls), ("user", answers))
    answered = [result["tool_call_id"] for result in results]
    assert sorted(answered) == sorted(call["id"] for call in asked["tool_calls"])
    assert answered[0] == (f"c{MANY - 1}" if ids else "call_1")


def test_many_pieces_of_one_turn_are_one_text():
    parts = [{"text": "a"}, {"text": "b", "thought": True}] * MANY
    (whole, _), (split, _) = (
        contents(("model", parts), ("user", [{"text": "Hi"}])),
        contents(*(("model", [part]) for part in parts), ("user", [{"text": "Hi"}])),
    )
    assert whole == split
    assert (len(whole["content"]), len(whole["reasoning_content"])) == (MANY, MANY)


def test_many_references_to_a_tool_define_it_once():
    tool = {"name": "later", "description": "x" * 200_000, "defer_loading": True}
    references = [{"type": "tool_reference", "tool_name": "later"}] * 10_000
    message = {"role": "user", "content": references}
    (decoded,) = decode(anthropic, "/v1/messages", {"max_tokens": 1, "messages": [message], "tools": [tool]}).messages
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
    ids=["folders without an end", "backslashes", "backslashes before a semicolon", "many folders", "a long folder"],
)
def test_a_long_command_has_its_normal_form(command, normal):
    assert normal_arguments({"command": command}, None) == {"command": normal.rstrip()}


def test_a_tool_of_many_defaults_costs_a_call_the_arguments_that_it_has():
    properties = {f"p{i}": {"default": "x" * 100} for i in range(MANY)}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": properties}}}
    for i in range(MANY):
        assert normal_arguments({f"p{i}": "x" * 100, "q": "y"}, tool) == {"q": "y"}
