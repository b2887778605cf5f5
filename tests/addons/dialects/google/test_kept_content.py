"""A stored content is the part of it that the model sees."""

import json

from hypothesis import given

from rolltap.addons.dialects import google
from rolltap.addons.dialects.model_call import DialectError
from rolltap.addons.dialects.stored import Stored, StoredRequest
from tests.addons.dialects import hostile
from tests.addons.dialects.google.test_request import GENERATE, REQUEST, SNAKE_REQUEST
from tests.deep import examples

USER = {"role": "user", "parts": [{"text": "Go on."}]}
KEYS = ("systemInstruction", "system_instruction", "tools", "toolConfig", "tool_config", "contents")
NAMES = ["text", "parts", "role", "functionCall", "functionResponse", "inlineData", "name", "args", "tools"]
CONTENTS = [{key: request[key] for key in KEYS if key in request} for request in (REQUEST, SNAKE_REQUEST)]


def decode(content):
    contents = content.get("contents")
    whole = contents if isinstance(contents, list) else [] if contents is None else [contents]
    call = google.decode(json.dumps({**content, "contents": [*whole, USER]}).encode(), GENERATE)
    return call.messages, call.tools, call.may_call


def stored(content):
    """Return what is stored of a content, or None when it is refused."""
    try:
        request = StoredRequest("POST", "/v1beta/cachedContents", json.dumps(content).encode(), "new", 5)
        entry = google.serve(request, Stored()).entry
    except DialectError:
        return None
    return {key: value for key, value in entry.items() if key in KEYS}


@given(hostile.mutated(CONTENTS[0], hostile.values(["user", "model"], NAMES)))
@examples(500)
def test_a_stored_content_is_decoded_as_the_one_that_was_given(content):
    kept = stored(content)
    if kept is not None:
        assert decode(kept) == decode(content)


def test_contents_in_both_spellings_are_stored():
    for content in CONTENTS:
        assert decode(stored(content)) == decode(content)
