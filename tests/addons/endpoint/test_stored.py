"""Replies and conversations of a session: found by their ids, also after a restart, and bounded."""

import io
import json
from contextlib import asynccontextmanager
from unittest import mock

import pytest

from rolltap.addons.dialects.routes import find_route
from rolltap.addons.endpoint import server, stored
from rolltap.addons.endpoint.exchange import send_slowly
from tests.addons.harness import recording, user
from tests.scripted_engine import Answer, Say

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
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

    async def ok(self, method, path, body=None):
        """Return the answer to a request that is served."""
        status, answer = await self.request(method, path, body)
        assert status == 200, answer
        return answer

    async def ask(self, *items, **fields):
        """Return the response to a request of the Responses API."""
        return await self.ok("POST", RESPONSES, {"model": "m", "input": list(items), "tools": [TOOL], **fields})

    async def refusal(self, *items, **fields):
        """Return the status, the code and the message of a request of the Responses API that is refused."""
        status, answer = await self.request("POST", RESPONSES, {"model": "m", "input": list(items), **fields})
        return status, answer["error"]["code"], answer["error"]["message"]

    async def create(self, *items, **fields):
        """Return the id of a new conversation."""
        return (await self.ok("POST", CONVERSATIONS, {"items": list(items), **fields}))["id"]

    async def items(self, conversation, query="?order=asc"):
        return (await self.request("GET", f"{CONVERSATIONS}/{conversation}/items{query}"))[1]["data"]

    async def texts(self, conversation):
        return [item["content"][0]["text"] for item in await self.items(conversation)]


@pytest.fixture
def client(harness):
    return Client(harness)


@asynccontextmanager
async def restarted(harness, scripted_engine):
    """Yield a client of another recorder of the same run."""
    async with recording(harness.endpoint.rendering, harness.run, scripted_engine.url) as another:
        yield Client(another)


def outputs(answer):
    """Return the results of the tool calls of a response."""
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]


def references(answer):
    return [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]


def contents(call):
    return [message["content"] for message in json.loads(call["messages"])]


def kinds(harness):
    return [(call["kind"], call["kind_reason"]) for call in harness.calls()]


BRIDGED = ("bridged", None)


@pytest.mark.parametrize("by", ["id", "items"])
async def test_a_response_is_continued_token_for_token_though_its_session_was_idle(
    client, harness, scripted_engine, by
):
    scripted_engine.replies += [Say(CALL), Say(CALL), Say("Done.")]
    said, previous = [user()], None
    for _ in range(3):
        answer = await client.ask(*said, instructions="Be brief.", previous_response_id=previous)
        assert answer["previous_response_id"] == previous
        if by == "id":
            said, previous = outputs(answer), answer["id"]
        else:
            said += [*references(answer), *outputs(answer)]
        harness.endpoint.forget_idle(0)
        assert not harness.endpoint.sessions
    assert kinds(harness)[1:] == [BRIDGED] * 2


async def test_a_conversation_is_continued_token_for_token(client, harness, scripted_engine):
    scripted_engine.replies += [Say(CALL), Say(CALL), Say("Done.")]
    conversation = await client.create(user("First."))
    answer = await client.ask(user("Second."), conversation=conversation)
    for named in (conversation, {"id": conversation}):
        answer = await client.ask(*outputs(answer), conversation=named)
        assert answer["conversation"] == {"id": conversation}
    assert kinds(harness)[1:] == [BRIDGED] * 2
    assert contents(harness.calls()[0]) == ["First.", "Second."]


async def test_a_restarted_recorder_finds_all_of_it(client, harness, scripted_engine):
    scripted_engine.replies += [Say(CALL), Say(CALL), *[Say("Done.")] * 3]
    first = await client.ask(user("By id."), instructions="Be brief.")
    conversation = await client.create()
    second = await client.ask(user("In a conversation."), conversation=conversation)
    async with restarted(harness, scripted_engine) as again:
        brief = {"instructions": "Be brief."}
        await again.ask(*outputs(first), previous_response_id=first["id"], **brief)
        await again.ask(user("By id."), *references(first), *outputs(first), **brief)
        await again.ask(*outputs(second), conversation=conversation)
    assert [kind for kind, _ in kinds(harness)[2:]] == ["bridged"] * 3


async def test_nothing_of_another_session_is_found(client, harness, scripted_engine):
    scripted_engine.replies.append(Say(CALL))
    answer = await client.ask(user())
    conversation = await client.create(user("Secret."))
    other = Client(harness, "s2")
    assert (await other.refusal(user(), previous_response_id=answer["id"]))[:2] == (400, "previous_response_not_found")
    for reference in references(answer):
        status, _, why = await other.refusal(user(), reference)
        assert (status, why) == (404, f"Item with id '{reference['id']}' not found.")
    assert (await other.refusal(user(), conversation=conversation))[0] == 404
    response, conversation = f"{RESPONSES}/{answer['id']}", f"{CONVERSATIONS}/{conversation}"
    for method, path, body, status in [
        ("GET", response, None, 404),
        ("DELETE", response, None, 404),
        ("GET", conversation, None, 404),
        ("GET", f"{conversation}/items", None, 404),
        ("POST", f"{conversation}/items", {"items": [user()]}, 404),
        ("DELETE", conversation, None, 404),
    ]:
        assert (await other.request(method, path, body))[0] == status, (method, path)
    assert len(harness.calls()) == 1


async def test_a_call_that_failed_or_is_unknown_is_not_found_nor_in_its_conversation(client, harness, scripted_engine):
    conversation = await client.create(user("First."))
    scripted_engine.replies.append(Answer(400, "bad"))
    assert (await client.refusal(user("Second."), conversation=conversation))[0] >= 400
    (failed,) = harness.calls()
    assert failed["status"] == "failed"
    for call_id in (failed["call_id"], "0" * 32, ""):
        refusal = await client.refusal(user(), previous_response_id=f"resp_{call_id}")
        why = f"Previous response with id 'resp_{call_id}' not found."
        assert refusal == (400, "previous_response_not_found", why)
        assert (await client.refusal(user(), {"type": "item_reference", "id": f"msg_{call_id}_0"}))[0] == 404
    assert len(harness.events("rejected")) == 6
    assert await client.texts(conversation) == ["First."]


async def test_an_item_can_be_named_once_and_a_session_that_has_ended_stores_nothing(client, harness):
    (reference,) = references(await client.ask(user()))
    status, _, why = await client.refusal(user(), reference, reference)
    assert (status, "Duplicate item" in why) == (400, True)
    await harness.end()
    assert (await client.request("POST", CONVERSATIONS, {}))[0] == 410


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
SHOWN = "[image/png, not shown: this model reads text]"


def recorded(harness):
    return b"".join(path.read_bytes() for path in harness.run.glob("*.arrow")).decode("latin-1")


async def test_a_conversation_holds_no_image_and_no_key(client, harness):
    odd = {"role": "user", "content": [{"type": "input_text", "text": "look", "k": "secret"}, IMAGE], "k": "secret"}
    conversation = await client.create(odd, TOOLS, metadata={"k": "a secret of nine words"})
    for _ in range(2):
        await client.ask({**user(), "content": [IMAGE]}, TOOLS, conversation=conversation)
    path = f"{CONVERSATIONS}/{conversation}"
    await client.ok("POST", f"{path}/items", {"items": [odd, TOOLS]})
    await client.ok("POST", path, {"metadata": {"k": "secret or not"}})
    assert "SECRETPIXELS" not in recorded(harness)
    assert "secret" not in recorded(harness)
    assert contents(harness.calls()[0])[0] == f"look{SHOWN}"
    assert harness.calls()[1]["kind"] == "bridged"
    shown = (await client.items(conversation))[0]["content"]
    assert [part["text"] for part in shown] == ["look", SHOWN]
    assert [event["detail"] for event in harness.events("hidden")] == ["1"] * 4


async def test_images_can_be_refused_at_creation_too(harness, restart):
    async with restart(images="refuse") as refusing:
        for path, body in [
            (RESPONSES, {"model": "m", "input": [{"role": "user", "content": [IMAGE]}]}),
            (CONVERSATIONS, {"items": [{"role": "user", "content": [IMAGE]}]}),
        ]:
            status, answer = await Client(refusing).request("POST", path, body)
            why = "takes text only. The conversation has other parts (images, audio, files): 1."
            assert (status, why in answer["error"]["message"]) == (400, True)
    assert [len(harness.events(kind)) for kind in ("rejected", "stored", "hidden")] == [2, 0, 0]
    assert harness.calls() == []


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CONVERSATIONS, {"items": [{"type": 5}]}, "items[0].type"),
        (CONVERSATIONS, {"items": [{"type": "web_search_call"}]}, "items[0]"),
        (CONVERSATIONS, {"items": [{"type": "compaction_trigger"}]}, "items[0]"),
        (CONVERSATIONS, {"items": [{"role": "user", "content": 5}]}, "items[0].content"),
    ],
)
async def test_what_every_use_would_refuse_is_refused_at_creation(client, harness, path, body, place):
    status, answer = await client.request("POST", path, body)
    assert (status, place in answer["error"]["message"]) == (400, True), answer
    assert not harness.events("stored")


async def sent(harness, body, count):
    """Return the text of the reply to a request that its client has sent `count` times before."""
    _, text = await harness.send(body.encode(), path=RESPONSES, headers={"x-stainless-retry-count": count})
    return json.loads(text)["output"][-1]["content"][0]["text"]


async def test_a_retry_in_a_conversation_gets_the_reply_that_was_sampled_also_after_a_restart(
    client, harness, scripted_engine
):
    conversation = await client.create()
    scripted_engine.replies += [Say("One."), Say("Two.")]
    body = json.dumps({"model": "m", "input": "Hi", "conversation": conversation})
    texts = [await sent(harness, body, count) for count in ("0", "1", "0")]
    async with restarted(harness, scripted_engine) as again:
        texts.append(await sent(again.harness, body, "1"))
    assert texts == ["One.", "One.", "Two.", "Two."]
    assert [call["kind"] for call in harness.calls()] == ["root", "bridged"]
    assert await client.texts(conversation) == ["Hi", "One.", "Hi", "Two."]


async def test_a_conversation_goes_on_after_a_compaction(client, harness, scripted_engine):
    conversation = await client.create({"role": "system", "content": "Stay."})
    scripted_engine.replies += [Say("One."), Say("SUMMARY."), Say("Two."), Say("Three.")]
    await client.ask(user("a"), conversation=conversation)
    compacted = await client.ask({"type": "compaction_trigger"}, conversation=conversation)
    await client.ask(user("b"), conversation=conversation)
    listed = await client.items(conversation)
    assert [item["type"] for item in listed] == ["message"] * 3 + ["compaction"] + ["message"] * 2
    assert listed[3]["id"] == compacted["output"][0]["id"]
    assert [text[-8:] for text in contents(harness.calls()[-1])] == ["Stay.", "SUMMARY.", "b"]
    await client.ask({"type": "item_reference", "id": compacted["output"][0]["id"]}, user("go"))
    assert (await client.ok("GET", f"{RESPONSES}/{compacted['id']}"))["output"] == compacted["output"]


async def test_a_damaged_entry_is_not_left_out(client, harness):
    conversation = await client.create(user("FIRST"))
    await client.ok("POST", f"{CONVERSATIONS}/{conversation}/items", {"items": [user("More")]})
    other = await Client(harness, "s2").create(user("Fine"))
    (path,) = harness.run.glob("events-*.arrow")
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(b"FIRST"))
        file.write(b"X")
    harness.endpoint.forget_idle(0)
    status, answer = await client.request("GET", f"{CONVERSATIONS}/{conversation}")
    assert (status, "damaged" in answer["error"]["message"]) == (500, True)
    assert await Client(harness, "s2").items(other)


async def test_the_bound_is_of_bytes_and_of_entries(client, harness, monkeypatch):
    monkeypatch.setattr(stored, "STORED_BYTES", 40_000)
    status, answer = await client.request("POST", CONVERSATIONS, {"items": [user("\U0001f600" * 10_000)]})
    assert (status, "has stored" in answer["error"]["message"]) == (400, True)
    assert not harness.events("stored")
    created = [await client.request("POST", CONVERSATIONS, {}) for _ in range(12)]
    assert [status for status, _ in created] == [200] * 9 + [400] * 3
    assert stored.STORED_BYTES // stored.ENTRY_BYTES < 1100


async def test_an_entry_is_checked_once(client, monkeypatch):
    conversation = await client.create(user("x" * 100))
    undamaged = mock.Mock(side_effect=stored.undamaged)
    monkeypatch.setattr(stored, "undamaged", undamaged)
    for _ in range(3):
        assert await client.items(conversation)
    assert undamaged.call_count <= 1


async def test_a_page_is_bounded_in_bytes(client):
    conversation = await client.create(*(user("x" * 300_000) for _ in range(9)))
    read, page, after = 0, {"has_more": True}, ""
    while page["has_more"]:
        page = await client.ok("GET", f"{CONVERSATIONS}/{conversation}/items?limit=100{after}")
        assert len(json.dumps(page)) < 2**20 + 2000
        read += len(page["data"])
        after = f"&after={page['last_id']}"
    assert read == 9


async def test_a_strange_limit_is_no_error(client):
    conversation = await client.create(user())
    for limit in ("9" * 5000, "0", "-1", "x", "²"):
        assert len(await client.items(conversation, f"?limit={limit}")) == 1


async def test_an_answer_takes_room_until_it_is_sent(client, harness, monkeypatch):
    conversation = await client.create(user("x" * 250_000))
    held, quota = [], harness.endpoint._bodies.quota

    async def sent(request, body):
        held.append((quota.held["s1"], len(body)))
        return await send_slowly(request, body)

    monkeypatch.setattr(server, "send_slowly", sent)
    assert await client.items(conversation)
    [(taken, length)] = held
    assert taken == length > 250_000
    assert quota.fits("s1", quota.of_session)


async def test_a_request_that_names_an_id_reads_the_rows_of_its_chain(client, harness, monkeypatch):
    conversation = await client.create(user("First."))
    named = (await client.ask(user("Second."), conversation=conversation))["id"]
    for _ in range(20):
        await client.ask(user("Something else."))
    assert await client.texts(conversation)  # whoever asks first after a restart looks at each row once
    row, read = stored.Archive.row, []
    monkeypatch.setattr(stored.Archive, "row", lambda *asked: read.append(asked) or row(*asked))
    counts = []
    for _ in range(3):
        read.clear()
        named = (await client.ask(user("Go on."), previous_response_id=named))["id"]
        counts.append(len(read))
    # calls of the chain, and the rows of the request before: a call, and the event that it was begun
    assert counts == [1, 4, 5]
    read.clear()
    await client.ask(user("Third."), conversation=conversation)
    assert len(read) < 10
    harness.endpoint.writer.close()  # compacts
    await client.ask(user("Go on."), previous_response_id=named)
    assert kinds(harness)[-1] == BRIDGED
