import json
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import json_values
from rolltap.addons.dialects.call import DialectError
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.json_values import (
    check_values,
    described,
    parse_arguments,
    parse_json,
    recordable,
    recordable_tools,
    well_formed,
)
from tests.addons.dialects.apis import RESPONSES
from tests.deep import examples

SIZE = 32 << 20
BOMBS = {
    unit: b'{"messages":[' + (unit + b",") * (SIZE // (len(unit) + 1)) + unit + b"]}"
    for unit in (b"[]", b"{}", b"1", b'""', b'{"a":0}', b'{"\\\\":"\\""}')
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=[unit.decode() for unit in BOMBS])
def test_a_body_of_millions_of_values_is_refused(body):
    with pytest.raises(DialectError, match="more than 500,000 values") as refused:
        parse_object(body)
    assert refused.value.status == 413


def test_arguments_of_millions_of_values_stay_text_and_a_body_of_many_of_them_is_refused():
    text = "[" + "[]," * json_values.MOST_VALUES + "[]]"
    assert parse_arguments(text) is text
    calls = ["[" + "[]," * 100_000 + "[]]"] * 60
    with pytest.raises(DialectError, match="values"):
        parse_object(json.dumps({"calls": calls}).encode())


@pytest.mark.parametrize(
    "text", ["1, " * 1_300_000, '{"a": [1, 2]}' * 200_000, "\\" * 4_000_000, '",' * 1_000_000]
)
def test_a_long_text_is_one_value(text):
    body = {"messages": [{"role": "user", "content": text}]}
    assert parse_object(json.dumps(body).encode()) == body


def num_values(value):
    count = 1
    if isinstance(value, dict):
        count += len(value) + sum(map(num_values, value.values()))
    if isinstance(value, list):
        count += sum(map(num_values, value))
    return count


letters = st.text('"\\,[{:a')


def containers(inner):
    return st.lists(inner) | st.dictionaries(letters, inner)


@given(value=st.recursive(st.integers() | letters, containers), most=st.integers(0, 20))
def test_what_is_refused_has_more_values_and_what_is_not_has_few(value, most):
    with mock.patch.object(json_values, "MOST_VALUES", most):
        try:
            check_values(json.dumps(value).encode())
        except json_values.TooManyValues:
            assert num_values(value) > most / 2
        else:
            assert num_values(value) <= most + 1


any_text = st.text(st.characters(categories=None) | st.sampled_from(["\ud83d", "\udc00"]))


def has_surrogates(text):
    return any(0xD800 <= ord(character) < 0xE000 for character in text)


@given(any_text)
def test_well_formed_text_is_utf8_and_changes_only_surrogates(text):
    formed = well_formed(text)
    assert formed.encode().decode() == formed
    assert formed == text or has_surrogates(text)


@given(any_text, st.booleans())
def test_parsed_json_is_well_formed_all_the_way_down(text, ascii_only):
    written = json.dumps({text: [text]}, ensure_ascii=ascii_only).encode("utf-8", "replace")
    parsed = parse_json(written.decode())
    json.dumps(parsed, ensure_ascii=False).encode()
    if not has_surrogates(text):
        assert parsed == {text: [text]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\ud83d\ude00 \ud83d", "😀 \ufffd"),
        (r"\\ud83d\ude00", "\\ud83d\ufffd"),
        (r"\ud83d\\\ude00", "\ufffd\\\ufffd"),
        (r"\ud83d\ud83d\ude00\ude00", "\ufffd😀\ufffd"),
    ],
)
def test_a_pair_of_surrogates_is_a_character_and_each_other_one_is_replaced(text, value):
    assert parse_json(f'"{text}"') == value


def test_pairs_are_not_written_as_json_again():
    body = json.dumps({"content": "All right 👍 \\ud83d"})
    with mock.patch.object(json, "dumps", None):
        assert parse_json(body) == {"content": "All right 👍 \\ud83d"}


SECRET = "sk-proj-0123456789abcdefghijklmnopqrstuvwxyz"


def test_numbers_flags_and_short_words_are_recorded_as_they_are_and_of_other_texts_the_length():
    asked = {
        "temperature": 0.5,
        "parallel_tool_calls": False,
        "logit_bias": {"50256": -100},
        "include": ["reasoning.encrypted_content"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    assert recordable(asked) == asked
    assert recordable({"temperature": SECRET, "reasoning": {SECRET: [SECRET, "two words"]}}) == {
        "temperature": "(44 characters)",
        "reasoning": {"(44 characters)": ["(44 characters)", "(9 characters)"]},
    }


def test_the_name_of_a_tool_is_recorded_whatever_its_length():
    name = "mcp__github__create_pull_request_review"
    choice = {"tool_choice": {"type": "function", "name": name}}
    assert recordable(choice, {name}) == choice
    assert recordable(choice)["tool_choice"]["name"] == "(39 characters)"


def test_a_schema_is_left_out_because_it_is_recorded_with_what_was_applied():
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    recorded = recordable({"response_format": form, "responseSchema": {"type": "OBJECT"}})
    del form["json_schema"]["schema"]
    assert recorded == {"response_format": form}


@pytest.mark.parametrize(
    "value", [[0] * 10_000, {str(n): n for n in range(1000)}], ids=["list", "object"]
)
def test_a_long_option_becomes_its_length(value):
    (recorded,) = recordable({"x": value}).values()
    assert recorded == f"({len(json.dumps(value))} characters)"


def test_a_hosted_tool_is_recorded_by_its_type_and_name():
    tool = {
        "type": "mcp",
        "server_label": "docs",
        "server_url": "https://u:p@x.example/KEY",
        SECRET: 1,
    }
    assert recordable_tools([tool, {"name": SECRET}]) == [
        {"type": "mcp", "server_label": "docs"},
        {"name": "(44 characters)"},
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("robot", "'robot'"),
        (SECRET, "a text of 44 characters"),
        ("a b", "a text of 3 characters"),
        (5, "a number"),
        (True, "a boolean"),
        (None, "null"),
        ([SECRET], "a list"),
        ({SECRET: 1}, "an object"),
    ],
)
def test_an_error_describes_a_value_without_repeating_texts(value, words):
    assert described(value) == words


names = st.text() | st.just(SECRET)


def containers_of_secrets(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names,
    containers_of_secrets,
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["type", "url", "tool_names", "x"]), anything))
@examples(300)
def test_no_text_of_any_value_is_recorded(value):
    assert SECRET not in json.dumps([recordable(value), recordable_tools([value])])


def test_any_depth_is_recorded():
    value = 1
    for _ in range(900):
        value = [value]
    assert "(deeper)" in str(recordable({"x": value}))


def test_many_hosted_tools_are_recorded_as_their_number():
    tools = [{"type": "web_search"}] * 1000
    hosted = RESPONSES.decode({**RESPONSES.talk, "tools": tools}).hosted_tools
    assert (len(hosted), hosted[-1]) == (65, "(936 more)")
