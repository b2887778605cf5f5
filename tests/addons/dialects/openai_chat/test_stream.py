import json

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from rolltap.addons.dialects import openai_chat
from rolltap.addons.dialects.model_call import DialectError, ToolCall
from tests.addons.dialects.openai_chat.test_reply import REPLIES, USAGE, reply_context, sent


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
