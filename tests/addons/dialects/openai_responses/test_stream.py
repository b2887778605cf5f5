import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.model_call import ContextOverflow, DialectError, Reply, ToolCall
from tests.addons.dialects.openai_responses.test_reply import USAGE, context_of, message_of, replies
from tests.addons.dialects.openai_responses.test_request import decode, decode_items
from tests.deep import examples


def streamed(context, reply, *, pieces=3, keep_alive=False):
    """Return the events of a reply whose text is sent in pieces of `pieces` characters."""
    encoder = openai_responses.stream_encoder(context)
    events = encoder.start()
    for i in range(0, len(reply.reasoning), pieces):
        events += encoder.delta(reply.reasoning[i : i + pieces], "")
        events += encoder.keep_alive() if keep_alive else b""
    for i in range(0, len(reply.content), pieces):
        events += encoder.delta("", reply.content[i : i + pieces])
        events += encoder.keep_alive() if keep_alive else b""
    return events_of(events + encoder.finish(reply, USAGE))


def events_of(data):
    """Return the data of each event. Asserts that it is one line and has the type of the `event:` line."""
    *blocks, rest = data.decode().split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        kind, _, line = block.partition("\n")
        event = json.loads(line.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


@given(replies)
@examples(500)
def test_the_echo_of_a_reply_is_the_reply(reply):
    context = context_of(decode())
    whole = json.loads(openai_responses.encode_reply(context, reply, USAGE))
    assert decode_items(*whole["output"]) == [message_of(reply)]
    done = [e["item"] for e in streamed(context, reply) if e["type"] == "response.output_item.done"]
    assert done == whole["output"]


@given(replies, st.booleans())
@examples(300)
def test_a_stream_ends_with_the_response_that_is_not_streamed(reply, keep_alive):
    context = context_of(decode())
    events = streamed(context, reply, keep_alive=keep_alive)
    assert events[-1]["response"] == json.loads(openai_responses.encode_reply(context, reply, USAGE))
    assert [e["sequence_number"] for e in events] == list(range(len(events)))


class TestStreamEncoder:
    def test_an_item_is_complete_before_the_next_begins(self):
        reply = Reply("Hi", "Hm", [ToolCall("t1", "look", "{}"), ToolCall("t2", "patch", '{"input": "x"}')])
        assert [e["type"].removeprefix("response.") for e in streamed(context_of(decode()), reply)] == [
            "created",
            "in_progress",
            "output_item.added",
            "reasoning_summary_part.added",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.done",
            "reasoning_summary_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
            "completed",
        ]

    def test_reasoning_that_comes_after_content_is_not_sent(self):
        encoder = openai_responses.stream_encoder(context_of(decode()))
        encoder.delta("Hm.", "Hi")
        assert encoder.delta("\n", "") == b""
        *_, last = events_of(encoder.finish(Reply("Hi", "Hm.\n"), USAGE))
        assert last["response"]["output"][0]["summary"][0]["text"] == "Hm."

    def test_no_new_text_is_no_event(self):
        assert openai_responses.stream_encoder(context_of(decode())).delta("", "") == b""

    def test_a_truncated_reply_is_incomplete(self):
        *_, last = streamed(context_of(decode()), Reply("Hal", finish_reason="length"))
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (ContextOverflow(9, 8), "context_length_exceeded"),
            (DialectError("No."), "invalid_prompt"),
            (DialectError("Down.", status=503), "server_error"),
        ],
    )
    def test_a_failure_is_the_last_event(self, error, code):
        encoder = openai_responses.stream_encoder(context_of(decode()))
        encoder.start()
        (event,) = events_of(encoder.error(error))
        assert event["type"] == "response.failed"
        assert event["response"]["status"] == "failed"
        assert event["response"]["error"] == {"code": code, "message": str(error)}
