"""Replies, conversations and cached contents of a session: found by their ids, also after a restart, and bounded."""

import io
import json
from contextlib import asynccontextmanager

import pytest

from rolltap.addons.dialects.routes import find_route
from rolltap.addons.endpoint import server, stored
from rolltap.addons.endpoint.exchange import send_slowly
from rolltap.trainer.doctor.scripted_engine import Answer, Say
from tests.addons.harness import recording

RESPONSES, CONVERSATIONS, CACHED = "/v1/responses", "/v1/conversations", "/v1beta/cachedContents"
GENERATE = "/v1beta/models/gemini-x:generateContent"
TOOL = {"type": "function", "name": "bash", "description": "Run", "parameters": {"type": "object"}}
CALL = '<think>\nI look.\n</think>\n\nWait.\n\n<tool_call>\n{"name":  "bash", "arguments": {"a" :true}}\n</tool_call>'


class Client:
    """A client that asks as one session."""

    def __init__(self, harness, session="s1"):
        self.harness = harness
        self.session = session

    async def request(self, method, path, body=None):
        """Return the status and the body of the answer."""
        route = find_route(method, path, {})
        assert route is not None, f"{method} {path} is not served"
        headers = self.harness.endpoint.headers(self.session, "api", route)
        data = None if body is None else io.BytesIO(json.dumps(body).encode())
        async with self.harness.client.request(method, self.harness.url(path), data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    async def ask(self, *items, **fields):
        """Return the response to a request of the Responses API."""
        body = {"model": "m", "input": list(items), "tools": [TOOL], **fields}
        status, answer = await self.request("POST", RESPONSES, body)
        assert status == 200, answer
        return answer

    async def refusal(self, *items, **fields):
        """Return the status and the code of a request of the Responses API that is refused."""
        status, answer = await self.request("POST", RESPONSES, {"model": "m", "input": list(items), **fields})
        return status, answer["error"]["code"], answer["error"]["message"]


@pytest.fixture
def client(harness):
    return Client(harness)


@asynccontextmanager
async def restarted(harness, scripted_engine):
    """Yield a client of another recorder of the same run."""
    async with recording(harness.endpoint.rendering, harness.run, scripted_engine.url) as another:
        yield Client(another)


def user(text="Hello"):
    return {"role": "user", "content": text}


def outputs(answer):
    """Return the results of the tool calls of a response."""
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]


def references(answer):
    return [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]


def kinds(harness):
    return [(call["kind"], call["kind_reason"]) for call in harness.calls()]


BRIDGED = ("bridged", None)


async def test_a_previous_response_is_continued_token_for_token(client, harness, scripted_engine):
    scripted_engine.replies += [Say(CALL), Say(CALL), Say("Done.")]
    answer = await client.ask(user(), instructions="Be brief.")
    for _ in range(2):
        previous = answer["id"]
        answer = await client.ask(*outputs(answer), instructions="Be brief.", previous_response_id=previous)
        assert answer["previous_response_id"] == previous
    assert kinds(harness)[1:] == [BRIDGED] * 2


async def test_references_to_items_are_continued_token_for_token(client, harness, scripted_engine):
    scripted_engine.replies += [Say(CALL), Say(CALL), Say("Done.")]
    said = [user()]
    for _ in range(3):
        answer = await client.ask(*said)
        said += [*references(answer), *outputs(answer)]
    assert kinds(harness)[1:] == [BRIDGED] * 2


async def test_a_conversation_is_continued_token_for_token(client, harness, scripted_engine):
    scripted_engine.replies += [Say(CALL), Say(CALL), Say("Done.")]
    _, conversation = await client.request("POST", CONVERSATIONS, {"items": [user("First.")]})
    answer = await client.ask(user("Second."), conversation=conversation["id"])
    for named in (conversation["id"], {"id": conversation["id"]}):
        answer = await client.ask(*outputs(answer), conversation=named)
        assert answer["conversation"] == {"id": conversation["id"]}
    assert kinds(harness)[1:] == [BRIDGED] * 2
    first = json.loads(harness.calls()[0]["messages"])
    assert [message["content"] for message in first] == ["First.", "Second."]


async def test_a_cached_content_is_continued_token_for_token(client, harness, scripted_engine):
    scripted_engine.replies += [Say("One."), Say("Two.")]
    cached = {
        "model": "models/gemini-x",
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [{"role": "user", "parts": [{"text": "A book."}]}],
        "tools": [{"functionDeclarations": [{"name": "bash", "parameters": {"type": "object"}}]}],
    }
    status, created = await client.request("POST", CACHED, cached)
    assert status == 200, created
    contents = [{"role": "user", "parts": [{"text": "What is it?"}]}]
    for _ in range(2):
        body = {"cachedContent": created["name"], "contents": contents}
        status, answer = await client.request("POST", GENERATE, body)
        assert status == 200, answer
        contents += [answer["candidates"][0]["content"], {"role": "user", "parts": [{"text": "And?"}]}]
    assert kinds(harness)[1:] == [BRIDGED]
    first = harness.calls()[0]
    assert [message["content"] for message in json.loads(first["messages"])] == ["Be brief.", "A book.", "What is it?"]
    assert json.loads(first["tools"])[0]["function"]["name"] == "bash"
    _, counted = await client.request("POST", GENERATE.replace("generateContent", "countTokens"), body)
    assert counted["totalTokens"] > 10


async def test_a_restarted_recorder_finds_all_of_it(client, harness, scripted_engine):
    scripted_engine.replies += [Say(CALL), Say(CALL), *[Say("Done.")] * 3]
    first = await client.ask(user("By id."), instructions="Be brief.")
    _, conversation = await client.request("POST", CONVERSATIONS, {})
    second = await client.ask(user("In a conversation."), conversation=conversation["id"])
    _, cached = await client.request("POST", CACHED, {"contents": [{"role": "user", "parts": [{"text": "A book."}]}]})
    async with restarted(harness, scripted_engine) as again:
        again_brief = {"instructions": "Be brief."}
        await again.ask(*outputs(first), previous_response_id=first["id"], **again_brief)
        await again.ask(user("By id."), *references(first), *outputs(first), **again_brief)
        await again.ask(*outputs(second), conversation=conversation["id"])
        assert (await again.request("GET", f"{CACHED}/{cached['name'].partition('/')[2]}"))[1] == cached
    assert [kind for kind, _ in kinds(harness)[2:]] == ["bridged"] * 3


async def test_the_state_of_an_idle_session_is_not_needed(client, harness, scripted_engine):
    scripted_engine.replies += [Say(CALL), Say("Done.")]
    answer = await client.ask(user())
    harness.endpoint.forget_idle(0)
    assert not harness.endpoint.sessions
    await client.ask(*outputs(answer), previous_response_id=answer["id"])
    assert kinds(harness)[1:] == [BRIDGED]


async def test_the_instructions_of_a_previous_response_are_not_carried_over(client, harness, scripted_engine):
    scripted_engine.replies += [Say("Hi."), Say("Hi."), Say("Hi.")]
    answer = await client.ask({"role": "system", "content": "Stay."}, user(), instructions="Go.")
    await client.ask(user("Again"), instructions="Other.", previous_response_id=answer["id"])
    await client.ask(user("Again"), previous_response_id=answer["id"])
    texts = [[message["content"] for message in json.loads(call["messages"])] for call in harness.calls()]
    assert texts[1:] == [["Other.", "Stay.", "Hello", "Hi.", "Again"], ["Stay.", "Hello", "Hi.", "Again"]]


async def test_nothing_of_another_session_is_found(client, harness, scripted_engine):
    scripted_engine.replies.append(Say(CALL))
    answer = await client.ask(user())
    _, conversation = await client.request("POST", CONVERSATIONS, {"items": [user("Secret.")]})
    _, cached = await client.request("POST", CACHED, {"contents": [{"parts": [{"text": "Secret."}]}]})
    other = Client(harness, "s2")
    assert (await other.refusal(user(), previous_response_id=answer["id"]))[:2] == (400, "previous_response_not_found")
    for reference in references(answer):
        status, _, why = await other.refusal(user(), reference)
        assert (status, why) == (404, f"Item with id '{reference['id']}' not found.")
    assert (await other.refusal(user(), conversation=conversation["id"]))[0] == 404
    contents = {"contents": [{"parts": [{"text": "Hi"}]}], "cachedContent": cached["name"]}
    for method, path, body, status in [
        ("GET", f"{RESPONSES}/{answer['id']}", None, 404),
        ("DELETE", f"{RESPONSES}/{answer['id']}", None, 404),
        ("GET", f"{CONVERSATIONS}/{conversation['id']}", None, 404),
        ("GET", f"{CONVERSATIONS}/{conversation['id']}/items", None, 404),
        ("POST", f"{CONVERSATIONS}/{conversation['id']}/items", {"items": [user()]}, 404),
        ("DELETE", f"{CONVERSATIONS}/{conversation['id']}", None, 404),
        ("GET", f"/v1beta/{cached['name']}", None, 403),
        ("DELETE", f"/v1beta/{cached['name']}", None, 403),
        ("POST", GENERATE, contents, 403),
    ]:
        assert (await other.request(method, path, body))[0] == status, (method, path)
    assert (await other.request("GET", CACHED))[1] == {"cachedContents": []}
    assert len(harness.calls()) == 1


async def test_a_call_that_failed_or_is_unknown_is_not_found(client, harness, scripted_engine):
    scripted_engine.replies.append(Answer(400, "bad"))
    assert (await client.request("POST", RESPONSES, {"model": "m", "input": "Hello"}))[0] >= 400
    (failed,) = harness.calls()
    assert failed["status"] == "failed"
    for call_id in (failed["call_id"], "0" * 32, ""):
        refusal = await client.refusal(user(), previous_response_id=f"resp_{call_id}")
        assert refusal == (
            400,
            "previous_response_not_found",
            f"Previous response with id 'resp_{call_id}' not found.",
        )
        assert (await client.refusal(user(), {"type": "item_reference", "id": f"msg_{call_id}_0"}))[0] == 404
    assert len(harness.events("rejected")) == 6


async def test_a_failed_call_adds_nothing_to_its_conversation(client, scripted_engine):
    _, conversation = await client.request("POST", CONVERSATIONS, {"items": [user("First.")]})
    scripted_engine.replies.append(Answer(400, "bad"))
    body = {"model": "m", "input": "Second.", "conversation": conversation["id"]}
    assert (await client.request("POST", RESPONSES, body))[0] >= 400
    _, listed = await client.request("GET", f"{CONVERSATIONS}/{conversation['id']}/items?order=asc")
    assert [item["content"][0]["text"] for item in listed["data"]] == ["First."]


async def test_an_item_can_be_named_once(client, scripted_engine):
    scripted_engine.replies.append(Say("Hi."))
    (reference,) = references(await client.ask(user()))
    status, _, why = await client.refusal(user(), reference, reference)
    assert (status, "Duplicate item" in why) == (400, True)


async def test_a_session_that_has_ended_stores_nothing(client, harness):
    await harness.end()
    assert (await client.request("POST", CONVERSATIONS, {}))[0] == 410


async def test_calls_of_a_conversation_stay_in_it_in_their_order(client, scripted_engine):
    _, conversation = await client.request("POST", CONVERSATIONS, {})
    scripted_engine.replies += [Say("One."), Say("Two.")]
    for text in ("a", "b"):
        await client.ask(user(text), conversation=conversation["id"])
    _, listed = await client.request("GET", f"{CONVERSATIONS}/{conversation['id']}/items?order=asc")
    assert [item["content"][0]["text"] for item in listed["data"]] == ["a", "One.", "b", "Two."]


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
        for path, body in [
            (CONVERSATIONS, {"items": [{"role": "user", "content": [IMAGE]}]}),
            (CACHED, {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": PIXELS}}]}]}),
        ]:
            status, answer = await Client(refusing).request("POST", path, body)
            assert (status, "takes text only" in answer["error"]["message"]) == (400, True)
    assert not harness.events("stored")


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
    headers = {"x-stainless-retry-count": count}
    async with harness.post(body.encode(), path=RESPONSES, headers=headers) as answer:
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
    status, answer = await client.request("POST", CONVERSATIONS, {"items": [user("\U0001f600" * 10_000)]})
    assert (status, "has stored" in answer["error"]["message"]) == (400, True)
    assert not harness.events("stored")
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


async def test_a_strange_limit_is_no_error(client):
    conversation = await create(client, user())
    for limit in ("9" * 5000, "0", "-1", "x", "²"):
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
