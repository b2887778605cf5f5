import json

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rolltap.addons.dialects import openai_chat
from rolltap.addons.dialects.model_call import (
    DialectError,
    ModelCall,
    Reply,
    ReplyContext,
    ServedModel,
    ToolCall,
    Usage,
    WireTool,
)
from tests.addons.dialects.openai_chat.test_request import TARGET, decode_message


def reply_context(**fields):
    return ReplyContext("r1", 5, TARGET, ModelCall("gpt-x", [], [], **fields))


LOOK = ToolCall("call_1", "look", '{"at": "é"}')
REPLIES = [
    Reply("Hi there.", "", [], "stop"),
    Reply("Hi <b>\u2028😀", "Hm.", [], "length"),
    Reply("", "I look.", [LOOK], "tool_calls"),
    Reply("Both:", "", [LOOK, ToolCall("call_2", "look", "not JSON")], "tool_calls"),
    Reply("half \ud83d", "", [], "stop"),
]
USAGE = Usage(prompt=7, completion=3, cached=4)


def sent(text):
    return text.replace("\ud83d", "?")


class TestEncodeReply:
    @pytest.mark.parametrize("reply", REPLIES)
    def test_the_openai_sdk_reads_it(self, reply):
        body = openai_chat.encode_reply(reply_context(), reply, USAGE)
        completion = ChatCompletion.model_validate_json(body)
        assert (completion.id, completion.model, completion.created) == ("chatcmpl-r1", "gpt-x", 5)
        (choice,) = completion.choices
        message = choice.message
        assert choice.finish_reason == reply.finish_reason
        assert message.content == (None if reply.tool_calls and not reply.content else sent(reply.content))
        assert getattr(message, "reasoning_content", "") == reply.reasoning
        calls = [ToolCall(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or []]
        assert calls == reply.tool_calls
        usage = completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 3, 10)
        assert usage.prompt_tokens_details.cached_tokens == 4

    @pytest.mark.parametrize("reply", REPLIES[:-1])
    def test_decoding_its_message_gives_the_reply(self, reply):
        message = json.loads(openai_chat.encode_reply(reply_context(), reply, USAGE))["choices"][0]["message"]
        decoded = decode_message(**message)
        assert decoded["content"] == reply.content
        assert decoded.get("reasoning_content", "") == reply.reasoning
        assert [c["id"] for c in decoded.get("tool_calls", [])] == [c.id for c in reply.tool_calls]


def test_an_error_has_the_apis_shape():
    overflow = json.loads(openai_chat.encode_error(DialectError("Too long.", code="context_length_exceeded")))["error"]
    assert ErrorObject.model_validate(overflow).message == "Too long."
    assert (overflow["type"], overflow["code"]) == ("invalid_request_error", "context_length_exceeded")
    down = json.loads(openai_chat.encode_error(DialectError("Down.", status=503)))["error"]
    assert down["type"] == "server_error"


def test_models_are_listed():
    (model,) = json.loads(openai_chat.encode_models("/v1/models", [ServedModel("tiny", 4096)], 5))["data"]
    assert Model.model_validate(model).id == "tiny"
    assert model["max_model_len"] == 4096


def test_a_model_is_found_by_any_name():
    model = json.loads(openai_chat.encode_models("/v1/models/gpt-x?a=b", [ServedModel("tiny", 4096)], 5))
    assert (Model.model_validate(model).id, model["max_model_len"]) == ("gpt-x", 4096)


def test_a_freeform_tool_is_called_with_its_text():
    freeform = reply_context(wire_tools={"patch": WireTool("patch", freeform=True)})
    reply = Reply("", "", [ToolCall("call_1", "patch", '{"input": "*** Begin"}')], "tool_calls")
    message = ChatCompletion.model_validate_json(openai_chat.encode_reply(freeform, reply, USAGE)).choices[0].message
    assert (message.tool_calls[0].custom.name, message.tool_calls[0].custom.input) == ("patch", "*** Begin")
    echoed = decode_message(**message.model_dump(exclude_none=True))["tool_calls"][0]["function"]
    assert echoed == {"name": "patch", "arguments": {"input": "*** Begin"}}


def streamed(reply, *, include_usage=True, keep_alive=False, piece=3):
    """Return the events of a reply whose text is sent in pieces."""
    encoder = openai_chat.StreamEncoder(reply_context(include_usage=include_usage))
    events = encoder.start()
    for text, name in ((reply.reasoning, "reasoning"), (reply.content, "content")):
        for start in range(0, len(text), piece):
            events += encoder.delta(**{"reasoning": "", "content": "", name: text[start : start + piece]})
            events += encoder.keep_alive() if keep_alive else b""
    return events + encoder.finish(reply, USAGE)


def data_of(events):
    *lines, rest = events.decode().split("\n\n")
    assert rest == ""
    return [line.removeprefix("data: ") for line in lines]


class TestStreamEncoder:
    @pytest.mark.parametrize("keep_alive", [False, True])
    @pytest.mark.parametrize("reply", REPLIES)
    def test_the_events_add_up_to_the_reply_in_the_openai_sdk(self, reply, keep_alive):
        *chunks, done = data_of(streamed(reply, keep_alive=keep_alive))
        assert done == "[DONE]"
        state = ChatCompletionStreamState()
        for chunk in chunks:
            state.handle_chunk(ChatCompletionChunk.model_validate_json(chunk))
        (choice,) = state.current_completion_snapshot.choices
        assert choice.finish_reason == reply.finish_reason
        assert choice.message.role == "assistant"
        assert choice.message.content == sent(reply.content)
        assert getattr(choice.message, "reasoning_content", "") == reply.reasoning
        calls = [ToolCall(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        assert calls == reply.tool_calls

    def test_no_new_text_is_no_event(self):
        assert openai_chat.StreamEncoder(reply_context()).delta("", "") == b""

    def test_usage_is_the_last_chunk_when_asked_for(self):
        *_, last, _done = data_of(streamed(REPLIES[0]))
        chunk = ChatCompletionChunk.model_validate_json(last)
        assert (chunk.choices, chunk.usage.total_tokens) == ([], 10)

    def test_usage_is_not_sent_otherwise(self):
        assert b"usage" not in streamed(REPLIES[0], include_usage=False)

    def test_an_error_is_an_event_that_says_the_status(self):
        (event,) = data_of(openai_chat.StreamEncoder(reply_context()).error(DialectError("Down.", status=503)))
        told = json.loads(event)["error"]
        assert (told["message"], told["code"]) == ("Down.", 503)
