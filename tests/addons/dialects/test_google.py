import json
import re

import pytest
from google import genai
from google.genai import types

from rolltap.addons.dialects import routes
from rolltap.addons.dialects.call import (
    ModelCall,
    assistant_message,
    message_tool_call,
    sign,
    tool_call_id,
)
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.tools import function_tool
from tests.addons.dialects import hostile
from tests.addons.dialects.server import Server

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
                {
                    "functionResponse": {
                        "id": "c1",
                        "name": "look",
                        "response": {"output": "Nothing."},
                    }
                },
                {"text": "Go on."},
                {
                    "functionResponse": {
                        "id": "c2",
                        "name": "look",
                        "response": {"error": "Too dark."},
                    }
                },
            ],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "look", "description": "Looks.", "parametersJsonSchema": SCHEMA}
            ]
        },
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "safetySettings": [],
    "generationConfig": {
        "maxOutputTokens": 5,
        "stopSequences": ["END"],
        "temperature": 0.0,
        "candidateCount": 1,
    },
}


def snake(value):
    """Return a request with the names of its fields in snake case, and each list of one message as
    the message."""
    if isinstance(value, list):
        return (
            snake(value[0])
            if len(value) == 1 and isinstance(value[0], dict)
            else [*map(snake, value)]
        )
    if not isinstance(value, dict):
        return value
    return {
        re.sub("[A-Z]", lambda big: f"_{big[0].lower()}", key): snake(inner)
        for key, inner in value.items()
    }


SNAKE_REQUEST = {**snake(REQUEST), "tool_config": REQUEST["toolConfig"]}
MADE = [message_tool_call("c1", "look", {"at": "é", "n": 1}), message_tool_call("c2", "look", {})]
CALL = ModelCall(
    model="gemini-x",
    messages=[
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look there."},
        assistant_message("Wait.", "I look.", MADE, "call-7"),
        {"role": "tool", "content": "Nothing.", "tool_call_id": "c1", "name": "look"},
        {"role": "tool", "content": '{"error":"Too dark."}', "tool_call_id": "c2", "name": "look"},
        {"role": "user", "content": "Go on."},
    ],
    tools=[function_tool("look", "Looks.", SCHEMA)],
    max_tokens=5,
    stop=["END"],
    reasoning="signed",
    requested_sampling={
        "temperature": 0.0,
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "safetySettings": [],
    },
    hosted_tools=[{"type": "googleSearch"}],
)


def decode(target=GENERATE, **changes):
    return routes.GEMINI.decode(parse_object(json.dumps({**REQUEST, **changes}).encode()), target)


def decode_contents(*contents):
    return decode(contents=list(contents)).messages[1:]


OLD, NEW = {"id": "old", "name": "look"}, {"id": "new", "name": "look"}


def called(*calls):
    return {"role": "model", "parts": [{"functionCall": call} for call in calls]}


def answered(*responses):
    return {
        "role": "user",
        "parts": [{"functionResponse": {"response": {}, **answer}} for answer in responses],
    }


class TestDecode:
    def test_a_request_becomes_a_model_call(self):
        assert decode() == CALL

    def test_snake_case_and_lists_of_one_mean_the_same(self):
        assert (
            routes.GEMINI.decode(parse_object(json.dumps(SNAKE_REQUEST).encode()), GENERATE) == CALL
        )

    def test_the_path_says_model_and_stream(self):
        assert not decode().stream
        call = decode("/v1beta/models/Qwen%2FQwen3:8b:streamGenerateContent?alt=sse")
        assert call.stream
        assert call.model == "Qwen/Qwen3:8b"

    @pytest.mark.parametrize("wrapper", ["generateContentRequest", "generate_content_request"])
    def test_count_tokens_takes_contents_or_a_whole_request(self, wrapper):
        target = "/v1beta/models/gemini-x:countTokens"
        body = json.dumps({wrapper: {"model": "models/gemini-x", **REQUEST}}).encode()
        assert routes.GEMINI.decode(parse_object(body), target) == decode(target) == CALL

    @pytest.mark.parametrize(
        ("instruction", "text"),
        [
            *(
                (said, ["One.\n\nTwo."])
                for said in ("One.\n\nTwo.", {"parts": [{"text": "One."}, {"text": "Two."}]})
            ),
            ({"parts": {"text": "One."}}, ["One."]),
            *((said, []) for said in (None, "", {}, {"parts": []}, {"parts": [{"text": ""}]})),
        ],
    )
    def test_the_parts_of_the_system_instruction_are_separate_texts_and_an_empty_one_is_none(
        self, instruction, text
    ):
        messages = decode(systemInstruction=instruction).messages
        assert [message["content"] for message in messages if message["role"] == "system"] == text

    @pytest.mark.parametrize(
        ("part", "message"),
        [
            ({"text": "Hi.", "thoughtSignature": "c29tZXRoaW5nIGVsc2U="}, {"content": "Hi."}),
            ({"thoughtSignature": sign("call-7")}, {"content": "", "call_id": "call-7"}),
        ],
        ids=["not issued here", "alone"],
    )
    def test_a_signature_may_be_anothers_and_a_part_of_its_own(self, part, message):
        assert decode_contents({"role": "model", "parts": [part]}) == [
            {"role": "assistant", **message}
        ]

    def test_consecutive_user_contents_are_separate_messages_and_those_of_the_model_one(self):
        roles = [None, "user", "model", "model", "function"]
        messages = decode_contents(*({"role": role, "parts": {"text": "a"}} for role in roles))
        said = [("user", "a"), ("user", "a"), ("assistant", "aa"), ("user", "a")]
        assert messages == [{"role": role, "content": text} for role, text in said]

    def test_responses_without_ids_answer_the_calls_of_their_name_in_order(self):
        messages = decode_contents(
            called({"name": "look"}, {"name": "read"}, {"name": "look"}),
            answered({"name": "look"}, {"name": "look"}, {"name": "read"}),
            called({"name": "look"}),
            answered({"name": "look"}, {"name": "look"}),
        )
        ids = [
            [call["id"] for call in m["tool_calls"]] for m in messages if m["role"] == "assistant"
        ]
        assert ids == [["call_1", "call_2", "call_3"], ["call_4"]]
        answers = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
        assert answers == ["call_1", "call_3", "call_2", "call_4", ""]

    def test_a_signed_turn_without_ids_has_those_that_its_calls_were_issued_with(self):
        signed = called({"name": "look"}, {"name": "read"}, {"id": "own", "name": "look"})
        signed["parts"][0]["thoughtSignature"] = sign("call-7")
        model, *results = decode_contents(
            signed, answered({"name": "read"}, {"name": "look"}, {"name": "look"})
        )
        first, second = tool_call_id("call-7", 0), tool_call_id("call-7", 1)
        assert [call["id"] for call in model["tool_calls"]] == [first, second, "own"]
        assert [result["tool_call_id"] for result in results] == [second, first, "own"]

    def test_the_signature_may_be_on_any_part_of_the_turn(self):
        parts = [
            {"functionCall": {"name": "look"}},
            {"text": "", "thoughtSignature": sign("call-7")},
        ]
        (model,) = decode_contents({"role": "model", "parts": parts})
        assert model["tool_calls"][0]["id"] == tool_call_id("call-7", 0)

    @pytest.mark.parametrize("signatures", [0, 1, 2])
    def test_a_turn_in_several_contents_has_the_ids_that_its_calls_were_issued_with(
        self, signatures
    ):
        pieces = [{"functionCall": {"name": "look"}} for _ in range(2)]
        for piece in pieces[:signatures]:
            piece["thoughtSignature"] = sign("call-7")
        answers = answered({"name": "look"}, {"name": "look"})
        split = [{"role": "model", "parts": [piece]} for piece in pieces]
        ids = (
            [tool_call_id("call-7", 0), tool_call_id("call-7", 1)]
            if signatures
            else ["call_1", "call_2"]
        )
        for turn in ([{"role": "model", "parts": pieces}], split):
            model, *results = decode_contents(*turn, answers)
            assert [call["id"] for call in model["tool_calls"]] == ids
            assert [result["tool_call_id"] for result in results] == ids

    @pytest.mark.parametrize(
        ("contents", "ids"),
        [
            (
                (
                    called(OLD),
                    {"parts": [{"text": "Never mind."}]},
                    called(NEW),
                    answered({"name": "look"}),
                ),
                ["new"],
            ),
            (
                (
                    called(OLD, NEW),
                    answered(
                        {"id": "new", "name": "look"}, {"name": "look"}, {"id": "c9", "name": "go"}
                    ),
                ),
                ["new", "old", "c9"],
            ),
        ],
        ids=["a call of an earlier turn that was never answered", "answers with ids first"],
    )
    def test_a_response_is_matched_by_its_id_and_else_by_the_turn_before_it(self, contents, ids):
        messages = decode_contents(*contents)
        assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ids
        assert messages[-1]["name"] == ("go" if ids[-1] == "c9" else "look")

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
        assert (
            decode_contents(answered({"name": "look", "response": response}))[0]["content"] == text
        )


REFUSED = [
    ({"contents": None}, "contents is not specified"),
    ({"contents": []}, "contents is not specified"),
    ({"contents": "Hi"}, "'contents'"),
    ({"contents": ["Hi"]}, "'contents[0]'"),
    ({"contents": [{"role": "robot"}]}, "'contents[0].role'"),
    ({"contents": [{"role": ["user"]}]}, "'contents[0].role'"),
    ({"contents": [{"parts": "Hi"}]}, "'contents[0].parts'"),
    ({"contents": [{"parts": [{"text": 1}]}]}, "'contents[0].parts[0].text'"),
    ({"contents": [{"parts": [{}, {"inline_data": ""}]}]}, "'contents[0].parts[1].inline_data'"),
    ({"contents": [{"parts": [{"fileData": []}]}]}, "takes text only"),
    ({"contents": [{"role": "model", "parts": [{"executable_code": {}}]}]}, "executable_code"),
    (
        {"contents": [{"parts": [{"functionCall": {"name": "a"}}]}]},
        "'contents[0].parts[0].function_call'",
    ),
    (
        {"contents": [{"role": "model", "parts": [{"functionResponse": {}}]}]},
        "'contents[0].parts[0].function_response'",
    ),
    ({"contents": [called({"name": ""})]}, "'contents[0].parts[0].function_call.name'"),
    (
        {"contents": [called({"name": "a", "args": "{}"})]},
        "'contents[0].parts[0].function_call.args'",
    ),
    ({"contents": [answered({})]}, "'contents[0].parts[0].function_response.name'"),
    ({"contents": [answered({"name": "a", "response": "x"})]}, "function_response.response'"),
    (
        {"contents": [answered({"name": "a", "parts": [{"executableCode": {}}]})]},
        "function_response.parts[0]",
    ),
    ({"systemInstruction": 1}, "'system_instruction'"),
    ({"generationConfig": []}, "'generation_config'"),
    ({"generationConfig": {"candidateCount": 2}}, "candidate_count"),
    ({"generationConfig": {"maxOutputTokens": 0}}, "max_output_tokens"),
    ({"generationConfig": {"stopSequences": [1]}}, "stop_sequences"),
    ({"tools": "look"}, "'tools'"),
    ({"tools": ["look"]}, "'tools[0]'"),
    ({"tools": [{"functionDeclarations": [{}]}]}, "'tools[0].function_declarations[0].name'"),
    ({"toolConfig": "AUTO"}, "'tool_config'"),
    ({"cachedContent": "cachedContents/7"}, "'cached_content' is not served here"),
    (
        {"generationConfig": {"responseLogprobs": True}},
        "Logprobs is not enabled for models/gemini-x",
    ),
    ({"generationConfig": {"logprobs": 3}}, "Logprobs is not enabled for models/gemini-x"),
    ({"generationConfig": {"responseModalities": ["TEXT", "AUDIO"]}}, "response_modalities"),
    ({"generationConfig": {"responseMimeType": "text/html"}}, "response_mime_type"),
    *(
        (
            {"generationConfig": {"responseMimeType": "text/x.enum", "responseSchema": schema}},
            "response_schema",
        )
        for schema in (None, {}, {"enum": []}, {"enum": [5]}, {"enum": {"a": "b"}})
    ),
]
"""Changes of the request, and the place or the words of the refusal."""
ENUM = {"enum": ["yes", "no"]}
UNSET = {"toolConfig": None, "safetySettings": None}
MEANS = [
    ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "hidden_parts", 1),
    *(
        ({"generationConfig": config}, "schema", schema)
        for config, schema in [
            ({}, None),
            ({"responseSchema": {"type": "OBJECT"}}, None),
            ({"responseMimeType": "text/plain"}, None),
            ({"responseLogprobs": False, "responseModalities": ["TEXT"]}, None),
            ({"responseMimeType": "application/json"}, {}),
            (
                {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}},
                {"type": "object"},
            ),
            (
                {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", **ENUM}},
                {"type": "string", **ENUM},
            ),
            (
                {"response_mime_type": "application/json", "responseJsonSchema": {"type": "null"}},
                {"type": "null"},
            ),
        ]
    ),
    *(
        ({"generationConfig": {key: config}}, "reasoning", share)
        for key, config, share in [
            ("thinkingConfig", None, "signed"),
            ("thinkingConfig", {"thinkingBudget": 1}, "signed"),
            ("thinkingConfig", {"includeThoughts": True}, "shown"),
            ("thinking_config", {"include_thoughts": True}, "shown"),
        ]
    ),
    (
        {
            "generationConfig": {
                "topK": 64,
                "thinkingConfig": {"includeThoughts": True},
                "seed": None,
            },
            **UNSET,
        },
        "requested_sampling",
        {"topK": 64, "thinkingConfig": {"includeThoughts": True}},
    ),
]
"""Changes of the request, and a field of the decoded call with its value."""


def test_what_the_sdk_sends_is_understood():
    server = Server()
    string = types.Schema(type=types.Type.STRING, min_length=1)
    schema = types.Schema(type=types.Type.OBJECT, properties={"at": string})
    look = types.FunctionDeclaration(name="look", description="Looks.", parameters=schema)
    call = types.Part(
        function_call=types.FunctionCall(id="c1", name="look", args={"at": "é"}),
        thought_signature=types.Part.model_validate(
            {"thoughtSignature": sign("call-7")}
        ).thought_signature,
    )
    answer = types.Part(
        function_response=types.FunctionResponse(
            id="c1", name="look", response={"result": "Nothing."}
        )
    )
    genai.Client(
        api_key="k", http_options=types.HttpOptions(httpx_client=server.client)
    ).models.generate_content(
        model="gemini-x",
        contents=[
            types.UserContent("Look."),
            types.ModelContent([types.Part(text="Hm.", thought=True), call]),
            types.UserContent([answer, types.Part(text="Go on.")]),
        ],
        config=types.GenerateContentConfig(
            system_instruction="Be brief.",
            max_output_tokens=5,
            stop_sequences=["END"],
            temperature=0.5,
            thinking_config=types.ThinkingConfig(include_thoughts=True),
            tools=[
                types.Tool(function_declarations=[look]),
                types.Tool(google_search=types.GoogleSearch()),
            ],
            response_mime_type="application/json",
            response_schema={"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
        ),
    )
    (decoded,) = server.calls
    assert decoded.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        assistant_message("", "Hm.", [message_tool_call("c1", "look", {"at": "é"})], "call-7"),
        {"role": "tool", "content": "Nothing.", "tool_call_id": "c1", "name": "look"},
        {"role": "user", "content": "Go on."},
    ]
    parameters = {"type": "object", "properties": {"at": {"type": "string", "minLength": 1}}}
    assert decoded.tools == [function_tool("look", "Looks.", parameters)]
    assert (decoded.hosted_tools, decoded.max_tokens, decoded.stop) == (
        [{"type": "googleSearch"}],
        5,
        ["END"],
    )
    assert decoded.schema["properties"] == {"a": {"type": "integer"}}
    assert decoded.requested_sampling["temperature"] == 0.5


FIELDS = """
args functionCall function_response id inlineData mode name output parts properties response role text thought
thoughtSignature type generateContentRequest
"""
bodies = hostile.bodies([REQUEST, SNAKE_REQUEST], hostile.values(["model", "user"], FIELDS.split()))
