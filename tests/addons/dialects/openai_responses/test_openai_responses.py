import json
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.addons.dialects import openai_responses
from rolltap.addons.dialects.types import (
    ContextOverflow,
    DialectError,
    Head,
    ModelCall,
    Reply,
    ToolCall,
    Usage,
    WireTool,
    parse_arguments,
    sign,
)
from tests.addons.dialects import hostile

LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Agents.",
    "tools": [{**LOOK, "name": "spawn"}, {"type": "custom", "name": "exec", "description": "Runs."}],
}
SEARCH = {"type": "web_search", "external_web_access": False}
FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
REQUEST = {
    "model": "gpt-x",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Look "}, {"type": "input_text", "text": "there."}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "I look."}],
            "content": None,
            "encrypted_content": sign("c7"),
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
            "phase": "commentary",
        },
        {"type": "function_call", "call_id": "t1", "name": "look", "arguments": '{"at": "\\u00e9",  "n": 1}'},
        {"type": "custom_tool_call", "call_id": "t2", "name": "patch", "input": "+ x"},
        {"type": "function_call", "call_id": "t3", "namespace": "agents", "name": "spawn", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "t1", "output": "Nothing."},
        {"type": "custom_tool_call_output", "call_id": "t2", "output": [{"type": "input_text", "text": "Done."}]},
        {"type": "function_call_output", "call_id": "t3", "output": ""},
    ],
    "tools": [LOOK, PATCH, AGENTS, SEARCH],
    "tool_choice": "auto",
    "stream": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 9,
    "temperature": 0.0,
    "prompt_cache_key": "thread-1",
    "client_metadata": {"session": "s1", "n": 1},
}


def decode(**changes):
    return openai_responses.decode(json.dumps({**REQUEST, **changes}).encode(), "/v1/responses")


def decode_items(*items, **changes):
    return decode(instructions=None, input=list(items), **changes).messages


def function(name, description, parameters):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def echoed(call_id, name, arguments):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class TestOperation:
    @pytest.mark.parametrize(
        "path", ["/v1/responses", "/responses", "/backend-api/codex/responses", "/openai/v1/responses"]
    )
    def test_a_post_asks_for_a_reply_or_for_a_count(self, path):
        assert openai_responses.operation("POST", path) == "generate"
        assert openai_responses.operation("POST", f"{path}/input_tokens") == "count_tokens"
        assert openai_responses.operation("GET", path) is None

    def test_codex_asks_for_its_catalogue(self):
        assert openai_responses.operation("GET", "/backend-api/codex/models") == "models"

    @pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/responses/r1/cancel")])
    def test_other_requests_are_not_served(self, method, path):
        assert openai_responses.operation(method, path) is None


class TestDecode:
    def test_a_request_becomes_a_model_call(self):
        assert decode() == ModelCall(
            model="gpt-x",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Look there."},
                {
                    "role": "assistant",
                    "content": "Looking.",
                    "reasoning_content": "I look.",
                    "tool_calls": [
                        echoed("t1", "look", {"at": "é", "n": 1}),
                        echoed("t2", "patch", {"input": "+ x"}),
                        echoed("t3", "agents__spawn", {}),
                    ],
                    "call_id": "c7",
                },
                {"role": "tool", "content": "Nothing.", "tool_call_id": "t1"},
                {"role": "tool", "content": "Done.", "tool_call_id": "t2"},
                {"role": "tool", "content": "", "tool_call_id": "t3"},
            ],
            tools=[
                function("look", "Looks.", {"type": "object"}),
                function(
                    "patch",
                    "Patches.\n\nThe input must match this grammar:\nstart: LINE+",
                    FREEFORM,
                ),
                function("agents__spawn", "Looks.", {"type": "object"}),
                function("agents__exec", "Runs.", FREEFORM),
            ],
            stream=True,
            max_tokens=9,
            asked={"temperature": 0.0, "tool_choice": "auto"},
            hosted_tools=[SEARCH],
            wire_tools={
                "patch": WireTool("patch", freeform=True),
                "agents__spawn": WireTool("spawn", namespace="agents"),
                "agents__exec": WireTool("exec", namespace="agents", freeform=True),
            },
            hints={"client_metadata.session": "s1", "prompt_cache_key": "thread-1"},
        )

    def test_a_string_is_the_users_message(self):
        assert decode(instructions=None, input="Hi").messages == [{"role": "user", "content": "Hi"}]

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ("Hi", "Hi"),
            (None, ""),
            ([], ""),
            ([{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}], "ab"),
            ([{"type": "text", "text": "a"}], "a"),
        ],
    )
    def test_content_is_text_however_it_is_written(self, content, text):
        assert decode_items({"role": "assistant", "content": content})[0]["content"] == text

    def test_a_users_message_ends_the_assistants_turn(self):
        said = {"role": "assistant", "content": "a"}
        messages = decode_items(said, {"role": "user", "content": "b"}, said)
        assert [m["role"] for m in messages] == ["assistant", "user", "assistant"]

    def test_several_texts_of_one_turn_are_paragraphs(self):
        summary = [{"type": "summary_text", "text": "x"}, {"type": "summary_text", "text": "y"}]
        said = {"role": "assistant", "content": "a"}
        (message,) = decode_items({"type": "reasoning", "summary": summary}, said, {"type": "reasoning"}, said)
        assert message == {"role": "assistant", "content": "a\n\na", "reasoning_content": "x\n\ny"}

    @pytest.mark.parametrize("theirs", ["gAAAAABo", "eHg=", "", None, 5, sign("c7")[:-3]])
    def test_opaque_content_of_others_names_no_call(self, theirs):
        (message,) = decode_items({"type": "reasoning", "summary": [], "encrypted_content": theirs})
        assert message == {"role": "assistant", "content": ""}

    def test_arguments_that_are_not_json_stay_text(self):
        (message,) = decode_items({"type": "function_call", "call_id": "t", "name": "look", "arguments": "{'a'"})
        assert message["tool_calls"][0]["function"]["arguments"] == "{'a'"

    def test_tools_may_stand_among_the_items(self):
        more = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, {**LOOK, "name": "wait"}]}
        call = decode(instructions=None, input=[more, {"role": "user", "content": "Hi"}], tools=[LOOK])
        assert [t["function"]["name"] for t in call.tools] == ["look", "agents__spawn", "agents__exec", "wait"]
        assert call.messages == [{"role": "user", "content": "Hi"}]

    def test_of_two_tools_with_one_name_the_later_counts(self):
        call = decode(tools=[{**PATCH, "name": "look"}, LOOK])
        assert call.tools == [function("look", "Looks.", {"type": "object"})]
        assert call.wire_tools == {}

    def test_no_two_tools_are_shown_under_one_name(self):
        call = decode(
            tools=[{**LOOK, "name": "agents__spawn"}, AGENTS],
            input=[
                {"type": "function_call", "call_id": "t1", "name": "agents__spawn", "arguments": "{}"},
                {"type": "function_call", "call_id": "t2", "name": "spawn", "namespace": "agents", "arguments": "{}"},
            ],
        )
        names = ["agents__spawn", "agents__spawn_"]
        assert [t["function"]["name"] for t in call.tools][:2] == names
        assert [c["function"]["name"] for c in call.messages[-1]["tool_calls"]] == names
        assert "agents__spawn" not in call.wire_tools
        assert call.wire_tools["agents__spawn_"] == WireTool("spawn", namespace="agents")

    def test_no_tools_are_shown_when_none_may_be_called(self):
        call = decode(tool_choice="none")
        assert call.tools == []
        assert call.messages == decode().messages

    @pytest.mark.parametrize(
        ("form", "schema"),
        [
            ({"type": "json_schema", "name": "n", "schema": {"type": "object"}}, {"type": "object"}),
            ({"type": "json_object"}, {}),
            ({"type": "text"}, None),
            (None, None),
        ],
    )
    def test_a_wanted_format_is_a_schema(self, form, schema):
        assert decode(text={"format": form, "verbosity": "low"}).schema == schema

    @pytest.mark.parametrize("stream", [None, False, "yes"])
    def test_only_true_asks_for_a_stream(self, stream):
        assert not decode(stream=stream).stream

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"input": []}, "'input'"),
            ({"input": ""}, "'input'"),
            ({"input": None}, "'input'"),
            ({"input": {"role": "user"}}, "'input'"),
            ({"instructions": None, "input": [{"type": "additional_tools", "tools": []}]}, "'input'"),
            ({"input": ["Hi"]}, "'input[0]'"),
            ({"input": [{"type": ["message"]}]}, "'input[0].type'"),
            ({"input": [{"role": "user", "content": "x"}, {"role": "robot"}]}, "'input[1].role'"),
            ({"input": [{"role": "user", "content": 5}]}, "'input[0].content'"),
            ({"input": [{"role": "user", "content": ["x"]}]}, "'input[0].content[0]'"),
            ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "'input[0].content[0].text'"),
            ({"input": [{"type": "reasoning", "summary": "x"}]}, "'input[0].summary'"),
            ({"input": [{"type": "function_call", "call_id": "t", "arguments": "{}"}]}, "'input[0].name'"),
            ({"input": [{"type": "function_call", "call_id": "t", "name": "x"}]}, "'input[0].arguments'"),
            ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "'input[0].call_id'"),
            ({"input": [{"type": "custom_tool_call", "call_id": "t", "name": "x"}]}, "'input[0].input'"),
            ({"input": [{"type": "function_call_output", "output": "x"}]}, "'input[0].call_id'"),
            ({"input": [{"type": "function_call_output", "call_id": "t", "output": {}}]}, "'input[0].output'"),
            ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "'input[0]' has type 'web_search_call'"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "'input[0]' refers to an item"),
            ({"input": [{"type": None, "id": "msg_1"}]}, "'input[0]' refers to an item"),
            ({"input": [{"type": "additional_tools", "tools": "x"}]}, "'input[0].tools'"),
            ({"instructions": 5}, "'instructions'"),
            ({"tools": "x"}, "'tools'"),
            ({"tools": [LOOK, "x"]}, "'tools[1]'"),
            ({"tools": [{"type": "function"}]}, "'tools[0].name'"),
            ({"tools": [{"type": "namespace", "name": "n", "tools": [SEARCH]}]}, "'tools[0].tools[0].type'"),
            ({"max_output_tokens": 0}, "'max_output_tokens'"),
            ({"background": True}, "'background'"),
            ({"conversation": "conv_1"}, "'conversation'"),
        ],
    )
    def test_a_refusal_names_the_field(self, changes, field):
        with pytest.raises(DialectError) as refusal:
            decode(**changes)
        assert field in str(refusal.value)
        assert refusal.value.status == 400

    @pytest.mark.parametrize("kind", ["input_image", "input_file"])
    @pytest.mark.parametrize(
        ("place", "item"),
        [("content", {"role": "user"}), ("output", {"type": "function_call_output", "call_id": "t"})],
    )
    def test_what_is_not_text_is_refused_by_its_type(self, kind, place, item):
        parts = [{"type": "input_text", "text": "See"}, {"type": kind, "image_url": "data:image/png;base64,"}]
        with pytest.raises(DialectError, match=rf"'input\[0\].{place}\[1\]' has type '{kind}'.*text only"):
            decode_items({**item, place: parts})

    def test_a_response_that_would_have_to_be_stored_is_not_found(self):
        with pytest.raises(DialectError, match="not stored") as refusal:
            decode(previous_response_id="resp_1")
        assert refusal.value.code == "previous_response_not_found"


NAMES = ["type", "role", "content", "summary", "text", "call_id", "name", "namespace", "tools", "arguments", "output"]
KINDS = ["message", "reasoning", "function_call", "custom_tool_call", "compaction", "compaction_trigger", "namespace"]
MUTABLE = {
    **REQUEST,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": [AGENTS]},
        *REQUEST["input"],
        {"type": "compaction_trigger"},
    ],
}
bodies = hostile.bodies([MUTABLE], hostile.values([*KINDS, "user", "assistant", sign("c1")], NAMES))


@given(bodies)
@settings(max_examples=1500, deadline=None)
def test_any_body_is_a_model_call_or_a_refusal(body):
    try:
        call = openai_responses.decode(body, "/v1/responses")
    except DialectError as refusal:
        json.loads(openai_responses.encode_error(refusal))
    else:
        json.dumps(asdict(call), ensure_ascii=False).encode()
        assert call.messages


def head_of(call):
    return Head("c1", 5, "/v1/responses", call)


def streamed(head, reply, *, pieces=3, keep_alive=False):
    """The events of a reply whose text comes in pieces of `pieces` characters."""
    encoder = openai_responses.stream_encoder(head)
    events = encoder.start()
    for i in range(0, len(reply.reasoning), pieces):
        events += encoder.delta(reply.reasoning[i : i + pieces], "")
        events += encoder.keep_alive() if keep_alive else b""
    for i in range(0, len(reply.content), pieces):
        events += encoder.delta("", reply.content[i : i + pieces])
        events += encoder.keep_alive() if keep_alive else b""
    return events_of(events + encoder.finish(reply, USAGE))


def events_of(data):
    """The JSON of every event, which says the same type as the `event:` line and is one line."""
    *blocks, rest = data.decode().split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        kind, _, line = block.partition("\n")
        event = json.loads(line.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


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
    """What the harness's echo of a reply must decode to."""
    message = reply.to_message()
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
    return message | ({"call_id": "c1"} if reply.reasoning else {})


@given(replies)
@settings(max_examples=500, deadline=None)
def test_the_echo_of_a_reply_is_the_reply(reply):
    head = head_of(decode())
    whole = json.loads(openai_responses.encode_reply(head, reply, USAGE))
    assert decode_items(*whole["output"]) == [message_of(reply)]
    done = [e["item"] for e in streamed(head, reply) if e["type"] == "response.output_item.done"]
    assert done == whole["output"]


@given(replies, st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_stream_ends_with_the_response_that_is_not_streamed(reply, keep_alive):
    head = head_of(decode())
    events = streamed(head, reply, keep_alive=keep_alive)
    assert events[-1]["response"] == json.loads(openai_responses.encode_reply(head, reply, USAGE))
    assert [e["sequence_number"] for e in events] == list(range(len(events)))


class TestStreamEncoder:
    def test_an_item_is_complete_before_the_next_begins(self):
        reply = Reply("Hi", "Hm", [ToolCall("t1", "look", "{}"), ToolCall("t2", "patch", '{"input": "x"}')])
        assert [e["type"].removeprefix("response.") for e in streamed(head_of(decode()), reply)] == [
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
        encoder = openai_responses.stream_encoder(head_of(decode()))
        encoder.delta("Hm.", "Hi")
        assert encoder.delta("\n", "") == b""
        *_, last = events_of(encoder.finish(Reply("Hi", "Hm.\n"), USAGE))
        assert last["response"]["output"][0]["summary"][0]["text"] == "Hm."

    def test_no_new_text_is_no_event(self):
        assert openai_responses.stream_encoder(head_of(decode())).delta("", "") == b""

    def test_a_reply_that_was_cut_is_incomplete(self):
        *_, last = streamed(head_of(decode()), Reply("Hal", finish_reason="length"))
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
        encoder = openai_responses.stream_encoder(head_of(decode()))
        encoder.start()
        (event,) = events_of(encoder.error(error))
        assert event["type"] == "response.failed"
        assert event["response"]["status"] == "failed"
        assert event["response"]["error"] == {"code": code, "message": str(error)}


class TestCompaction:
    TRIGGER = {"type": "compaction_trigger"}  # noqa: RUF012

    def test_a_trigger_asks_for_a_summary(self):
        call = decode(input=[*REQUEST["input"], self.TRIGGER])
        assert call.messages[:-1] == decode().messages
        assert call.messages[-1]["role"] == "user"
        assert "summary" in call.messages[-1]["content"]
        assert call.hints["compaction"] == "trigger"
        assert call.tools == decode().tools

    @given(replies)
    @settings(max_examples=100, deadline=None)
    def test_the_reply_is_one_item_that_holds_the_summary(self, reply):
        head = head_of(decode(input=[*REQUEST["input"], self.TRIGGER]))
        whole = json.loads(openai_responses.encode_reply(head, reply, USAGE))
        (item,) = whole["output"]
        assert item["type"] == "compaction"
        events = streamed(head, reply)
        assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == [item]
        assert events[-1]["response"] == whole
        (message,) = decode_items(item)
        assert message["role"] == "user"
        assert message["content"].endswith(reply.content)

    @pytest.mark.parametrize("theirs", ["gAAAAABo", "eHg=", "", None, 5, sign("c7")])
    def test_a_summary_of_others_cannot_be_read(self, theirs):
        with pytest.raises(DialectError, match=r"'input\[0\].encrypted_content'") as refusal:
            decode_items({"type": "compaction", "encrypted_content": theirs})
        assert refusal.value.code == "invalid_encrypted_content"

    def test_a_trigger_is_the_last_item(self):
        with pytest.raises(DialectError, match=r"'input\[0\]' is a compaction trigger"):
            decode_items(self.TRIGGER, {"role": "user", "content": "Hi"})


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
