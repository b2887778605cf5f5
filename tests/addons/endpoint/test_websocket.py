"""The Responses API over a WebSocket, as Codex uses it."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from rolltap.addons.dialects.routes import find_route
from rolltap.addons.endpoint import exchange, generation
from tests.scripted_engine import Answer, Say

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "bash", "description": "Run", "parameters": {"type": "object"}}
TOOL_CALL = '<think>\nI look.\n</think>\n\n<tool_call>\n{"name":  "bash", "arguments": {"a" :true}}\n</tool_call>'


class Codex:
    """A client with one connection."""

    def __init__(self, socket):
        self.socket = socket

    async def create(self, *items, **fields):
        await self.socket.send_json({"type": "response.create", "model": "m", "input": list(items), **fields})

    async def events(self):
        """Return the events up to the one that ends the response."""
        seen = []
        while not seen or seen[-1]["type"] not in ("response.completed", "response.failed", "error"):
            seen.append(json.loads(await self.socket.receive_str()))
        return seen

    async def ask(self, *items, **fields):
        """Send a request and return the last event of the response."""
        await self.create(*items, **fields)
        return (await self.events())[-1]


@asynccontextmanager
async def connected(harness):
    headers = harness.endpoint.headers("s1", "api.openai.com", find_route("GET", PATH, {"upgrade": "websocket"}))
    async with harness.client.ws_connect(harness.url(PATH), headers=headers) as socket:
        yield Codex(socket)


@pytest.fixture
async def codex(harness):
    async with connected(harness) as codex:
        yield codex


def user(text="Hello"):
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def after(ended):
    """Return the field that continues a response."""
    return {"previous_response_id": ended["response"]["id"]}


async def test_a_turn_sends_only_its_new_items(codex, harness, scripted_engine):
    scripted_engine.replies += [Say(TOOL_CALL), Say("Done.")]
    first = await codex.ask(user(), tools=[TOOL])
    (call,) = [item for item in first["response"]["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    second = await codex.ask(result, tools=[TOOL], **after(first))
    assert second["response"]["output"][-1]["content"][0]["text"] == "Done."
    one, two = harness.calls()
    assert (two["kind"], two["parent_id"]) == ("bridged", one["call_id"])
    answer = {"role": "tool", "content": "ok", "tool_call_id": call["call_id"], "name": "bash"}
    assert json.loads(two["messages"]) == [answer]
    assert {call["path"] for call in (one, two)} == {PATH}


async def test_text_with_the_framing_of_a_stream_arrives_as_it_is(codex, scripted_engine):
    text = "data: {} and\n\ndata: x\n\nevent: y"
    scripted_engine.replies.append(Say(text))
    ended = await codex.ask(user())
    assert ended["response"]["output"][-1]["content"][0]["text"] == text


async def test_a_refusal_of_the_engine_is_a_fault_and_one_of_the_recorder_is_not(codex, harness, scripted_engine):
    scripted_engine.replies.append(Answer(400, "bad"))
    assert (await codex.ask(user()))["type"] == "response.failed"
    await codex.socket.send_str("{")
    assert (await codex.events())[-1]["type"] == "error"
    (fault,), (rejected,) = harness.events("fault"), harness.events("rejected")
    assert (fault["call_id"], rejected["call_id"]) == (harness.calls()[0]["call_id"], None)


async def test_a_response_is_prepared_without_asking_the_model(codex, harness, scripted_engine):
    prepared = await codex.ask(user("Be brief."), generate=False, tools=[TOOL])
    assert (prepared["response"]["status"], prepared["response"]["output"]) == ("completed", [])
    assert scripted_engine.requests == []
    await codex.ask(user("Hello"), **after(prepared))
    (call,) = harness.calls()
    assert [message["content"] for message in json.loads(call["messages"])] == ["Be brief.", "Hello"]
    assert json.loads(call["tools"])[0]["function"]["name"] == "bash"


async def test_a_response_of_an_earlier_connection_is_continued_as_often_as_it_is_named(codex, harness):
    first = await codex.ask(user("a"))
    for text in ("b", "c"):
        async with connected(harness) as another:
            await another.ask(user(text), **after(first))
    root, *branches = harness.calls()
    assert [(call["kind"], call["parent_id"]) for call in branches] == [("bridged", root["call_id"])] * 2


async def test_a_prepared_response_can_follow_another(codex, harness):
    first = await codex.ask(user("a"))
    prepared = await codex.ask(user("b"), **after(first), generate=False)
    await codex.ask(user("c"), **after(prepared))
    one, two = harness.calls()
    assert (two["kind"], two["parent_id"]) == ("bridged", one["call_id"])
    assert [message["content"] for message in json.loads(two["messages"])] == ["b", "c"]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"type": "response.create", "previous_response_id": "resp_x", "input": []}, "previous_response_not_found"),
        ({"type": "response.cancel"}, "invalid_request_error"),
        ({"type": "response.create", "input": [{"type": "robot"}]}, "invalid_request_error"),
        ({"type": "response.create", "input": 5}, "invalid_request_error"),
        ([], "invalid_request_error"),
    ],
)
async def test_an_invalid_request_is_refused_and_the_connection_stays_open(codex, message, code):
    await codex.socket.send_json(message)
    (refusal,) = await codex.events()
    assert (refusal["type"], refusal["status"], refusal["error"]["code"]) == ("error", 400, code)
    assert (await codex.ask(user()))["type"] == "response.completed"


async def test_keep_alives_are_events(codex, scripted_engine, monkeypatch):
    monkeypatch.setattr(exchange, "KEEP_ALIVE_SECONDS", 0.01)
    scripted_engine.replies.append(Say("Hi.", hold_after=0))
    await codex.create(user())
    alive = 0
    while alive < 3:
        alive += json.loads(await codex.socket.receive_str())["type"] == "response.in_progress"
    scripted_engine.release()
    assert (await codex.events())[-1]["type"] == "response.completed"


async def test_closing_the_connection_aborts_the_call(codex, harness, scripted_engine, monkeypatch):
    monkeypatch.setattr(generation, "LINGER_SECONDS", 0)
    committed = harness.committed(monkeypatch)
    scripted_engine.replies.append(Say("one two three", hold_after=2))
    await codex.create(user())
    await asyncio.to_thread(scripted_engine.holding.wait, 30)
    codex.socket._response.connection.transport.abort()  # without a close frame, as when a program is killed
    await asyncio.wait_for(committed.wait(), 30)
    (call,) = harness.calls()
    assert (call["status"], len(call["completion_ids"])) == ("aborted", 2)


async def test_a_response_that_is_not_stored_is_known_until_its_continuation_fails(codex, scripted_engine):
    first = await codex.ask(user(), store=False)
    assert first["type"] == "response.completed"
    await codex.socket.send_str("{")  # names nothing
    assert (await codex.events())[-1]["type"] == "error"
    scripted_engine.replies += [Say("Two."), Answer(400, "bad")]
    ends = [(await codex.ask(user("More"), store=False, **after(first)))["type"] for _ in range(3)]
    assert ends == ["response.completed", "response.failed", "error"]
    assert (await codex.ask(user("More"), store=True, **after(first)))["type"] == "response.completed"
