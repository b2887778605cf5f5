"""Conversations and stored responses over OpenAI's own SDK."""

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.model_call import Reply
from rolltap.addons.dialects.routes import find_route
from rolltap.addons.dialects.stored import DialectError, Stored, StoredRequest
from tests.addons.dialects.openai_responses.test_items import LOOK
from tests.addons.dialects.server import NOW, TALK, Server, stored_call

USER = {"role": "user", "content": "Hello"}


@pytest.fixture
def server():
    return Server(None, stored_call("c1", [USER], LOOK), stored_call("c2", [USER], TALK))


@pytest.fixture
def sdk(server):
    return OpenAI(api_key="k", max_retries=0, http_client=server.client)


def texts(page):
    return [item.content[0].text for item in page]


def test_a_conversation_has_the_items_that_it_was_given_in_their_order(sdk):
    created = sdk.conversations.create(items=[USER], metadata={"topic": "x"})
    assert (created.id, created.created_at, created.metadata) == ("conv_new1", NOW, {"topic": "x"})
    added = sdk.conversations.items.create(created.id, items=[{"role": "assistant", "content": "Hi."}, USER])
    assert [item.role for item in added.data] == ["assistant", "user"]
    assert texts(sdk.conversations.items.list(created.id, order="asc")) == ["Hello", "Hi.", "Hello"]
    assert sdk.conversations.retrieve(created.id) == created


def test_a_call_adds_its_input_and_its_reply(sdk, server):
    created = sdk.conversations.create()
    server.add(f"/conversations/{created.id}", {"items": [USER], "call": "c1"})
    listed = list(sdk.conversations.items.list(created.id, order="asc"))
    assert [item.type for item in listed] == ["message", "reasoning", "function_call", "function_call"]
    assert [item.id for item in listed] == ["msg_c1_i0", "rs_c1_0", "fc_c1_1", "fc_c1_2"]


def test_items_come_in_pages_newest_first(sdk):
    created = sdk.conversations.create(items=[{**USER, "content": str(number)} for number in range(45)])
    first = sdk.conversations.items.list(created.id)
    assert (texts(first.data)[:2], len(first.data), first.has_more) == (["44", "43"], 20, True)
    assert texts(first) == [str(number) for number in reversed(range(45))]
    assert len(sdk.conversations.items.list(created.id, limit=100).data) == 45


def test_an_item_is_deleted(sdk):
    created = sdk.conversations.create(items=[USER, {**USER, "content": "More"}])
    [first, second] = sdk.conversations.items.list(created.id, order="asc")
    assert sdk.conversations.items.retrieve(first.id, conversation_id=created.id) == first
    sdk.conversations.items.delete(first.id, conversation_id=created.id)
    assert list(sdk.conversations.items.list(created.id)) == [second]
    with pytest.raises(NotFoundError):
        sdk.conversations.items.delete(first.id, conversation_id=created.id)


def test_a_reference_in_a_conversation_becomes_the_item(sdk):
    created = sdk.conversations.create(items=[{"type": "item_reference", "id": "fc_c1_1"}])
    assert [item.name for item in sdk.conversations.items.list(created.id)] == ["look"]
    with pytest.raises(NotFoundError):
        sdk.conversations.items.create(created.id, items=[{"type": "item_reference", "id": "fc_c9_1"}])


def test_metadata_is_replaced(sdk):
    created = sdk.conversations.create(metadata={"a": "1"})
    assert sdk.conversations.update(created.id, metadata={"b": "2"}).metadata == {"b": "2"}
    assert sdk.conversations.retrieve(created.id).metadata == {"b": "2"}


def test_a_deleted_conversation_is_not_found(sdk):
    created = sdk.conversations.create(items=[USER])
    assert sdk.conversations.delete(created.id).deleted
    for ask in (sdk.conversations.retrieve, sdk.conversations.items.list, sdk.conversations.delete):
        with pytest.raises(NotFoundError, match="Conversation with id 'conv_new1' not found"):
            ask(created.id)


@pytest.mark.parametrize("items", ["Hello", [5], {"role": "user"}])
def test_items_that_are_no_objects_are_refused(sdk, items):
    with pytest.raises(BadRequestError, match="items"):
        sdk.conversations.create(items=items)


def test_a_response_is_read_again(sdk):
    response = sdk.responses.retrieve("resp_c1")
    assert (response.id, response.status, response.model) == ("resp_c1", "completed", "gpt-x")
    assert [item.id for item in response.output] == ["rs_c1_0", "fc_c1_1", "fc_c1_2"]
    assert response.usage.total_tokens == 10
    assert sdk.responses.retrieve("resp_c2").output_text == "Hi."


def test_a_response_that_was_cut_says_so():
    cut = Server(None, stored_call("c1", [USER], Reply("And th", finish_reason="length")))
    assert OpenAI(api_key="k", http_client=cut.client).responses.retrieve("resp_c1").status == "incomplete"


def test_a_deleted_response_is_not_found(sdk):
    sdk.responses.delete("resp_c1")
    for ask in (sdk.responses.retrieve, sdk.responses.delete):
        with pytest.raises(NotFoundError, match="Response with id 'resp_c1' not found"):
            ask("resp_c1")
    assert sdk.responses.retrieve("resp_c2").id == "resp_c2"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/input_tokens"),
        ("GET", "/v1/conversations"),
        ("PUT", "/v1/conversations/conv_1"),
        ("POST", "/v1/conversations/conv_1/items/msg_1"),
        ("GET", "/v1/conversations/conv_1/messages"),
        ("GET", "/conversations/conv_1"),
    ],
)
def test_other_requests_are_not_served(method, path):
    route = find_route(method, path, {})
    assert route is None or route.service != "stored"
    with pytest.raises(DialectError, match="not served"):
        openai_responses.serve(StoredRequest(method, path, b"", "new", 5), Stored())
