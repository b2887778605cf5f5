"""JSON that would become millions of values is refused before it is parsed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import json_values
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.json_values import MOST_VALUES, TooManyValues, check_values
from rolltap.addons.dialects.model_call import DialectError, parse_arguments

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
    text = "[" + "[]," * MOST_VALUES + "[]]"
    assert parse_arguments(text) is text
    calls = ["[" + "[]," * 100_000 + "[]]"] * 60
    with pytest.raises(DialectError, match="values"):
        parse_object(json.dumps({"calls": calls}).encode())


@pytest.mark.parametrize("text", ["1, " * 1_300_000, '{"a": [1, 2]}' * 200_000, "\\" * 4_000_000, '",' * 1_000_000])
def test_a_long_text_is_one_value(text):
    body = {"messages": [{"role": "user", "content": text}]}
    assert parse_object(json.dumps(body).encode()) == body


def num_values(value):
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + sum(map(num_values, inner))


@given(
    value=st.recursive(
        st.integers() | st.text('"\\,[{:a'), lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\,[{:a'), inner)
    ),
    most=st.integers(0, 20),
)
def test_what_is_refused_has_more_values_and_what_is_not_has_few(value, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "MOST_VALUES", most)
        try:
            check_values(json.dumps(value).encode())
        except TooManyValues:
            assert num_values(value) > most / 2
        else:
            assert num_values(value) <= most + 1
