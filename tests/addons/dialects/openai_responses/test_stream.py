import pytest

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import ContextOverflow, DialectError, Reply, ToolCall
from tests.addons.dialects.apis import RESPONSES, USAGE, events_of, streamed

ITEMS = """
created in_progress
output_item.added reasoning_summary_part.added reasoning_summary_text.delta
reasoning_summary_text.done
reasoning_summary_part.done output_item.done
output_item.added content_part.added output_text.delta output_text.done content_part.done
output_item.done
output_item.added function_call_arguments.delta function_call_arguments.done output_item.done
output_item.added custom_tool_call_input.delta custom_tool_call_input.done output_item.done
completed
"""


def test_an_item_is_complete_before_the_next_begins():
    calls = [ToolCall("t1", "look", "{}"), ToolCall("t2", "patch", '{"input": "x"}')]
    events = events_of(streamed(RESPONSES, RESPONSES.context(), Reply("Hi", "Hm", calls)))
    assert [event["type"].removeprefix("response.") for event in events] == ITEMS.split()


def test_reasoning_that_comes_after_content_is_not_sent_and_keeps_the_stream_alive():
    encoder = routes.RESPONSES.stream_encoder(RESPONSES.context())
    encoder.delta("Hm.", "Hi")
    (alive,) = events_of(encoder.delta("\n", ""))
    assert alive["type"] == "response.in_progress"
    *_, last = events_of(encoder.finish(Reply("Hi", "Hm.\n"), USAGE))
    assert last["response"]["output"][0]["summary"][0]["text"] == "Hm."


def test_a_reply_whose_reasoning_comes_only_after_content_is_a_message():
    encoder = routes.RESPONSES.stream_encoder(RESPONSES.context())
    sent = encoder.delta("", "Hi") + encoder.delta("Hm.", "")
    sent += encoder.finish(Reply("Hi", "Hm."), USAGE)
    (item,) = RESPONSES.assembled(sent)["output"]
    assert item["type"] == "message"


def test_a_truncated_reply_is_incomplete():
    cut = Reply("Hal", finish_reason="length")
    *_, last = events_of(streamed(RESPONSES, RESPONSES.context(), cut))
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
def test_a_failure_is_the_last_event(error, code):
    encoder = routes.RESPONSES.stream_encoder(RESPONSES.context())
    encoder.start()
    (event,) = events_of(encoder.error(error))
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": code, "message": str(error)}
