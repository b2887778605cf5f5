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
from tests.addons.harness import user
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
    found = [
        row[name]
        for table, names in COLUMNS.items()
        for row in read_rows(run, table)
        for name in names
    ]
    found += [event["detail"] for event in read_rows(run, "events") if event["kind"] == "stored"]
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


@pytest.mark.parametrize("number", cases(NUMBERS, 0, 3))
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_call_whose_arguments_held_one_is_continued(
    harness, restart, scripted_engine, number, restarted
):
    arguments = f'{{"x": {number}}}'
    say = f'<tool_call>\n{{"name": "move", "arguments": {arguments}}}\n</tool_call>'
    scripted_engine.otherwise = lambda request: Say(say)
    asked = {"model": "m", "tools": TOOLS}
    status, first = await harness.ask(user(), **asked)
    assert status == 200
    message = first["choices"][0]["message"]
    assert "move" in str(message)
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
        for call in message.get("tool_calls", ())
    ]
    body = {**asked, "messages": [user(), message, *(answers or [user("Go on.")])]}
    if restarted:
        async with restart() as other:
            await other.send(body)
    else:
        await harness.send(body)
    assert [call["kind"] for call in harness.calls()] == ["root", "bridged"]
    assert strictly_parsed(harness.run)


@pytest.mark.parametrize("restarted", [False, True])
async def test_arguments_of_as_many_levels_as_a_body_of_gemini_holds_are_recorded_and_continued(
    harness, restart, restarted
):
    path = "/v1beta/models/m:generateContent"
    arguments = json.loads('{"a":' * 122 + "1" + "}" * 122)
    made = {"functionCall": {"id": "c1", "name": "move", "args": arguments}}
    answer = {"functionResponse": {"id": "c1", "name": "move", "response": {}}}
    contents = [{"role": "model", "parts": [made]}, {"role": "user", "parts": [answer]}]
    status, text = await harness.send({"contents": contents}, path=path)
    assert status == 200
    contents += [
        json.loads(text)["candidates"][0]["content"],
        {"role": "user", "parts": [{"text": "Go on."}]},
    ]
    if restarted:
        async with restart() as other:
            await other.send({"contents": contents}, path=path)
    else:
        await harness.send({"contents": contents}, path=path)
    assert [call["kind"] for call in harness.calls()] == ["root", "bridged"]
    assert strictly_parsed(harness.run)


@given(
    value=st.recursive(st.floats() | st.text(max_size=3), st.lists)
    | st.dictionaries(st.text(), st.floats())
)
def test_the_text_of_a_column_is_json_whatever_its_value(value):
    parsed = orjson.loads(json_text(value).encode("utf-8", "replace"))
    assert json.dumps(parsed) == json.dumps(json.loads(json.dumps(value), parse_constant=str))
