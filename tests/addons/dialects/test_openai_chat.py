import json

import pytest
from openai.types.chat import ChatCompletion

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import (
    DialectError,
    ModelCall,
    Reply,
    ReplyContext,
    ToolCall,
    Usage,
    WireTool,
    assistant_message,
    message_tool_call,
)
from rolltap.addons.dialects.fields import parse_object
from tests.addons.dialects import hostile

TARGET = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}
REQUEST = json.loads(r"""
{
  "model": "gpt-x",
  "messages": [
    {"role": "developer", "content": "Be brief."},
    {
      "role": "user",
      "content": [{"type": "text", "text": "Look "}, {"type": "text", "text": "there."}]
    },
    {
      "role": "assistant",
      "content": null,
      "reasoning_content": "I look.",
      "tool_calls": [
        {
          "id": "c1",
          "type": "function",
          "function": {"name": "look", "arguments": "{\"at\": \"\\u00e9\", \"n\": 1}"}
        }
      ]
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Nothing."}
  ],
  "tools": [
    {
      "type": "function",
      "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    }
  ],
  "stream": true,
  "stream_options": {"include_usage": true},
  "max_tokens": 9,
  "max_completion_tokens": 5,
  "temperature": 0.0,
  "stop": null
}
""")


def decode(**changes):
    return routes.CHAT.decode(parse_object(json.dumps({**REQUEST, **changes}).encode()), TARGET)


def decode_message(**message):
    return decode(messages=[message]).messages[0]


def arguments_of(text):
    call = {"id": "c1", "function": {"name": "look", "arguments": text}}
    (call,) = decode_message(role="assistant", tool_calls=[call])["tool_calls"]
    return call["function"]["arguments"]


class TestDecode:
    def test_a_request_becomes_a_model_call(self):
        made = message_tool_call("c1", "look", {"at": "é", "n": 1})
        assert decode() == ModelCall(
            model="gpt-x",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Look there."},
                assistant_message("", "I look.", [made]),
                {"role": "tool", "content": "Nothing.", "tool_call_id": "c1", "name": "look"},
            ],
            tools=[TOOL],
            stream=True,
            include_usage=True,
            max_tokens=5,
            requested_sampling={"temperature": 0.0},
        )

    @pytest.mark.parametrize(
        ("written", "parsed"),
        [
            ('{"a": [true, 1.5]}', {"a": [True, 1.5]}),
            ("{'a': 1}", "{'a': 1}"),
            ("[" * 100_000, "[" * 100_000),
            ("", ""),
            (None, {}),
            ({"a": 1}, {"a": 1}),
        ],
        ids=["JSON", "not JSON", "too deep", "empty", "none", "an object"],
    )
    def test_tool_arguments_are_parsed_and_stay_text_when_they_are_not_json(self, written, parsed):
        assert arguments_of(written) == parsed

    def test_a_freeform_tool_is_a_function_of_one_text(self):
        grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: PATCH"}}
        freeform = {"name": "patch", "description": "Edits.", "format": grammar}
        call = decode(tools=[{"type": "custom", "custom": freeform}])
        (tool,) = call.tools
        assert tool["function"]["parameters"]["required"] == ["input"]
        assert "start: PATCH" in tool["function"]["description"]
        assert call.wire_tools == {"patch": WireTool("patch", freeform=True)}


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
    called = message.tool_calls[0].custom
    assert (called.name, called.input) == ("patch", "*** Begin")
    (echoed,) = decode_message(**message.model_dump(exclude_none=True))["tool_calls"]
    assert echoed["function"] == {"name": "patch", "arguments": {"input": "*** Begin"}}


def test_usage_is_sent_only_when_asked_for():
    for asked in (True, False):
        encoder = routes.CHAT.stream_encoder(reply_context(include_usage=asked))
        assert (b'"usage":' in encoder.finish(Reply("Hi"), Usage(7, 3))) == asked


def test_an_error_is_an_event_that_says_the_status():
    event = routes.CHAT.stream_encoder(reply_context()).error(DialectError("Down.", status=503))
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert (error["message"], error["code"]) == ("Down.", 503)


REFUSED = hostile.cases("""
'messages'
    {"messages": []}
    {"messages": {}}
    {"messages": null}
'messages[0]'
    {"messages": ["Hi"]}
'messages[1].role'
    {"messages": [{"role": "user", "content": "x"}, {"role": "robot"}]}
'messages[0].role'
    {"messages": [{"role": ["user"]}]}
'messages[0].content'
    {"messages": [{"role": "user", "content": 5}]}
'messages[0].content[0]'
    {"messages": [{"role": "user", "content": ["x"]}]}
'messages[0].content[0].text'
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
content[0]' has type 'gif'; this model takes
    {"messages": [{"role": "user", "content": [{"type": "gif"}]}]}
'messages[0].tool_calls'
    {"messages": [{"role": "assistant", "tool_calls": "x"}]}
'messages[0].tool_calls[0]'
    {"messages": [{"role": "assistant", "tool_calls": [null]}]}
tool_calls[0].function.name'
    {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}
.function.name'
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]}
'tools'
    {"tools": "x"}
'tools[1]'
    {"tools": [{"type": "function", "function": {"name": "look", "description": "Looks.",
        "parameters": {"type": "object"}}}, "x"]}
'tools[0].type'
    {"tools": [{"type": 5}]}
'tools[0].custom.name'
    {"tools": [{"type": "custom", "custom": {}}]}
'stop'
    {"stop": 5}
'stop[1]'
    {"stop": ["x", 5]}
'n'
    {"n": 2}
'max_completion_tokens'
    {"max_completion_tokens": 0}
    {"max_completion_tokens": true}
    {"max_completion_tokens": "9"}
'max_tokens'
    {"max_completion_tokens": null, "max_tokens": 1.5}
'modalities'
    {"modalities": ["text", "audio"]}
Use 'tool_calls' instead.
    {"messages": [{"role": "assistant", "function_call": {"name": "look"}}]}
Unsupported parameter: 'functions'
    {"functions": [{"name": "look", "description": "Looks.", "parameters": {"type": "object"}}]}
Unsupported parameter: 'function_call'
    {"function_call": "auto"}
Unsupported parameter: 'logprobs' is not supported with this model
    {"logprobs": true}
Unsupported parameter: 'top_logprobs'
    {"top_logprobs": 5}
Unsupported parameter: 'audio'
    {"audio": {"voice": "x"}}
Unsupported parameter: 'echo'
    {"echo": true}
""")
"""Changes of the request, and the place or the words of the refusal."""
MEANS = hostile.means("""
messages = [{"role": "tool", "content": "x", "tool_call_id": "", "name": "go"}]
    {"messages": [{"role": "tool", "content": "x", "name": "go"}]}
messages = [{"role": "assistant", "content": "", "reasoning_content": "Hm."}]
    {"messages": [{"role": "assistant", "reasoning": "Hm."}]}
include_usage = false
    {"stream_options": null}
    {"stream_options": {}}
    {"stream_options": {"include_usage": false}}
    {"stream_options": "usage"}
max_tokens = 9
    {"max_completion_tokens": null}
max_tokens = null
    {"max_completion_tokens": null, "max_tokens": null}
hosted_tools = [{"type": "web_search"}]
    {"tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "look",
        "description": "Looks.", "parameters": {"type": "object"}}}]}
stop = ["x"]
    {"stop": "x"}
stop = ["x", "y"]
    {"stop": ["x", "y"]}
stop = []
    {"stop": null}
    {"stop": ""}
schema = {"a": 1}
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}
schema = {}
    {"response_format": {"type": "json_object"}}
schema = null
    {"response_format": {"type": "text"}}
    {"response_format": null}
client_metadata = {"metadata.promptId": "s####0"}
    {"metadata": {"promptId": "s####0", "n": 1}}
""")
MEANS += [
    (
        {"functions": [], "function_call": None, "logprobs": False, "top_logprobs": 0},
        "tools",
        [TOOL],
    ),
    ({"modalities": ["text"]}, "tools", [TOOL]),
    ({"tools": [{"type": "web_search"}, TOOL]}, "tools", [TOOL]),
]
"""Changes of the request, and a field of the decoded call with its value."""
anything = hostile.values(
    ["text", "user", "assistant", "tool"], ["role", "content", "type", "text", "function", "name"]
)
bodies = hostile.bodies([REQUEST], anything)
