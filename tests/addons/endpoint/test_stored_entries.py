"""Entries of a session's objects: what they may hold, what they cost, and what happens when one is damaged."""

import json

import pytest

from rolltap.addons.dialects.routes import find_route
from rolltap.addons.endpoint import server, stored
from rolltap.addons.endpoint.exchange import send_slowly
from rolltap.trainer.doctor.scripted_engine import Say
from tests.addons.endpoint.test_stored import CACHED, CONVERSATIONS, GENERATE, RESPONSES, Client, restarted, user
from tests.addons.harness import recording

PIXELS = "iVBORw0KGgoSECRETPIXELS" * 20
IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXELS}"}
MCP = {
    "type": "mcp",
    "server_label": "x",
    "server_url": "https://u:secret@h.example/p?k=secret",
    "authorization": "Bearer secret",
    "headers": {"x": "secret"},
}
TOOLS = {"type": "additional_tools", "role": "developer", "tools": [MCP]}
NAMED = {"functionDeclarations": [{"name": "look", "parameters": {"type": "OBJECT"}}]}
SERVER = {"streamableHttpTransport": {"url": "https://h/?key=secret", "headers": {"a": "secret"}}}
HEADER = {"mcpServers": [{"name": "x", **SERVER}]}
SHOWN = "[image/png, not shown: this model reads text]"


@pytest.fixture
def client(harness):
    return Client(harness)


def recorded(harness):
    return b"".join(path.read_bytes() for path in harness.run.glob("*.arrow")).decode("latin-1")


async def create(client, *items, **fields):
    status, answer = await client.request("POST", CONVERSATIONS, {"items": list(items), **fields})
    assert status == 200, answer
    return answer["id"]


async def items_of(client, conversation, query="?order=asc"):
    return (await client.request("GET", f"{CONVERSATIONS}/{conversation}/items{query}"))[1]["data"]


async def test_a_conversation_holds_no_image_and_no_key(client, harness, scripted_engine):
    odd = {"role": "user", "content": [{"type": "input_text", "text": "look", "k": "secret"}, IMAGE], "k": "secret"}
    conversation = await create(client, odd, TOOLS, metadata={"k": "a secret of nine words"})
    scripted_engine.replies += [Say("Hi."), Say("Ho.")]
    for _ in range(2):
        await client.ask({**user(), "content": [IMAGE]}, TOOLS, conversation=conversation)
    path = f"{CONVERSATIONS}/{conversation}"
    assert (await client.request("POST", f"{path}/items", {"items": [odd, TOOLS]}))[0] == 200
    assert (await client.request("POST", path, {"metadata": {"k": "secret or not"}}))[0] == 200
    assert "SECRETPIXELS" not in recorded(harness)
    assert "secret" not in recorded(harness)
    assert json.loads(harness.calls()[0]["messages"])[0]["content"] == f"look{SHOWN}"
    assert harness.calls()[1]["kind"] == "bridged"
    shown = (await items_of(client, conversation))[0]["content"]
    assert [part["text"] for part in shown] == ["look", SHOWN]
    assert [event["detail"] for event in harness.events("hidden")] == ["1"] * 4


async def test_a_cached_content_holds_no_image_and_no_key(client, harness, scripted_engine):
    inline = {"inlineData": {"mimeType": "image/png", "data": PIXELS}}
    contents = [{"role": "user", "parts": [{"text": "A book."}, inline], "k": "secret"}]
    config = {"function_calling_config": {"mode": "AUTO", "k": "secret"}, "k": "secret"}
    body = {"contents": contents, "tools": [NAMED, HEADER, {"googleSearch": {}}], "tool_config": config}
    status, cached = await client.request("POST", CACHED, body)
    assert status == 200, cached
    scripted_engine.replies.append(Say("Yes."))
    asked = {"contents": [{"role": "user", "parts": [{"text": "And?"}]}], "cachedContent": cached["name"]}
    status, answer = await client.request("POST", GENERATE, asked)
    assert status == 200, answer
    assert "SECRETPIXELS" not in recorded(harness)
    assert "secret" not in recorded(harness)
    (call,) = harness.calls()
    assert json.loads(call["messages"])[0]["content"] == f"A book.{SHOWN}"
    assert json.loads(call["tools"])[0]["function"]["name"] == "look"
    hosted = json.loads(call["sampling"])["asked"]["hosted_tools"]
    assert [next(iter(tool)) for tool in hosted] == ["mcpServers", "googleSearch"]


async def test_images_are_refused_at_creation_too(harness, scripted_engine):
    run = harness.run
    async with recording(harness.endpoint.rendering, run, scripted_engine.url, images="refuse") as refusing:
        await refuses_images(Client(refusing))
    assert not harness.events("stored")


async def refuses_images(client):
    for path, body in [
        (CONVERSATIONS, {"items": [{"role": "user", "content": [IMAGE]}]}),
        (CACHED, {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": PIXELS}}]}]}),
    ]:
        status, answer = await client.request("POST", path, body)
        assert (status, "takes text only" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CONVERSATIONS, {"items": [{"type": 5}]}, "items[0].type"),
        (CONVERSATIONS, {"items": [{"type": "web_search_call"}]}, "items[0]"),
        (CONVERSATIONS, {"items": [{"type": "compaction_trigger"}]}, "items[0]"),
        (CONVERSATIONS, {"items": [{"role": "user", "content": 5}]}, "items[0].content"),
        (CACHED, {"contents": ["x"]}, "contents[0]"),
        (CACHED, {"contents": [{"parts": [{"text": 5}]}]}, "contents[0].parts[0].text"),
        (CACHED, {"tools": [{"functionDeclarations": [{"name": 5}]}]}, "tools[0].function_declarations[0].name"),
        (CACHED, {"model": 5}, "model"),
        (CACHED, {"systemInstruction": {"parts": [{"inlineData": {"data": PIXELS}}]}}, "system_instruction"),
    ],
)
async def test_what_every_use_would_refuse_is_refused_at_creation(client, harness, path, body, place):
    status, answer = await client.request("POST", path, body)
    assert (status, place in answer["error"]["message"]) == (400, True), answer
    assert not harness.events("stored")


async def sent(harness, body, count):
    """Return the text of the reply to a request that its client has sent `count` times before."""
    headers = harness.endpoint.headers("s1", "api", find_route("POST", RESPONSES, {}))
    headers |= {"x-stainless-retry-count": count}
    async with harness.client.post(harness.url(RESPONSES), data=body, headers=headers) as answer:
        return (await answer.json())["output"][-1]["content"][0]["text"]


async def test_a_retry_in_a_conversation_after_a_restart_gets_the_reply_that_was_sampled(
    client, harness, scripted_engine
):
    conversation = await create(client)
    scripted_engine.replies += [Say("Zero."), Say("One.")]
    await client.ask(user(), conversation=conversation)
    body = json.dumps({"model": "m", "input": "Hi", "conversation": conversation})
    assert await sent(harness, body, "0") == "One."
    async with restarted(harness, scripted_engine) as again:
        assert await sent(again.harness, body, "1") == "One."
    assert len(harness.calls()) == 2


async def test_a_retry_in_a_conversation_gets_the_reply_that_was_sampled(client, harness, scripted_engine):
    conversation = await create(client)
    scripted_engine.replies += [Say("One."), Say("Two.")]
    body = json.dumps({"model": "m", "input": "Hi", "conversation": conversation})
    texts = [await sent(harness, body, count) for count in ("0", "1", "0")]
    assert texts == ["One.", "One.", "Two."]
    assert [call["kind"] for call in harness.calls()] == ["root", "bridged"]
    listed = [item["content"][0]["text"] for item in await items_of(client, conversation)]
    assert listed == ["Hi", "One.", "Hi", "Two."]


async def test_a_conversation_goes_on_after_a_compaction(client, harness, scripted_engine):
    conversation = await create(client, {"role": "system", "content": "Stay."})
    scripted_engine.replies += [Say("One."), Say("SUMMARY."), Say("Two."), Say("Three.")]
    await client.ask(user("a"), conversation=conversation)
    compacted = await client.ask({"type": "compaction_trigger"}, conversation=conversation)
    await client.ask(user("b"), conversation=conversation)
    listed = await items_of(client, conversation)
    assert [item["type"] for item in listed] == ["message"] * 3 + ["compaction"] + ["message"] * 2
    assert listed[3]["id"] == compacted["output"][0]["id"]
    said = [message["content"] for message in json.loads(harness.calls()[-1]["messages"])]
    assert [text[-8:] for text in said] == ["Stay.", "SUMMARY.", "b"]
    await client.ask({"type": "item_reference", "id": compacted["output"][0]["id"]}, user("go"))
    assert (await client.request("GET", f"{RESPONSES}/{compacted['id']}"))[1]["output"] == compacted["output"]


async def test_a_damaged_entry_is_not_left_out(client, harness):
    conversation = await create(client, user("FIRST"))
    assert (await client.request("POST", f"{CONVERSATIONS}/{conversation}/items", {"items": [user("More")]}))[0] == 200
    other = await create(Client(harness, "s2"), user("Fine"))
    (path,) = harness.run.glob("events-*.arrow")
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(b"FIRST"))
        file.write(b"X")
    harness.endpoint.forget_idle(0)
    status, answer = await client.request("GET", f"{CONVERSATIONS}/{conversation}")
    assert (status, "damaged" in answer["error"]["message"]) == (500, True)
    assert await items_of(Client(harness, "s2"), other)


async def test_the_bound_is_of_bytes_and_of_entries(client, harness, monkeypatch):
    monkeypatch.setattr(stored, "STORED_BYTES", 40_000)
    status, _ = await client.request("POST", CONVERSATIONS, {"items": [user("\U0001f600" * 10_000)]})
    assert status == 400
    created = [await client.request("POST", CONVERSATIONS, {}) for _ in range(12)]
    assert [status for status, _ in created] == [200] * 9 + [400] * 3
    assert stored.STORED_BYTES // stored.ENTRY_BYTES < 1100


async def test_an_entry_is_checked_once(client, harness, monkeypatch):
    conversation = await create(client, user("x" * 100))
    checked = []
    check = stored.undamaged
    monkeypatch.setattr(stored, "undamaged", lambda *row: checked.append(row) or check(*row))
    for _ in range(3):
        assert await items_of(client, conversation)
    assert len(checked) <= 1


async def test_a_page_is_bounded_in_bytes(client, monkeypatch):
    conversation = await create(client, *(user("x" * 300_000) for _ in range(9)))
    read, after = 0, ""
    while True:
        path = f"{CONVERSATIONS}/{conversation}/items?limit=100{after}"
        _, page = await client.request("GET", path)
        assert len(json.dumps(page)) < 2**20 + 2000
        read += len(page["data"])
        after = f"&after={page['last_id']}"
        if not page["has_more"]:
            break
    assert read == 9


@pytest.mark.parametrize("limit", ["9" * 5000, "0", "-1", "x", "²"])
async def test_a_strange_limit_is_no_error(client, limit):
    conversation = await create(client, user())
    assert len(await items_of(client, conversation, f"?limit={limit}")) == 1


async def test_an_answer_takes_room_until_it_is_sent(client, harness, monkeypatch):
    conversation = await create(client, user("x" * 250_000))
    held, quota = [], harness.endpoint._bodies.quota

    async def sent(request, body):
        held.append((quota.held["s1"], len(body)))
        return await send_slowly(request, body)

    monkeypatch.setattr(server, "send_slowly", sent)
    assert await items_of(client, conversation)
    [(taken, length)] = held
    assert taken == length > 250_000
    assert quota.fits("s1", quota.of_session)
