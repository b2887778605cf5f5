import json

from openai.types.chat import ChatCompletion

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import DialectError, ModelCall, Reply, ReplyContext, ToolCall, Usage, WireTool
from tests.addons.dialects.apis import CHAT, events_of, streamed
from tests.addons.dialects.openai_chat.test_request import TARGET, decode_message


def reply_context(**fields):
    return ReplyContext("r1", 5, TARGET, ModelCall("gpt-x", [], [], **fields))


def test_an_error_has_the_apis_shape():
    error = DialectError("Too long.", code="context_length_exceeded")
    assert json.loads(routes.CHAT.encode_error(error))["error"] == {
        "message": "Too long.",
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }
    down = json.loads(routes.CHAT.encode_error(DialectError("Down.", status=503)))["error"]
    assert down["type"] == "server_error"


def test_a_freeform_tool_is_called_with_its_text():
    freeform = reply_context(wire_tools={"patch": WireTool("patch", freeform=True)})
    reply = Reply("", "", [ToolCall("call_1", "patch", '{"input": "*** Begin"}')], "tool_calls")
    body = routes.CHAT.encode_reply(freeform, reply, Usage(7, 3))
    message = ChatCompletion.model_validate_json(body).choices[0].message
    assert (message.tool_calls[0].custom.name, message.tool_calls[0].custom.input) == ("patch", "*** Begin")
    echoed = decode_message(**message.model_dump(exclude_none=True))["tool_calls"][0]["function"]
    assert echoed == {"name": "patch", "arguments": {"input": "*** Begin"}}


def test_usage_is_sent_only_when_asked_for():
    assert b"usage" in streamed(CHAT, reply_context(include_usage=True), Reply("Hi"))
    assert b"usage" not in streamed(CHAT, reply_context(), Reply("Hi"))


def test_an_error_is_an_event_that_says_the_status():
    (event,) = events_of(routes.CHAT.stream_encoder(reply_context()).error(DialectError("Down.", status=503)))
    assert (event["error"]["message"], event["error"]["code"]) == ("Down.", 503)
