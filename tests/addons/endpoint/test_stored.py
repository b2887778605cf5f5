"""Replies of a session are found by their ids, also after a restart."""

import io
import json
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from tests.addons.harness import recording, said, user
from tests.scripted_engine import Answer, Say

RESPONSES = "/v1/responses"
TOOL = {"type": "function", "name": "bash", "description": "Run", "parameters": {"type": "object"}}
CALL = (
    '<think>\nI look.\n</think>\n\nWait.\n\n<tool_call>\n{"name":  "bash", "arguments": {"a"'
    " :true}}\n</tool_call>"
)


class Client:
    """A client that asks as one session."""

    def __init__(self, harness, session="s1"):
        self.harness = harness
        self.session = session

    async def request(self, method, path, body=None):
        """Return the status and the body of the answer."""
        headers = self.harness.endpoint.headers(self.session, "api")
        data = None if body is None else io.BytesIO(json.dumps(body).encode())
        async with self.harness.client.request(
            method, self.harness.url(path), data=data, headers=headers
        ) as answer:
            return answer.status, await answer.json()

    async def ok(self, method, path, body=None):
        """Return the answer to a request that is served."""
        status, answer = await self.request(method, path, body)
        assert status == 200, answer
        return answer

    async def ask(self, *items, **fields):
        """Return the response to a request of the Responses API."""
        return await self.ok(
            "POST", RESPONSES, {"model": "m", "input": list(items), "tools": [TOOL], **fields}
        )

    async def refusal(self, *items, **fields):
        """Return the status, the code and the message of a request of the Responses API that is
        refused."""
        status, answer = await self.request(
            "POST", RESPONSES, {"model": "m", "input": list(items), **fields}
        )
        return status, answer["error"]["code"], answer["error"]["message"]


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
    return [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
        for call in calls
    ]


def references(answer):
    return [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]


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


async def test_a_restarted_recorder_finds_all_replies(client, harness, scripted_engine):
    scripted_engine.replies += [Say(CALL), Say("Done."), Say("Done.")]
    first = await client.ask(user("By id."), instructions="Be brief.")
    async with restarted(harness, scripted_engine) as again:
        brief = {"instructions": "Be brief."}
        await again.ask(*outputs(first), previous_response_id=first["id"], **brief)
        await again.ask(user("By id."), *references(first), *outputs(first), **brief)
    assert kinds(harness)[1:] == [BRIDGED] * 2


async def test_nothing_of_another_session_is_found(client, harness, scripted_engine):
    scripted_engine.replies.append(Say(CALL))
    answer = await client.ask(user())
    other = Client(harness, "s2")
    assert (await other.refusal(user(), previous_response_id=answer["id"]))[:2] == (
        400,
        "previous_response_not_found",
    )
    for reference in references(answer):
        status, _, why = await other.refusal(user(), reference)
        assert (status, why) == (404, f"Item with id '{reference['id']}' not found.")
    assert len(harness.calls()) == 1


async def test_a_call_that_failed_or_is_unknown_is_not_found(client, harness, scripted_engine):
    scripted_engine.replies.append(Answer(400, "bad"))
    assert (await client.refusal(user("First.")))[0] >= 400
    (failed,) = harness.calls()
    assert failed["status"] == "failed"
    for call_id in (failed["call_id"], "0" * 32, ""):
        refusal = await client.refusal(user(), previous_response_id=f"resp_{call_id}")
        why = f"Previous response with id 'resp_{call_id}' not found."
        assert refusal == (400, "previous_response_not_found", why)
        assert (await client.refusal(user(), {"type": "item_reference", "id": f"msg_{call_id}_0"}))[
            0
        ] == 404
    assert len(harness.events("rejected")) == 6


async def test_an_item_can_be_named_once(client):
    (reference,) = references(await client.ask(user()))
    status, _, why = await client.refusal(user(), reference, reference)
    assert (status, "Duplicate item" in why) == (400, True)


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
async def test_a_conversation_is_refused_with_the_field_that_is_served(
    client, harness, conversation
):
    status, _, why = await client.refusal(user(), conversation=conversation)
    assert (status, "name the last response as 'previous_response_id'" in why) == (400, True)
    assert len(harness.events("rejected")) == 1


async def test_a_retry_by_id_gets_the_reply_that_was_sampled_also_after_a_restart(
    client, harness, scripted_engine
):
    scripted_engine.replies += [Say("One."), Say("Two."), Say("Three.")]
    first = await client.ask(user())
    body = {"model": "m", "input": "Go on.", "previous_response_id": first["id"]}

    async def sent(harness, count):
        _, text = await harness.send(
            body, path=RESPONSES, headers={"x-stainless-retry-count": count}
        )
        return json.loads(text)["output"][-1]["content"][0]["text"]

    texts = [await sent(harness, count) for count in ("0", "1", "0")]
    async with restarted(harness, scripted_engine) as again:
        texts.append(await sent(again.harness, "1"))
    assert texts == ["Two.", "Two.", "Three.", "Three."]
    assert len(harness.calls()) == 3


async def test_a_compaction_is_found_by_its_id(client, harness, scripted_engine):
    scripted_engine.replies += [Say("One."), Say("SUMMARY."), Say("Two.")]
    first = await client.ask(user("a"))
    compacted = await client.ask({"type": "compaction_trigger"}, previous_response_id=first["id"])
    await client.ask(*references(compacted), user("b"))
    texts = [message["content"] for message in json.loads(harness.calls()[-1]["messages"])]
    assert [text[-8:] for text in texts] == ["SUMMARY.", "b"]


async def test_a_damaged_call_is_not_found(client, harness, scripted_engine):
    scripted_engine.replies += [Say("SPOILED"), Say("Fine.")]
    spoiled = await client.ask(user("First."))
    fine = await client.ask(user("Second."))
    (path,) = harness.run.glob("calls-*.arrow")
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(b"SPOILED"))
        file.write(b"X")
    harness.endpoint.forget_idle(0)
    refusal = await client.refusal(user(), previous_response_id=spoiled["id"])
    assert refusal[:2] == (400, "previous_response_not_found")
    await client.ask(user(), previous_response_id=fine["id"])


async def test_a_request_that_names_an_id_reads_no_rows_of_a_session_that_runs(
    client, harness, monkeypatch
):
    named = (await client.ask(user("First.")))["id"]
    monkeypatch.setattr("rolltap.addons.store.index.SegmentReader", None)  # whoever reads, fails
    for _ in range(3):
        named = (await client.ask(user("Go on."), previous_response_id=named))["id"]
    assert kinds(harness)[1:] == [BRIDGED] * 3


async def test_messages_of_named_calls_are_the_same_objects_in_each_request(
    client, harness, monkeypatch
):
    named = (await client.ask(user("First.")))["id"]
    (session,) = harness.endpoint.sessions.values()
    asked = []
    begin = session.begin
    keep = asked.append
    monkeypatch.setattr(
        session, "begin", lambda read, *rest: keep(read.model_call) or begin(read, *rest)
    )
    for _ in range(3):
        named = (await client.ask(user("Go on."), previous_response_id=named))["id"]
    for before, after in pairwise(asked):
        assert all(a is b for a, b in zip(before.messages, after.messages, strict=False))


@pytest.mark.parametrize("closed", [False, True])
async def test_a_call_of_another_api_is_part_of_the_conversation_that_it_began(
    client, harness, scripted_engine, closed
):
    """Also for an idle session, after a restart, and in a compacted run."""
    reply = await harness.ask(user("First."))
    echo = {"role": "assistant", "content": said(reply[1])}
    first = await client.ask(user("First."), echo, user("Go on."), tools=[])
    second = await client.ask(user("And?"), previous_response_id=first["id"], tools=[])
    harness.endpoint.forget_idle(0)
    third = await client.ask(user("Well?"), previous_response_id=second["id"], tools=[])
    if closed:
        harness.endpoint.writer.close()
    async with restarted(harness, scripted_engine) as again:
        last = await again.ask(user("So?"), previous_response_id=third["id"], tools=[])
        await again.ask(user("No?"), previous_response_id=first["id"], tools=[])
    assert kinds(harness)[1:] == [BRIDGED] * 5
    assert last["previous_response_id"] == third["id"]
    asked = [json.loads(call["messages"])[-1]["content"] for call in harness.calls()]
    assert asked == ["First.", "Go on.", "And?", "Well?", "So?", "No?"]


async def test_a_call_of_another_api_is_not_found_by_an_id_of_responses(client, harness):
    await harness.ask(user("First."))
    (call,) = harness.calls()
    for _ in range(2):
        refusal = await client.refusal(user(), previous_response_id=f"resp_{call['call_id']}")
        assert refusal[:2] == (400, "previous_response_not_found")
        harness.endpoint.forget_idle(0)
