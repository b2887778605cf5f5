import json

from hypothesis import strategies as st

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.model_call import (
    ContextOverflow,
    DialectError,
    Reply,
    ReplyContext,
    ToolCall,
    Usage,
    parse_arguments,
)


def context_of(call):
    return ReplyContext("c1", 5, "/v1/responses", call)


USAGE = Usage(prompt=7, completion=3, cached=4)
text = st.text(max_size=12)
names_and_arguments = (
    st.tuples(st.sampled_from(["look", "unheard_of"]), st.just("{}") | st.just('{"at":  "é"}') | text)
    | st.tuples(st.sampled_from(["patch", "agents__exec"]), text.map(lambda t: json.dumps({"input": t})))
    | st.tuples(st.just("agents__spawn"), st.just('{"n": [1]}'))
)
replies = st.builds(
    Reply,
    content=text,
    reasoning=text,
    tool_calls=st.lists(names_and_arguments, max_size=3).map(
        lambda calls: [ToolCall(f"t{i}", *call) for i, call in enumerate(calls)]
    ),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls"]),
)


def message_of(reply):
    """Return the message that the harness's echo of a reply must decode to."""
    message = reply.to_message()
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
    return message | ({"call_id": "c1"} if reply.reasoning else {})


def test_an_error_has_the_apis_shape():
    assert json.loads(openai_responses.encode_error(ContextOverflow(9, 8)))["error"] == {
        "message": str(ContextOverflow(9, 8)),
        "type": "invalid_request_error",
        "param": None,
        "code": "context_length_exceeded",
    }
    assert (
        json.loads(openai_responses.encode_error(DialectError("Down.", status=503)))["error"]["type"] == "server_error"
    )
