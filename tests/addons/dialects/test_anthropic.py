import json
import re
from dataclasses import replace

import pytest

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import (
    DialectError,
    ModelCall,
    Reply,
    ReplyContext,
    ToolCall,
    Usage,
    assistant_message,
    message_tool_call,
    sign,
)
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.tools import function_tool
from tests.addons.dialects import hostile
from tests.addons.harness import rows, user

LOOK = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {}}},
}
SHOWN_LOOK = function_tool("look", "Looks.", LOOK["input_schema"])
LATER = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
BASH = {"type": "bash_20250124", "name": "bash"}
NO = {"type": "text", "text": "No."}
REQUEST = json.loads(
    r"""
{
  "model": "claude-x",
  "max_tokens": 9,
  "system": [
    {"type": "text", "text": "x-anthropic-billing-header: cch=1f2e3;"},
    {"type": "text", "text": "Be brief."},
    {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
  ],
  "messages": [
    {
      "role": "user",
      "content": [
        {"type": "text", "text": "<reminder/>\n"},
        {"type": "text", "text": "Look there."}
      ]
    },
    {"role": "system", "content": "It is Monday."},
    {
      "role": "assistant",
      "content": [
        {"type": "thinking", "thinking": "I look.", "signature": "SIGNATURE"},
        {"type": "text", "text": "Now."},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é", "n": 1}},
        {"type": "tool_use", "id": "t2", "name": "look", "input": {}}
      ]
    },
    {
      "role": "user",
      "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "Nothing."},
        {
          "type": "tool_result",
          "tool_use_id": "t2",
          "content": [{"type": "text", "text": "No."}],
          "is_error": true
        },
        {"type": "text", "text": "Go on."}
      ]
    }
  ],
  "tools": [
    {
      "name": "look",
      "description": "Looks.",
      "input_schema": {"type": "object", "properties": {"at": {}}}
    },
    {"name": "later", "input_schema": {"type": "object"}, "defer_loading": true},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"}
  ],
  "tool_choice": {"type": "auto"},
  "temperature": 0.0,
  "stop_sequences": ["END"],
  "stream": true,
  "metadata": {"user_id": "{\"session_id\": \"s\"}"},
  "diagnostics": {"previous_message_id": "msg_c7"}
}
""".replace("SIGNATURE", sign("c7"))
)


USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}


def text(content):
    return {"type": "text", "text": content}


def decode(target="/v1/messages?beta=true", **changes):
    request = {key: value for key, value in {**REQUEST, **changes}.items() if value is not None}
    return routes.MESSAGES.decode(parse_object(json.dumps(request).encode()), target)


def decode_content(role, content):
    """Decode one message, which a user message follows, and before which a tool is called if it is
    the user's.

    Return the messages that it becomes.
    """
    before = [{"role": "assistant", "content": [USE]}] if role == "user" else []
    messages = [*before, {"role": role, "content": content}, user("Well?")]
    return decode(system=None, messages=messages).messages[len(before) : -1]


def decode_assistant(*content):
    (message,) = decode_content("assistant", list(content))
    return message


def decode_result(*content):
    """Decode a tool result and return its text."""
    (message,) = decode_content("user", [{**RESULT, "content": [*content]}])
    return message["content"]


def reference(name):
    return {"type": "tool_reference", "tool_name": name}


class TestDecode:
    def test_a_request_becomes_a_model_call(self):
        made = [
            message_tool_call("t1", "look", {"at": "é", "n": 1}),
            message_tool_call("t2", "look", {}),
        ]
        assert decode() == ModelCall(
            model="claude-x",
            messages=[
                {"role": "system", "content": "Be brief.\n\nBe kind."},
                {"role": "user", "content": "<reminder/>\nLook there."},
                {"role": "system", "content": "It is Monday."},
                assistant_message("Now.", "I look.", made, "c7"),
                {"role": "tool", "content": "Nothing.", "tool_call_id": "t1", "name": "look"},
                {"role": "tool", "content": "Error: No.", "tool_call_id": "t2", "name": "look"},
                {"role": "user", "content": "Go on."},
            ],
            tools=[SHOWN_LOOK],
            stream=True,
            max_tokens=9,
            stop=["END"],
            reasoning="hidden",
            requested_sampling={"tool_choice": {"type": "auto"}, "temperature": 0.0},
            hosted_tools=[{"type": SEARCH["type"], "name": "web_search"}, BASH],
            client_metadata={
                "metadata.user_id": '{"session_id": "s"}',
                "diagnostics.previous_message_id": "msg_c7",
            },
        )

    def test_the_billing_block_of_the_system_prompt_is_dropped(self):
        for number in range(2):
            billing = text(f"x-anthropic-billing-header: cch={number};")
            system = decode(system=[billing, text("Be brief.")]).messages[0]
            assert system == {"role": "system", "content": "Be brief."}
            assert decode(system=[billing]).messages[0]["role"] == "user"

    def test_cache_markers_change_nothing(self):
        body = json.dumps(REQUEST)
        for kind in ("text", "thinking", "tool_use", "tool_result"):
            body = body.replace(
                f'{{"type": "{kind}"',
                f'{{"cache_control": {{"type": "ephemeral"}}, "type": "{kind}"',
            )
        tools = [{**tool, "cache_control": {"type": "ephemeral"}} for tool in REQUEST["tools"]]
        call = decode(**{**json.loads(body), "tools": tools})
        assert (call.messages, call.tools) == (decode().messages, decode().tools)

    def test_a_string_is_the_same_as_one_text_block(self):
        for system in ("Hi", ""):
            assert decode(system=system).messages == decode(system=[text(system)]).messages
        for role in ("user", "system", "assistant"):
            for content in ("Hi", [text("Hi")]):
                assert decode_content(role, content) == [{"role": role, "content": "Hi"}]

    def test_a_deferred_tool_is_not_shown_until_a_reference_loads_it(self):
        assert decode(tools=[LATER, LOOK]).tools == [SHOWN_LOOK]
        shown = json.loads(decode_result(reference("later")))
        assert shown["function"] == {"name": "later", "parameters": {"type": "object"}}

    def test_a_tool_is_defined_by_the_first_reference_and_named_by_later_ones(self):
        first, second = decode_result(reference("later"), reference("later")).split("\n")
        assert json.loads(first)["function"]["name"] == "later"
        assert json.loads(second) == {"name": "later"}

    def test_the_blocks_of_a_tool_result_are_lines_and_a_reference_to_an_unknown_tool_is_its_name(
        self,
    ):
        assert decode_result(text("a.py"), reference("gone")) == 'a.py\n{"name": "gone"}'

    def test_tool_results_come_before_the_text_of_their_message(self):
        decoded = decode_content("user", [text("Look:"), RESULT])
        answer = {"role": "tool", "content": "", "tool_call_id": "t1", "name": "look"}
        assert decoded == [answer, user("Look:")]

    def test_a_user_message_of_no_text_is_a_message_unless_it_holds_results(self):
        assert decode_content("user", []) == [user("")]
        assert len(decode_content("user", [RESULT])) == 1

    def test_an_assistant_message_is_one_message_whatever_its_order(self):
        thinking = {"type": "thinking", "thinking": "Hm.", "signature": "not ours"}
        message = decode_assistant(USE, text("One, "), thinking, text("two."))
        assert message == decode_assistant(thinking, text("One, "), text("two."), USE)
        assert (message["content"], message["reasoning_content"]) == ("One, two.", "Hm.")

    def test_consecutive_assistant_messages_are_one_turn(self):
        *before, turn, results = REQUEST["messages"]
        thinking, said, *uses = turn["content"]
        split = [{"role": "assistant", "content": part} for part in ([thinking], [said], uses)]
        assert decode(messages=[*before, *split, results]).messages == decode().messages

    @pytest.mark.parametrize("data", [sign("c7"), "EmwKAhgBEgy3va3pzix"], ids=["ours", "another's"])
    def test_redacted_thinking_names_a_call_only_when_it_was_issued_here(self, data):
        message = decode_assistant({"type": "redacted_thinking", "data": data})
        ours = {"call_id": "c7"} if data == sign("c7") else {}
        assert message == {"role": "assistant", "content": "", **ours}

    def test_blocks_of_hosted_tools_are_json_text(self):
        use = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "é"}}
        result = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
        message = decode_assistant(use, {**result, "cache_control": {"type": "ephemeral"}})
        assert message["content"] == json.dumps(use, ensure_ascii=False) + json.dumps(result)

    def test_counting_needs_no_max_tokens_and_takes_any_last_message(self):
        target = "/v1/messages/count_tokens?beta=true"
        whole = REQUEST["messages"]
        call = decode(target, max_tokens=None, stream=None, messages=whole[:3])
        assert (call.max_tokens, call.stream) == (None, False)
        assert call.messages == decode().messages[:4]

    @pytest.mark.parametrize("kind", ["image", "document", "hologram"])
    def test_what_is_neither_text_nor_said_to_be_a_file_is_refused_by_its_place(self, kind):
        picture = {"type": kind, "source": "a.png"}
        within = {**RESULT, "content": [picture]}
        for shown, place in ((picture, "content.0"), (within, "content.0.content.0")):
            words = rf"^messages.1.{place}\.type: .*'{kind}'; this model takes text only"
            with pytest.raises(DialectError, match=words):
                decode_content("user", [shown])


HEAD = ReplyContext("c9", 5, "/v1/messages", ModelCall("claude-x", [], []))


def encoded(reply):
    usage = Usage(prompt=7, completion=3, cached=4)
    return json.loads(routes.MESSAGES.encode_reply(HEAD, reply, usage))


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ('{"at": "é"}', {"at": "é"}),
        ("not JSON", {"INVALID_JSON": "not JSON"}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"INVALID_JSON": "x"}', {"INVALID_JSON": '{"INVALID_JSON": "x"}'}),
        ('{"n": 1e400}', {"INVALID_JSON": '{"n": 1e400}'}),
    ],
    ids=["an object", "not JSON", "a list", "like wrapped text", "infinite"],
)
def test_arguments_are_an_object_whatever_was_sampled(sampled, expected):
    reply = Reply(tool_calls=[ToolCall("t1", "look", sampled)], finish_reason="tool_calls")
    assert encoded(reply)["content"] == [{**USE, "input": expected}]


def test_tool_calls_are_the_reason_before_a_stop_text_and_no_content_is_an_empty_list():
    message = encoded(Reply("", "", [ToolCall("call_1", "look", "{}")], "tool_calls", stop="END"))
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    empty = encoded(Reply())
    assert (empty["content"], empty["usage"]["cache_creation_input_tokens"]) == ([], 0)


STATUSES = """
400 invalid_request_error
401 authentication_error
403 permission_error
404 not_found_error
413 request_too_large
422 invalid_request_error
429 rate_limit_error
500 api_error
502 api_error
503 overloaded_error
504 timeout_error
529 overloaded_error
"""


@pytest.mark.parametrize(("status", "kind"), rows(STATUSES))
def test_an_error_has_the_type_of_its_status(status, kind):
    error = DialectError("No.", status=int(status))
    body = routes.MESSAGES.encode_error(error)
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "No."}}
    event = routes.MESSAGES.stream_encoder(HEAD).error(error)
    assert event == b"event: error\ndata: " + body + b"\n\n"


def test_reasoning_that_is_not_sent_keeps_the_connection_open():
    hidden = replace(HEAD, model_call=ModelCall("claude-x", [], [], reasoning="hidden"))
    encoder = routes.MESSAGES.stream_encoder(hidden)
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    assert encoder.delta("Hm.", "") == encoder.keep_alive() == ping


SIGNED = """
message_start content_block_start thinking_delta signature_delta content_block_stop
content_block_start text_delta content_block_stop message_delta message_stop
"""


def test_thinking_is_signed_before_its_block_ends():
    encoder = routes.MESSAGES.stream_encoder(HEAD)
    sent = encoder.start() + encoder.delta("Hm.", "Hi")
    sent += encoder.finish(Reply("Hi", "Hm."), Usage(7, 3))
    kinds = []
    for line in re.findall(b"data: (.*)", sent):
        event = json.loads(line)
        kinds.append(event.get("delta", {}).get("type", event["type"]))
    assert kinds == SIGNED.split()


REFUSED = hostile.cases("""
max_tokens:
    {"max_tokens": null}
    {"max_tokens": 0}
messages:
    {"messages": []}
    {"messages": {}}
messages.0:
    {"messages": ["Hi"]}
messages.0.role:
    {"messages": [{"role": "tool", "content": "x"}]}
    {"messages": [{"role": ["user"], "content": "x"}]}
messages.0.content:
    {"messages": [{"role": "user"}]}
    {"messages": [{"role": "user", "content": 5}]}
messages.0.content.0:
    {"messages": [{"role": "user", "content": ["x"]}]}
messages.0.content.0.type:
    {"messages": [{"role": "user", "content": [{"type": null}]}]}
    {"messages": [{"role": "user", "content": [{"type": "robot"}]}]}
    {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}
    {"messages": [{"role": "system", "content": [{"type": "tool_result"}]}]}
messages.0.content.0.text:
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
content.0.tool_use_id:
    {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}
content.0.thinking:
    {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}
content.0.name:
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}
messages.0.content.0.id:
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": null,
        "name": "look", "input": {}}]}]}
messages.0.content.0.name:
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "",
        "input": {}}]}]}
messages.0.content.0.input:
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t1",
        "name": "look", "input": "{}"}]}]}
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t1",
        "name": "look", "input": null}]}]}
system:
    {"system": 5}
system.0.type:
    {"system": [{"type": "image"}]}
tools:
    {"tools": "x"}
tools.1:
    {"tools": [{"name": "look", "description": "Looks.", "input_schema": {"type": "object",
        "properties": {"at": {}}}}, "x"]}
tools.0.name:
    {"tools": [{"name": ""}]}
    {"tools": [{"type": "custom"}]}
stop_sequences.0:
    {"stop_sequences": [5]}
does not support assistant message prefill
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]}
""")
"""Changes of the request, and the place or the words of the refusal."""
MEANS = hostile.means("""
schema = null
    {"output_config": {"effort": "low"}}
schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    {"output_config": {"effort": "low", "format": {"type": "json_schema",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}}}}
    {"output_format": {"type": "json_schema", "schema": {"type": "object",
        "properties": {"ok": {"type": "boolean"}}}}}
reasoning = "hidden"
    {"thinking": null}
    {"thinking": {"type": "disabled"}}
    {"thinking": "enabled"}
reasoning = "shown"
    {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    {"thinking": {"type": "adaptive", "display": "summarized"}}
reasoning = "signed"
    {"thinking": {"type": "adaptive", "display": "omitted"}}
""")
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
SHAPE = {"type": "json_schema"}
ASKED = {"tool_choice": {"type": "auto"}, "temperature": 0.0}
MEANS += [
    (
        {"output_config": {"effort": "low", "format": FORMAT}},
        "requested_sampling",
        ASKED | {"output_config": {"effort": "low", "format": SHAPE}},
    ),
    ({"output_format": FORMAT}, "requested_sampling", ASKED | {"output_format": SHAPE}),
]
"""Changes of the request, and a field of the decoded call with its value."""
WORDS = """
text user assistant system thinking tool_use tool_result tool_reference image server_tool_use
"""
KEYS = "role content type text name input INVALID_JSON tool_name source tool_use_id"
bodies = hostile.bodies([REQUEST], hostile.values([*WORDS.split(), sign("c1")], KEYS.split()))


def test_any_depth_is_a_model_call_or_a_refusal():
    result = {**RESULT, "content": [reference("later")]}
    asked = [{"role": "assistant", "content": [USE]}, user([result])]
    body = json.dumps({"max_tokens": 1, "messages": asked, "tools": [LATER]})
    outcomes = set()
    for depth in (*range(40, 80), 400, 100_000):
        schema = '{"a": [' * depth + "]}" * depth
        deep = body.replace(json.dumps(LATER["input_schema"]), schema).encode()
        try:
            call = routes.MESSAGES.decode(parse_object(deep), "/v1/messages")
        except DialectError as refusal:
            outcomes.add(str(refusal).partition(":")[0])
        else:
            assert schema in call.messages[1]["content"]
            outcomes.add("a model call")
    assert outcomes >= {"a model call", "We could not parse the JSON body of your request"}
