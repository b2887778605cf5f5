"""Cached contents over Google's own SDK. A stored content is the part of it that the model sees."""

import json

import httpx
import pytest
from google import genai
from google.genai import errors, types
from hypothesis import given

from rolltap.addons.dialects import google
from rolltap.addons.dialects.model_call import DialectError, Reply
from rolltap.addons.dialects.stored import Stored, StoredRequest
from tests.addons.dialects import hostile
from tests.addons.dialects.google.test_request import GENERATE, REQUEST, SNAKE_REQUEST
from tests.addons.dialects.server import Server
from tests.deep import examples

CONTENT = types.CreateCachedContentConfig(
    display_name="book",
    system_instruction="Be brief.",
    contents=[types.Content(role="user", parts=[types.Part(text="A book.")])],
    tools=[types.Tool(function_declarations=[types.FunctionDeclaration(name="look", description="Looks.")])],
    tool_config=types.ToolConfig(function_calling_config=types.FunctionCallingConfig(mode="NONE")),
    ttl="300s",
)


@pytest.fixture
def server():
    return Server(Reply("Yes."))


@pytest.fixture(params=["gemini", "vertex"])
def sdk(server, request):
    options = types.HttpOptions(httpx_client=server.client)
    if request.param == "gemini":
        return genai.Client(api_key="k", http_options=options)
    from google.auth.credentials import AnonymousCredentials

    credentials = AnonymousCredentials()
    credentials.token = "t"
    return genai.Client(vertexai=True, project="p", location="l", credentials=credentials, http_options=options)


def ask(sdk, name, model="gemini-x", **config):
    config = types.GenerateContentConfig(cached_content=name, **config)
    return sdk.models.generate_content(model=model, contents="What is it?", config=config)


def test_a_cached_content_comes_first(sdk, server):
    cached = sdk.caches.create(model="gemini-x", config=CONTENT)
    assert ask(sdk, cached.name).text == "Yes."
    (call,) = server.calls
    assert [message["content"] for message in call.messages] == ["Be brief.", "A book.", "What is it?"]
    assert [tool["function"]["name"] for tool in call.tools] == ["look"]
    assert not call.may_call


def test_a_cached_content_is_listed_read_changed_and_deleted(sdk):
    cached = sdk.caches.create(model="gemini-x", config=CONTENT)
    assert (cached.display_name, (cached.expire_time - cached.create_time).seconds) == ("book", 300)
    assert cached.model.endswith("models/gemini-x")
    assert sdk.caches.get(name=cached.name) == cached
    assert list(sdk.caches.list()) == [cached]
    changed = sdk.caches.update(name=cached.name, config=types.UpdateCachedContentConfig(ttl="600s"))
    assert (changed.expire_time - changed.create_time).seconds == 600
    sdk.caches.delete(name=cached.name)
    assert list(sdk.caches.list()) == []
    for gone in (lambda: sdk.caches.get(name=cached.name), lambda: ask(sdk, cached.name)):
        with pytest.raises(errors.ClientError, match="CachedContent not found") as refusal:
            gone()
        assert (refusal.value.code, refusal.value.status) == (403, "PERMISSION_DENIED")


@pytest.mark.parametrize(
    "config", [{"system_instruction": "Be kind."}, {"tools": CONTENT.tools}, {"tool_config": CONTENT.tool_config}]
)
def test_what_only_the_cached_content_may_have_is_refused_beside_it(sdk, config):
    cached = sdk.caches.create(model="gemini-x", config=CONTENT)
    with pytest.raises(errors.ClientError, match="can not be used with GenerateContent request setting"):
        ask(sdk, cached.name, **config)


def test_a_cached_content_of_another_model_is_refused(sdk):
    cached = sdk.caches.create(model="gemini-x", config=CONTENT)
    with pytest.raises(errors.ClientError, match="has to be the same"):
        ask(sdk, cached.name, model="gemini-y")


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"ttl": 5, "contents": 7, "systemInstruction": []}'])
def test_a_strange_content_is_refused_at_the_latest_when_it_is_used(server, body):
    post = httpx.Request("POST", "https://g/v1beta/cachedContents", content=body)
    if server(post).status_code == 200:
        (name,) = server.objects
        request = {"cachedContent": name[1:], "contents": [{"parts": [{"text": "Hi"}]}]}
        with pytest.raises(DialectError):
            server.decode(google, json.dumps(request).encode(), "/v1beta/models/gemini-x:generateContent")


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
