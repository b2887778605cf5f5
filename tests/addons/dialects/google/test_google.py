import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.addons.dialects import google
from rolltap.addons.dialects.routes import find_route
from rolltap.addons.dialects.types import (
    ContextOverflow,
    DialectError,
    Head,
    ModelCall,
    Reply,
    ServedModel,
    ToolCall,
    Usage,
    parse_arguments,
    sign,
)
from tests.addons.dialects import hostile

GENERATE = "/v1beta/models/gemini-x:generateContent"
STREAM = "/v1beta/models/gemini-x:streamGenerateContent"
SCHEMA = {"type": "object", "properties": {"at_what": {"type": "string"}}}
REQUEST = {
    "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Look "}, {"text": "there."}]},
        {
            "role": "model",
            "parts": [
                {"text": "I look.", "thought": True},
                {"text": "Wait."},
                {
                    "functionCall": {"id": "c1", "name": "look", "args": {"at": "é", "n": 1}},
                    "thoughtSignature": sign("call-7"),
                },
                {"functionCall": {"id": "c2", "name": "look", "args": {}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c1", "name": "look", "response": {"output": "Nothing."}}},
                {"text": "Go on."},
                {"functionResponse": {"id": "c2", "name": "look", "response": {"error": "Too dark."}}},
            ],
        },
    ],
    "tools": [
        {"functionDeclarations": [{"name": "look", "description": "Looks.", "parametersJsonSchema": SCHEMA}]},
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "safetySettings": [],
    "generationConfig": {"maxOutputTokens": 5, "stopSequences": ["END"], "temperature": 0.0, "candidateCount": 1},
}
SNAKE_REQUEST = {
    "system_instruction": {"parts": {"text": "Be brief."}},
    "contents": [
        {"parts": {"text": "Look there."}},
        {
            "role": "model",
            "parts": [{"text": "I look.", "thought": True, "thought_signature": None}, {"text": "Wait."}],
        },
        {
            "role": "model",
            "parts": [
                {
                    "thought_signature": sign("call-7"),
                    "function_call": {"args": {"n": 1, "at": "é"}, "name": "look", "id": "c1"},
                },
                {"function_call": {"name": "look", "id": "c2"}},
            ],
        },
        {
            "role": "function",
            "parts": [
                {"function_response": {"id": "c1", "name": "look", "response": {"output": "Nothing."}}},
                {"function_response": {"id": "c2", "name": "look", "response": {"error": "Too dark."}}},
            ],
        },
        {"role": "user", "parts": [{"text": "Go "}, {"text": "on."}]},
    ],
    "tools": [
        {
            "function_declarations": {
                "name": "look",
                "description": "Looks.",
                "parameters_json_schema": SCHEMA,
            }
        },
        {"google_search": {}},
    ],
    "tool_config": {"functionCallingConfig": {"mode": "AUTO"}},
    "safety_settings": [],
    "generation_config": {"max_output_tokens": 5, "stop_sequences": ["END"], "temperature": 0.0},
}
CALL = ModelCall(
    model="gemini-x",
    messages=[
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look there."},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "I look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "é", "n": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "look", "arguments": {}}},
            ],
            "call_id": "call-7",
        },
        {"role": "tool", "content": "Nothing.", "tool_call_id": "c1"},
        {"role": "tool", "content": '{"error":"Too dark."}', "tool_call_id": "c2"},
        {"role": "user", "content": "Go on."},
    ],
    tools=[{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}],
    max_tokens=5,
    stop=["END"],
    asked={"temperature": 0.0, "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}, "safetySettings": []},
    hosted_tools=[{"googleSearch": {}}],
)


def decode(target=GENERATE, **changes):
    return google.decode(json.dumps({**REQUEST, **changes}).encode(), target)


def decode_contents(*contents):
    return decode(contents=list(contents)).messages[1:]


def decode_response(response):
    part = {"functionResponse": {"name": "look", "response": response}}
    return decode_contents({"parts": [part]})[0]["content"]


def called(*calls):
    return {"role": "model", "parts": [{"functionCall": call} for call in calls]}


def answered(*responses):
    return {"role": "user", "parts": [{"functionResponse": {"response": {}, **answer}} for answer in responses]}


class TestOperation:
    @pytest.mark.parametrize(
        "path",
        [
            "/v1beta/models/gemini-x:",
            "/v1/models/gemini-x:",
            "/v1beta1/models/Qwen/Qwen3:8b:",
            "/v1beta1/publishers/google/models/gemini-x:",
            "/v1/projects/p/locations/l/publishers/google/models/gemini-x:",
        ],
    )
    def test_models_are_served_under_the_paths_of_gemini_and_vertex(self, path):
        assert google.operation("POST", path + "generateContent") == "generate"
        assert google.operation("POST", path + "streamGenerateContent") == "generate"
        assert google.operation("POST", path + "countTokens") == "count_tokens"

    def test_the_models_can_be_listed(self):
        assert google.operation("GET", "/v1beta/models") == "models"
        assert google.operation("GET", "/v1beta/models/gemini-x") == "models"

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", GENERATE),
            ("POST", "/v1beta/models/gemini-x"),
            ("POST", "/v1beta/models"),
            ("POST", "/v1beta/models/:generateContent"),
            ("POST", "/v1beta/models/gemini-x:embedContent"),
            ("POST", GENERATE + "/more"),
            ("POST", "/x" + GENERATE),
            ("POST", "/v1beta/projects/p/models/gemini-x:generateContent"),
            ("GET", "/v1/models"),
            ("GET", "/v1beta/models/"),
        ],
    )
    def test_nothing_else_is(self, method, path):
        assert google.operation(method, path) is None

    def test_a_request_is_routed_here_whatever_its_query(self):
        assert find_route("POST", STREAM + "?alt=sse", {}).dialect is google


class TestDecode:
    def test_a_request_becomes_a_model_call(self):
        assert decode() == CALL

    def test_snake_case_and_lists_of_one_mean_the_same(self):
        assert google.decode(json.dumps(SNAKE_REQUEST).encode(), GENERATE) == CALL

    def test_the_path_says_model_and_stream(self):
        assert not decode().stream
        call = decode("/v1beta/models/Qwen%2FQwen3:8b:streamGenerateContent?alt=sse")
        assert call.stream
        assert call.model == "Qwen/Qwen3:8b"

    @pytest.mark.parametrize("wrapper", ["generateContentRequest", "generate_content_request"])
    def test_tokens_are_counted_of_contents_or_of_a_whole_request(self, wrapper):
        target = "/v1beta/models/gemini-x:countTokens"
        body = json.dumps({wrapper: {"model": "models/gemini-x", **REQUEST}}).encode()
        assert google.decode(body, target) == decode(target) == CALL

    @pytest.mark.parametrize(
        "instruction",
        ["One.\n\nTwo.", {"parts": [{"text": "One."}, {"text": "Two."}]}, {"parts": {"text": "One.\n\nTwo."}}],
    )
    def test_the_parts_of_the_system_instruction_are_texts_of_their_own(self, instruction):
        assert decode(systemInstruction=instruction).messages[0] == {"role": "system", "content": "One.\n\nTwo."}

    @pytest.mark.parametrize("instruction", [None, "", {}, {"parts": []}, {"parts": [{"text": ""}]}])
    def test_an_empty_system_instruction_is_none(self, instruction):
        assert decode(systemInstruction=instruction).messages[0]["role"] == "user"

    def test_a_signature_of_others_is_nothing(self):
        part = {"text": "Hi.", "thoughtSignature": "c29tZXRoaW5nIGVsc2U="}
        assert decode_contents({"role": "model", "parts": [part]}) == [{"role": "assistant", "content": "Hi."}]

    def test_a_part_may_hold_a_signature_alone(self):
        message = {"role": "assistant", "content": "", "call_id": "call-7"}
        assert decode_contents({"role": "model", "parts": [{"thoughtSignature": sign("call-7")}]}) == [message]

    def test_user_contents_stay_messages_of_their_own(self):
        messages = decode_contents({"parts": [{"text": "a"}]}, {"role": "user", "parts": [{"text": "b"}]})
        assert messages == [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]

    def test_responses_without_ids_answer_the_calls_of_their_name_in_order(self):
        messages = decode_contents(
            called({"name": "look"}, {"name": "read"}, {"name": "look"}),
            answered({"name": "look"}, {"name": "look"}, {"name": "read"}),
            called({"name": "look"}),
            answered({"name": "look"}, {"name": "look"}),
        )
        ids = [[call["id"] for call in m["tool_calls"]] for m in messages if m["role"] == "assistant"]
        assert ids == [["call_1", "call_2", "call_3"], ["call_4"]]
        answers = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
        assert answers == ["call_1", "call_3", "call_2", "call_4", ""]

    def test_an_unanswered_call_is_not_answered_by_a_response_to_a_later_turn(self):
        messages = decode_contents(
            called({"id": "old", "name": "look"}),
            {"parts": [{"text": "Never mind."}]},
            called({"id": "new", "name": "look"}),
            answered({"name": "look"}),
        )
        assert messages[-1]["tool_call_id"] == "new"

    def test_a_response_is_matched_by_its_id_first(self):
        messages = decode_contents(
            called({"id": "c1", "name": "look"}, {"id": "c2", "name": "look"}),
            answered({"id": "c2", "name": "look"}, {"name": "look"}, {"id": "c9", "name": "look"}),
        )
        assert [m["tool_call_id"] for m in messages[1:]] == ["c2", "c1", "c9"]

    @pytest.mark.parametrize(
        ("response", "text"),
        [
            ({"output": "a é"}, "a é"),
            ({"result": "a"}, "a"),
            ({"error": "a"}, '{"error":"a"}'),
            ({"output": {"b": 1}}, '{"output":{"b":1}}'),
            ({"output": "é", "code": 0}, '{"code":0,"output":"é"}'),
            ({}, "{}"),
        ],
    )
    def test_the_model_sees_a_lone_text_or_json(self, response, text):
        assert decode_response(response) == text

    @pytest.mark.parametrize(
        ("config", "schema"),
        [
            ({}, None),
            ({"responseSchema": {"type": "OBJECT"}}, None),
            ({"responseMimeType": "text/plain"}, None),
            ({"responseMimeType": "application/json"}, {}),
            ({"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}}, {"type": "object"}),
            ({"response_mime_type": "application/json", "responseJsonSchema": {"type": "null"}}, {"type": "null"}),
        ],
    )
    def test_json_is_asked_for_by_its_mime_type(self, config, schema):
        assert decode(generationConfig=config).schema == schema

    def test_wishes_are_recorded(self):
        config = {"topK": 64, "thinkingConfig": {"includeThoughts": True}, "seed": None}
        asked = decode(generationConfig=config, toolConfig=None, safetySettings=None).asked
        assert asked == {"topK": 64, "thinkingConfig": {"includeThoughts": True}}

    def test_no_functions_are_shown_when_none_may_be_called(self):
        call = decode(toolConfig={"functionCallingConfig": {"mode": "NONE"}})
        assert call.tools == []
        assert call.hosted_tools == [{"googleSearch": {}}]

    def test_the_parameters_of_a_function_may_be_in_the_manner_of_openapi(self):
        parameters = {"type": "OBJECT", "properties": {"at": {"type": "STRING", "nullable": True}}}
        call = decode(tools=[{"functionDeclarations": [{"name": "look", "parameters": parameters}]}])
        converted = {"type": "object", "properties": {"at": {"type": ["string", "null"]}}}
        assert call.tools[0]["function"] == {"name": "look", "parameters": converted}

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"contents": None}, "contents is not specified"),
            ({"contents": []}, "contents is not specified"),
            ({"contents": "Hi"}, "'contents'"),
            ({"contents": ["Hi"]}, "'contents[0]'"),
            ({"contents": [{"role": "robot"}]}, "'contents[0].role'"),
            ({"contents": [{"role": ["user"]}]}, "'contents[0].role'"),
            ({"contents": [{"parts": "Hi"}]}, "'contents[0].parts'"),
            ({"contents": [{"parts": [{"text": 1}]}]}, "'contents[0].parts[0].text'"),
            ({"contents": [{"parts": [{}, {"inline_data": {}}]}]}, "'contents[0].parts[1].inline_data'"),
            ({"contents": [{"parts": [{"fileData": {}}]}]}, "takes text only"),
            ({"contents": [{"role": "model", "parts": [{"executable_code": {}}]}]}, "executable_code"),
            ({"contents": [{"parts": [{"functionCall": {"name": "a"}}]}]}, "'contents[0].parts[0].function_call'"),
            (
                {"contents": [{"role": "model", "parts": [{"functionResponse": {"name": "a"}}]}]},
                "'contents[0].parts[0].function_response'",
            ),
            ({"contents": [called({"name": ""})]}, "'contents[0].parts[0].function_call.name'"),
            ({"contents": [called({"name": "a", "args": "{}"})]}, "'contents[0].parts[0].function_call.args'"),
            ({"contents": [answered({})]}, "'contents[0].parts[0].function_response.name'"),
            ({"contents": [answered({"name": "a", "response": "x"})]}, "function_response.response'"),
            ({"contents": [answered({"name": "a", "parts": [{"inlineData": {}}]})]}, "function_response.parts'"),
            ({"systemInstruction": 1}, "'system_instruction'"),
            ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "'system_instruction.parts[0].inline_data'"),
            ({"cachedContent": "cachedContents/1"}, "'cached_content'"),
            ({"generationConfig": []}, "'generation_config'"),
            ({"generationConfig": {"candidateCount": 2}}, "candidate_count"),
            ({"generationConfig": {"maxOutputTokens": 0}}, "max_output_tokens"),
            ({"generationConfig": {"stopSequences": [1]}}, "stop_sequences"),
            ({"tools": "look"}, "'tools'"),
            ({"tools": ["look"]}, "'tools[0]'"),
            ({"tools": [{"functionDeclarations": [{}]}]}, "'tools[0].function_declarations[0].name'"),
            ({"toolConfig": "AUTO"}, "'tool_config'"),
        ],
    )
    def test_what_cannot_be_read_is_refused_by_its_place(self, changes, said):
        with pytest.raises(DialectError) as refused:
            decode(**changes)
        assert said in str(refused.value)
        assert refused.value.status == 400

    def test_a_body_that_nests_too_deep_is_refused(self):
        args = json.loads('{"a":' * 95 + "1" + "}" * 95)
        with pytest.raises(DialectError, match="nests deeper"):
            decode(contents=[called({"name": "look", "args": args})])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    *("args", "functionCall", "function_response", "id", "inlineData", "mode", "name", "output", "parts", "properties"),
    *("response", "role", "text", "thought", "thoughtSignature", "type", "generateContentRequest"),
]
HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["model", "user"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=4),
    max_leaves=12,
)


def decodes_or_refuses(body):
    with contextlib.suppress(DialectError):
        assert isinstance(google.decode(body, GENERATE), ModelCall)


class TestHostileBodies:
    @settings(max_examples=2500, deadline=None)
    @given(hostile.bodies([REQUEST, SNAKE_REQUEST], HOSTILE))
    def test_any_body_is_decoded_or_refused(self, body):
        decodes_or_refuses(body)

    @pytest.mark.parametrize("place", ["contents", "tools", "generationConfig"])
    @pytest.mark.parametrize("depth", [90, 120, 300, 980, 100_000])
    def test_any_depth_is_decoded_or_refused(self, place, depth):
        deep = '{"items":' * depth + "1" + "}" * depth
        body = json.dumps({**REQUEST, place: "DEEP"}).replace('"DEEP"', deep)
        decodes_or_refuses(body.encode())


HEAD = Head("call-9", 1_700_000_000, GENERATE, CALL)
SSE_HEAD = Head("call-9", 1_700_000_000, STREAM + "?alt=sse", CALL)
ARRAY_HEAD = Head("call-9", 1_700_000_000, STREAM, CALL)
USAGE = Usage(prompt=7, completion=3, cached=2)
ARGUMENTS = st.one_of(
    st.dictionaries(st.text(), JSON, max_size=4).map(json.dumps),
    JSON.map(lambda value: json.dumps(value, ensure_ascii=False, indent=1)),
    st.text(),
    st.sampled_from(
        [
            '{"a": NaN}',
            '{"a": 1e999}',
            '{"INVALID_JSON": "{}"}',
            '{"INVALID_JSON": {}}',
            '{"INVALID_JSON": "x", "b": 1}',
            '{"a": "\\ud83d"}',
            '{"a":' * 60 + "{}" + "}" * 60,
            '{"a":' * 500 + "{}" + "}" * 500,
            "[" * 100_000,
        ]
    ),
)
REPLIES = st.builds(
    Reply,
    content=st.text(),
    reasoning=st.text(),
    tool_calls=st.lists(st.builds(ToolCall, id=st.uuids().map(str), name=st.text(min_size=1), arguments=ARGUMENTS)),
    finish_reason=st.sampled_from(["stop", "length", "tool_calls"]),
)


def in_pieces(text, cuts):
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [piece for piece in pieces if piece]


def stream(head, reply, cuts=(), error=None):
    """The bytes of a streamed reply, cut into deltas, with a keep-alive before every piece."""
    encoder = google.stream_encoder(head)
    pieces = [encoder.delta(piece, "") for piece in in_pieces(reply.reasoning, cuts)]
    pieces += [encoder.delta("", piece) for piece in in_pieces(reply.content, cuts)]
    pieces.append(encoder.error(error) if error else encoder.finish(reply, USAGE))
    return encoder.start() + b"".join(encoder.keep_alive() + piece for piece in pieces)


def chunks_of(body):
    """The chunks of a stream, in either of its forms."""
    if body.startswith(b"["):
        return json.loads(body)
    lines = [line for line in body.decode("ascii").splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def echo(*responses):
    """The message that a harness's echo of a reply's candidates decodes to."""
    contents = [response["candidates"][0]["content"] for response in responses]
    (message,) = decode_contents(*contents)
    return message


def issued(reply):
    message = reply.to_message() | {"call_id": "call-9"}
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
    return message


def same(one, other):
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # NaN equals NaN here


class TestEncode:
    def test_a_reply_is_one_candidate(self):
        reply = Reply("Wait.", "Hm.", [ToolCall("c1", "look", '{"at": "é"}'), ToolCall("c2", "look", "")], "tool_calls")
        assert json.loads(google.encode_reply(HEAD, reply, USAGE)) == {
            "candidates": [
                {
                    "content": {
                        "role": "model",
                        "parts": [
                            {"text": "Hm.", "thought": True},
                            {"text": "Wait."},
                            {
                                "functionCall": {"id": "c1", "name": "look", "args": {"at": "é"}},
                                "thoughtSignature": sign("call-9"),
                            },
                            {"functionCall": {"id": "c2", "name": "look", "args": {"INVALID_JSON": ""}}},
                        ],
                    },
                    "finishReason": "STOP",
                    "index": 0,
                }
            ],
            "usageMetadata": {
                "promptTokenCount": 7,
                "candidatesTokenCount": 3,
                "totalTokenCount": 10,
                "cachedContentTokenCount": 2,
            },
            "modelVersion": "gemini-x",
            "responseId": "call-9",
        }

    @pytest.mark.parametrize(
        ("reply", "parts"),
        [
            (Reply("Hi."), [{"text": "Hi.", "thoughtSignature": sign("call-9")}]),
            (Reply(), [{"text": "", "thoughtSignature": sign("call-9")}]),
            (
                Reply(reasoning="Hm."),
                [{"text": "Hm.", "thought": True}, {"text": "", "thoughtSignature": sign("call-9")}],
            ),
        ],
        ids=["text", "nothing", "reasoning"],
    )
    def test_without_a_call_the_text_carries_the_signature(self, reply, parts):
        encoded = json.loads(google.encode_reply(HEAD, reply, USAGE))
        assert encoded["candidates"][0]["content"]["parts"] == parts

    @pytest.mark.parametrize(("reason", "said"), [("stop", "STOP"), ("tool_calls", "STOP"), ("length", "MAX_TOKENS")])
    def test_the_finish_reason_is_said(self, reason, said):
        encoded = json.loads(google.encode_reply(HEAD, Reply("Hi.", finish_reason=reason), USAGE))
        assert encoded["candidates"][0]["finishReason"] == said

    @settings(max_examples=500, deadline=None)
    @given(REPLIES)
    def test_an_echoed_reply_is_the_message_that_was_issued(self, reply):
        assert same(echo(json.loads(google.encode_reply(HEAD, reply, USAGE))), issued(reply))

    @settings(max_examples=300, deadline=None)
    @given(REPLIES, st.lists(st.integers(0, 20)), st.sampled_from([SSE_HEAD, ARRAY_HEAD]))
    def test_an_echoed_stream_is_the_message_that_was_issued_however_it_was_cut(self, reply, cuts, head):
        assert same(echo(*chunks_of(stream(head, reply, cuts))), issued(reply))

    @pytest.mark.parametrize(
        ("head", "content_type"), [(SSE_HEAD, "text/event-stream"), (ARRAY_HEAD, "application/json")]
    )
    def test_the_last_chunk_has_calls_finish_reason_and_usage(self, head, content_type):
        reply = Reply("Wait.", tool_calls=[ToolCall("c1", "look", "{}")], finish_reason="tool_calls")
        text, last = chunks_of(stream(head, reply))
        assert google.stream_encoder(head).content_type == content_type
        assert text["candidates"] == [{"content": {"role": "model", "parts": [{"text": "Wait."}]}, "index": 0}]
        assert "usageMetadata" not in text
        (candidate,) = last["candidates"]
        assert [part["functionCall"]["id"] for part in candidate["content"]["parts"]] == ["c1"]
        assert candidate["finishReason"] == "STOP"
        assert last["usageMetadata"]["totalTokenCount"] == 10

    def test_a_delta_has_reasoning_before_content(self):
        (chunk,) = chunks_of(google.stream_encoder(SSE_HEAD).delta("Hm.", "Hi."))
        parts = chunk["candidates"][0]["content"]["parts"]
        assert parts == [{"text": "Hm.", "thought": True}, {"text": "Hi."}]

    @pytest.mark.parametrize("head", [SSE_HEAD, ARRAY_HEAD], ids=["events", "array"])
    def test_a_failed_stream_ends_with_the_error(self, head):
        error = DialectError("The engine is gone.", status=503)
        *_, last = chunks_of(stream(head, Reply("Hi."), error=error))
        assert last == {"error": {"code": 503, "message": "The engine is gone.", "status": "UNAVAILABLE"}}

    @pytest.mark.parametrize("query", ["alt=sse", "key=x&alt=sse", "%24alt=sse"])
    def test_the_query_asks_for_events(self, query):
        head = Head("call-9", 0, f"{STREAM}?{query}", CALL)
        assert google.stream_encoder(head).content_type == "text/event-stream"

    @pytest.mark.parametrize(
        ("status", "name"),
        [
            (400, "INVALID_ARGUMENT"),
            (401, "UNAUTHENTICATED"),
            (403, "PERMISSION_DENIED"),
            (404, "NOT_FOUND"),
            (413, "INVALID_ARGUMENT"),
            (429, "RESOURCE_EXHAUSTED"),
            (500, "INTERNAL"),
            (502, "INTERNAL"),
            (503, "UNAVAILABLE"),
            (504, "DEADLINE_EXCEEDED"),
        ],
    )
    def test_an_error_has_the_name_of_its_status(self, status, name):
        error = json.loads(google.encode_error(DialectError("No.", status=status)))
        assert error == {"error": {"code": status, "message": "No.", "status": name}}

    def test_an_overflow_is_said_in_the_words_of_this_api(self):
        error = json.loads(google.encode_error(ContextOverflow(40_000, 32_768)))["error"]
        assert error["code"] == 400
        assert error["message"] == (
            "The input token count (40000) exceeds the maximum number of tokens allowed (32768)."
        )

    def test_tokens_are_counted(self):
        assert json.loads(google.encode_token_count(12)) == {"totalTokens": 12}

    def test_models_have_the_engines_context(self):
        models = [ServedModel("one", 100), ServedModel("two", 100)]
        listed = json.loads(google.encode_models("/v1beta/models?pageSize=50", models, 0))["models"]
        assert [model["name"] for model in listed] == ["models/one", "models/two"]
        asked = json.loads(google.encode_models("/v1beta/models/gemini-x", models, 0))
        assert asked["name"] == "models/gemini-x"
        assert asked["inputTokenLimit"] == 100
        assert "generateContent" in asked["supportedGenerationMethods"]
