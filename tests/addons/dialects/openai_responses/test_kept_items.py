"""A stored item is the part of it that the model sees."""

import json

from hypothesis import given

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.model_call import DialectError
from rolltap.addons.dialects.stored import Stored, StoredRequest
from tests.addons.dialects import hostile
from tests.addons.dialects.openai_responses.test_request import KINDS, MUTABLE, NAMES, SEARCH
from tests.deep import examples

ITEMS = {"items": [*MUTABLE["input"][:-1], {"type": "additional_tools", "tools": [SEARCH]}], "metadata": {"a": "b"}}
USER = {"role": "user", "content": "Go on."}
bodies = hostile.mutated(ITEMS, hostile.values([*KINDS, "user", "assistant"], NAMES))


def decode(items):
    call = openai_responses.decode(json.dumps({"model": "m", "input": [*items, USER]}).encode(), "/v1/responses")
    hosted = [tool.get("type") for tool in call.hosted_tools if isinstance(tool, dict)]
    return call.messages, call.tools, call.wire_tools, hosted


@given(bodies)
@examples(500)
def test_stored_items_are_decoded_as_those_that_were_given(body):
    request = StoredRequest("POST", "/v1/conversations", json.dumps(body).encode(), "new", 5)
    try:
        entry = openai_responses.serve(request, Stored()).entry
    except DialectError:
        return
    given = body.get("items") or []
    if not any(item.get("type") == "item_reference" for item in given):
        assert decode(entry["items"])[:3] == decode(json.loads(json.dumps(given)))[:3]


def test_the_items_of_the_tests_are_stored():
    entry = openai_responses.serve(
        StoredRequest("POST", "/v1/conversations", json.dumps(ITEMS).encode(), "new", 5), Stored()
    ).entry
    assert decode(entry["items"]) == decode(ITEMS["items"])
    assert entry["metadata"] == {"a": "b"}
