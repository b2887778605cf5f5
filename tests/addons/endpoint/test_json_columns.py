"""Every JSON column of every row is JSON for everybody: NaN, Infinity and 1e400 reach none of
them."""

import json
import re

import orjson
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rolltap.addons.dialects.call import DialectError
from rolltap.addons.store.records import json_text
from rolltap.addons.store.tables import read_rows
from tests.addons.dialects.apis import APIS, every_api
from tests.addons.endpoint.asking import GEMINI, kinds
from tests.addons.harness import PATH, user, with_result
from tests.deep import cases, examples
from tests.scripted_engine import Say

COLUMNS = {
    "calls": ("sampling", "messages", "tools", "reply"),
    "sessions": ("parts", "evidence", "suspicions"),
}
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" + "0" * 400]
TOOLS = [{"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}]
ODD = st.recursive(
    st.floats().map(json.dumps) | st.integers(10**300, 10**310).map(str) | st.sampled_from(NUMBERS),
    lambda inner: st.lists(inner, max_size=3).map(lambda texts: f"[{', '.join(texts)}]"),
    max_leaves=3,
)
"""Texts of numbers, and lists of them, as Python writes and reads them."""
NUMBER = re.compile(r"(?<=: )\d[\d.]*")


def strictly_parsed(run):
    """Return the values of all JSON columns of a run."""
    found = [event["detail"] for event in read_rows(run, "events") if event["kind"] == "stored"]
    for table, names in COLUMNS.items():
        for row in read_rows(run, table):
            found += [row[name] for name in names]
    return [orjson.loads(text) for text in found if text is not None]


@every_api
@pytest.mark.parametrize("number", cases(NUMBERS, 0, 3, 5))
def test_a_number_that_json_does_not_have_is_refused_wherever_it_stands(api, number):
    for key in api.request:
        body = json.dumps({**api.request, key: ["HERE"]}).replace('"HERE"', number)
        with pytest.raises(DialectError, match="JSON") as refused:
            api.decode_bytes(body.encode())
        assert refused.value.status == 400


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_whatever_numbers_are_asked_each_column_can_be_parsed(harness, data):
    api = data.draw(st.sampled_from(APIS))
    body = json.dumps(api.request)
    place = data.draw(st.sampled_from([*NUMBER.finditer(body)]))
    body = body[: place.start()] + data.draw(ODD) + body[place.end() :]
    await harness.send(body.encode(), path=api.target)
    strictly_parsed(harness.run)


async def is_continued(harness, restart, restarted, body, path=PATH):
    """Assert that a second request continues the first call, and that all columns are JSON."""
    if restarted:
        async with restart() as other:
            await other.send(body, path=path)
    else:
        await harness.send(body, path=path)
    assert kinds(harness) == ["root", "bridged"]
    assert strictly_parsed(harness.run)


@pytest.mark.parametrize("number", cases(NUMBERS, 0, 3))
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_call_whose_arguments_held_one_is_continued(
    harness, restart, scripted_engine, number, restarted
):
    call = f'{{"name": "move", "arguments": {{"x": {number}}}}}'
    scripted_engine.otherwise = lambda request: Say(f"<tool_call>\n{call}\n</tool_call>")
    _, first = await harness.ask(user(), tools=TOOLS)
    message = first["choices"][0]["message"]
    assert "move" in str(message)
    answer = [user("Go on.")]
    if "tool_calls" in message:
        _, *answer = with_result(first)
    body = {"model": "m", "tools": TOOLS, "messages": [user(), message, *answer]}
    await is_continued(harness, restart, restarted, body)


@pytest.mark.parametrize("restarted", [False, True])
async def test_arguments_of_as_many_levels_as_a_body_of_gemini_holds_are_recorded_and_continued(
    harness, restart, restarted
):
    arguments = json.loads('{"a":' * 122 + "1" + "}" * 122)
    made = {"functionCall": {"id": "c1", "name": "move", "args": arguments}}
    answer = {"functionResponse": {"id": "c1", "name": "move", "response": {}}}
    contents = [{"role": "model", "parts": [made]}, {"role": "user", "parts": [answer]}]
    status, text = await harness.send({"contents": contents}, path=GEMINI)
    assert status == 200
    contents.append(json.loads(text)["candidates"][0]["content"])
    contents.append({"role": "user", "parts": [{"text": "Go on."}]})
    await is_continued(harness, restart, restarted, {"contents": contents}, GEMINI)


@given(
    value=st.recursive(st.floats() | st.text(max_size=3), st.lists)
    | st.dictionaries(st.text(), st.floats())
)
def test_the_text_of_a_column_is_json_whatever_its_value(value):
    parsed = orjson.loads(json_text(value).encode("utf-8", "replace"))
    assert json.dumps(parsed) == json.dumps(json.loads(json.dumps(value), parse_constant=str))
