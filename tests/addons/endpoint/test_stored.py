"""Replies of a session are found by their ids, also after a restart."""

import json
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from tests.addons.endpoint.asking import assistant, kinds, told, values
from tests.addons.harness import recording, user
from tests.scripted_engine import Answer, Say

RESPONSES = "/v1/responses"
TOOL = {"type": "function", "name": "bash", "description": "Run", "parameters": {"type": "object"}}
CALL = (
    '<think>\nI look.\n</think>\n\nWait.\n\n<tool_call>\n{"name":  "bash", "arguments": {"a"'
    " :true}}\n</tool_call>"
)
UNKNOWN = (400, "previous_response_not_found")


class Client:
    """A client of the Responses API that asks as one session, with these fields."""

    def __init__(self, harness, session="s1", **fields):
        self.harness = harness
        self.session = session
        self.fields = {"model": "m", "tools": [TOOL], **fields}

    async def request(self, *items, **fields):
        """Return the status and the body of the answer."""
        body = {**self.fields, "input": list(items), **fields}
        status, text = await self.harness.send(body, path=RESPONSES, session=self.session)
        return status, json.loads(text)

    async def ask(self, *items, **fields):
        """Return the response to a request that is served."""
        status, answer = await self.request(*items, **fields)
        assert status == 200, answer
        return answer

    async def refusal(self, *items, **fields):
        """Return the status, the code and the message of a request that is refused."""
        status, answer = await self.request(*items, **fields)
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
    found = []
    for item in answer["output"]:
        if item["type"] == "function_call":
            output = {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
            found.append(output)
    return found


def references(answer):
    return [{"type": "item_reference", "id": item["id"]} for item in answer["output"]]


@pytest.mark.parametrize("by", ["id", "items"])
async def test_a_response_is_continued_token_for_token_also_of_an_idle_session_and_after_a_restart(
    client, harness, scripted_engine, by
):
    scripted_engine.otherwise = lambda request: Say(CALL)
    items = [user()]
    previous = None
    async with restarted(harness, scripted_engine) as another:
        for asker in (client, client, client, another):
            answer = await asker.ask(*items, previous_response_id=previous)
            assert answer["previous_response_id"] == previous
            if by == "id":
                items = outputs(answer)
                previous = answer["id"]
            else:
                items += [*references(answer), *outputs(answer)]
            harness.endpoint.forget_idle(0)
            assert not harness.endpoint.sessions
    assert kinds(harness) == ["root", "bridged", "bridged", "bridged"]


async def test_nothing_of_another_session_is_found(client, harness, scripted_engine):
    scripted_engine.replies.append(Say(CALL))
    answer = await client.ask(user())
    other = Client(harness, "s2")
    assert (await other.refusal(user(), previous_response_id=answer["id"]))[:2] == UNKNOWN
    for reference in references(answer):
        status, _, why = await other.refusal(user(), reference)
        assert status == 404
        assert why == f"Item with id '{reference['id']}' not found."
    assert len(harness.calls()) == 1


async def test_a_call_that_failed_or_is_unknown_is_not_found(client, harness, scripted_engine):
    scripted_engine.replies.append(Answer(400, "bad"))
    await client.refusal(user("First."))
    (failed,) = harness.calls()
    assert failed["status"] == "failed"
    for call_id in (failed["call_id"], "0" * 32, ""):
        refusal = await client.refusal(user(), previous_response_id=f"resp_{call_id}")
        assert refusal == (*UNKNOWN, f"Previous response with id 'resp_{call_id}' not found.")
        item = {"type": "item_reference", "id": f"msg_{call_id}_0"}
        assert (await client.refusal(user(), item))[0] == 404
    assert len(harness.events("rejected")) == 6


async def test_an_item_can_be_named_once(client):
    (reference,) = references(await client.ask(user()))
    status, _, why = await client.refusal(user(), reference, reference)
    assert status == 400
    assert "Duplicate item" in why


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
async def test_a_conversation_is_refused_with_the_field_that_is_served(
    client, harness, conversation
):
    status, _, why = await client.refusal(user(), conversation=conversation)
    assert status == 400
    assert "name the last response as 'previous_response_id'" in why
    assert len(harness.events("rejected")) == 1


async def test_a_retry_by_id_gets_the_reply_that_was_sampled_also_after_a_restart(
    client, harness, scripted_engine
):
    scripted_engine.replies += [Say("One."), Say("Two."), Say("Three.")]
    first = await client.ask(user())
    body = {"model": "m", "input": "Go on.", "previous_response_id": first["id"]}

    async def sent(harness, count):
        headers = {"x-stainless-retry-count": count}
        _, text = await harness.send(body, path=RESPONSES, headers=headers)
        return json.loads(text)["output"][-1]["content"][0]["text"]

    assert await sent(harness, "0") == "Two."
    assert await sent(harness, "1") == "Two."
    assert await sent(harness, "0") == "Three."
    async with restarted(harness, scripted_engine) as again:
        assert await sent(again.harness, "1") == "Three."
    assert len(harness.calls()) == 3


async def test_a_compaction_is_found_by_its_id(client, harness, scripted_engine):
    scripted_engine.replies += [Say("One."), Say("SUMMARY."), Say("Two.")]
    first = await client.ask(user("a"))
    compacted = await client.ask({"type": "compaction_trigger"}, previous_response_id=first["id"])
    await client.ask(*references(compacted), user("b"))
    summary, message = json.loads(harness.calls()[-1]["messages"])
    assert summary["content"].endswith("SUMMARY.")
    assert message["content"] == "b"


async def test_a_damaged_call_is_not_found(client, harness, scripted_engine):
    scripted_engine.replies += [Say("SPOILED"), Say("Fine.")]
    spoiled = await client.ask(user("First."))
    fine = await client.ask(user("Second."))
    (path,) = harness.run.glob("calls-*.arrow")
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(b"SPOILED"))
        file.write(b"X")
    harness.endpoint.forget_idle(0)
    assert (await client.refusal(user(), previous_response_id=spoiled["id"]))[:2] == UNKNOWN
    await client.ask(user(), previous_response_id=fine["id"])


async def test_a_request_that_names_an_id_reads_no_rows_and_shares_the_messages_of_the_one_before(
    client, harness, monkeypatch
):
    named = (await client.ask(user("First.")))["id"]
    monkeypatch.setattr("rolltap.addons.store.index.SegmentReader", None)  # whoever reads, fails
    (session,) = harness.endpoint.sessions.values()
    begin = session.begin
    asked = []

    def seen(decoded, *rest):
        asked.append(decoded.model_call.messages)
        return begin(decoded, *rest)

    monkeypatch.setattr(session, "begin", seen)
    for _ in range(3):
        named = (await client.ask(user("Go on."), previous_response_id=named))["id"]
    assert kinds(harness) == ["root", "bridged", "bridged", "bridged"]
    for before, after in pairwise(asked):
        assert all(one is other for one, other in zip(before, after, strict=False))


@pytest.mark.parametrize("closed", [False, True])
async def test_a_call_of_another_api_is_part_of_the_conversation_that_it_began(
    client, harness, scripted_engine, closed
):
    """Also for an idle session, after a restart, and in a compacted run."""
    client.fields["tools"] = []
    reply = await told(harness, user("First."))
    first = await client.ask(user("First."), assistant(reply), user("Go on."))
    second = await client.ask(user("And?"), previous_response_id=first["id"])
    harness.endpoint.forget_idle(0)
    third = await client.ask(user("Well?"), previous_response_id=second["id"])
    if closed:
        harness.endpoint.writer.close()
    async with restarted(harness, scripted_engine) as again:
        again.fields["tools"] = []
        last = await again.ask(user("So?"), previous_response_id=third["id"])
        await again.ask(user("No?"), previous_response_id=first["id"])
    assert kinds(harness) == ["root", *["bridged"] * 5]
    assert last["previous_response_id"] == third["id"]
    asked = [
        json.loads(messages)[-1]["content"] for messages in values(harness.calls(), "messages")
    ]
    assert asked == ["First.", "Go on.", "And?", "Well?", "So?", "No?"]


async def test_a_call_of_another_api_is_not_found_by_an_id_of_responses(client, harness):
    await told(harness, user("First."))
    (call,) = harness.calls()
    for _ in range(2):
        refusal = await client.refusal(user(), previous_response_id=f"resp_{call['call_id']}")
        assert refusal[:2] == UNKNOWN
        harness.endpoint.forget_idle(0)
