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


def answer(**fields):
    return {"functionResponse": {"response": {}, **fields}}


REQUEST = json.loads(
    """
{
  "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
  "contents": [
    {"role": "user", "parts": [{"text": "Look "}, {"text": "there."}]},
    {
      "role": "model",
      "parts": [
        {"text": "I look.", "thought": true},
        {"text": "Wait."},
        {
          "functionCall": {"id": "c1", "name": "look", "args": {"at": "é", "n": 1}},
          "thoughtSignature": "SIGNATURE"
        },
        {"functionCall": {"id": "c2", "name": "look", "args": {}}}
      ]
    },
    {
      "role": "user",
      "parts": [
        {"functionResponse": {"response": {"output": "Nothing."}, "id": "c1", "name": "look"}},
        {"text": "Go on."},
        {"functionResponse": {"response": {"error": "Too dark."}, "id": "c2", "name": "look"}}
      ]
    }
  ],
  "tools": [
    {
      "functionDeclarations": [
        {
          "name": "look",
          "description": "Looks.",
          "parametersJsonSchema": {
            "type": "object",
            "properties": {"at_what": {"type": "string"}}
          }
        }
      ]
    },
    {"googleSearch": {}}
  ],
  "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
  "safetySettings": [],
  "generationConfig": {
    "maxOutputTokens": 5,
    "stopSequences": ["END"],
    "temperature": 0.0,
    "candidateCount": 1
  }
}
""".replace("SIGNATURE", sign("call-7"))
)


def snake(value):
    """Return a request with the names of its fields in snake case, and each list of one message as
    the message."""
    if isinstance(value, dict):
        found = {}
        for key, inner in value.items():
            found[re.sub("([A-Z])", r"_\1", key).lower()] = snake(inner)
        return found
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        return snake(value[0])
    return [*map(snake, value)] if isinstance(value, list) else value


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
    return decode_body({**REQUEST, **changes}, target)


def decode_body(body, target=GENERATE):
    return routes.GEMINI.decode(parse_object(json.dumps(body).encode()), target)


def decode_contents(*contents):
    return decode(contents=list(contents)).messages[1:]


def called(*calls, **fields):
    parts = [{"functionCall": call, **fields} for call in calls]
    return {"role": "model", "parts": parts}


def answered(*responses):
    return {"role": "user", "parts": [answer(**fields) for fields in responses]}


def call_ids(message):
    return [call["id"] for call in message["tool_calls"]]


def answer_ids(messages):
    return [message["tool_call_id"] for message in messages if message["role"] == "tool"]


LOOK = {"name": "look"}
OLD = {"id": "old", **LOOK}
NEW = {"id": "new", **LOOK}
READ = {"name": "read"}
SIGNED = {"thoughtSignature": sign("call-7")}
ISSUED = [tool_call_id("call-7", 0), tool_call_id("call-7", 1)]


class TestDecode:
    def test_a_request_becomes_a_model_call(self):
        assert decode() == CALL

    def test_snake_case_and_lists_of_one_mean_the_same(self):
        assert decode_body(SNAKE_REQUEST) == CALL

    def test_the_path_says_model_and_stream(self):
        assert not decode().stream
        call = decode("/v1beta/models/Qwen%2FQwen3:8b:streamGenerateContent?alt=sse")
        assert call.stream
        assert call.model == "Qwen/Qwen3:8b"

    @pytest.mark.parametrize("wrapper", ["generateContentRequest", "generate_content_request"])
    def test_count_tokens_takes_contents_or_a_whole_request(self, wrapper):
        target = "/v1beta/models/gemini-x:countTokens"
        body = {wrapper: {"model": "models/gemini-x", **REQUEST}}
        assert decode_body(body, target) == decode(target) == CALL

    @pytest.mark.parametrize(
        ("instruction", "text"),
        [
            ("One.\n\nTwo.", ["One.\n\nTwo."]),
            ({"parts": [{"text": "One."}, {"text": "Two."}]}, ["One.\n\nTwo."]),
            ({"parts": {"text": "One."}}, ["One."]),
            (None, []),
            ("", []),
            ({}, []),
            ({"parts": []}, []),
            ({"parts": [{"text": ""}]}, []),
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
            (SIGNED, {"content": "", "call_id": "call-7"}),
        ],
        ids=["not issued here", "alone"],
    )
    def test_a_signature_may_be_anothers_and_a_part_of_its_own(self, part, message):
        (decoded,) = decode_contents({"role": "model", "parts": [part]})
        assert decoded == {"role": "assistant", **message}

    def test_consecutive_user_contents_are_separate_messages_and_those_of_the_model_one(self):
        roles = [None, "user", "model", "model", "function"]
        messages = decode_contents(*({"role": role, "parts": {"text": "a"}} for role in roles))
        said = [("user", "a"), ("user", "a"), ("assistant", "aa"), ("user", "a")]
        assert messages == [{"role": role, "content": text} for role, text in said]

    def test_responses_without_ids_answer_the_calls_of_their_name_in_order(self):
        messages = decode_contents(
            called(LOOK, READ, LOOK),
            answered(LOOK, LOOK, READ),
            called(LOOK),
            answered(LOOK, LOOK),
        )
        assert call_ids(messages[0]) == ["call_1", "call_2", "call_3"]
        assert call_ids(messages[4]) == ["call_4"]
        assert answer_ids(messages) == ["call_1", "call_3", "call_2", "call_4", ""]

    def test_a_signed_turn_without_ids_has_those_that_its_calls_were_issued_with(self):
        signed = called(LOOK, READ, {"id": "own", **LOOK})
        signed["parts"][0].update(SIGNED)
        model, *results = decode_contents(signed, answered(READ, LOOK, LOOK))
        first, second = ISSUED
        assert call_ids(model) == [first, second, "own"]
        assert answer_ids(results) == [second, first, "own"]

    def test_the_signature_may_be_on_any_part_of_the_turn(self):
        parts = [{"functionCall": LOOK}, {"text": "", **SIGNED}]
        (model,) = decode_contents({"role": "model", "parts": parts})
        assert call_ids(model) == ISSUED[:1]

    @pytest.mark.parametrize("signatures", [0, 1, 2])
    def test_a_turn_in_several_contents_has_the_ids_that_its_calls_were_issued_with(
        self, signatures
    ):
        whole = called(LOOK, LOOK)
        for piece in whole["parts"][:signatures]:
            piece.update(SIGNED)
        split = [{"role": "model", "parts": [piece]} for piece in whole["parts"]]
        ids = ISSUED if signatures else ["call_1", "call_2"]
        for turn in ([whole], split):
            model, *results = decode_contents(*turn, answered(LOOK, LOOK))
            assert call_ids(model) == answer_ids(results) == ids

    def test_a_response_without_an_id_does_not_answer_a_call_of_an_earlier_turn(self):
        never_mind = {"parts": [{"text": "Never mind."}]}
        messages = decode_contents(called(OLD), never_mind, called(NEW), answered(LOOK))
        assert answer_ids(messages) == ["new"]
        assert messages[-1]["name"] == "look"

    def test_a_response_is_matched_by_its_id_first(self):
        unknown = {"id": "c9", "name": "go"}
        messages = decode_contents(called(OLD, NEW), answered(NEW, LOOK, unknown))
        assert answer_ids(messages) == ["new", "old", "c9"]
        assert messages[-1]["name"] == "go"

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
        (message,) = decode_contents(answered({**LOOK, "response": response}))
        assert message["content"] == text


REFUSED = hostile.cases("""
contents is not specified
    {"contents": null}
    {"contents": []}
'contents'
    {"contents": "Hi"}
'contents[0]'
    {"contents": ["Hi"]}
'contents[0].role'
    {"contents": [{"role": "robot"}]}
    {"contents": [{"role": ["user"]}]}
'contents[0].parts'
    {"contents": [{"parts": "Hi"}]}
'contents[0].parts[0].text'
    {"contents": [{"parts": [{"text": 1}]}]}
'contents[0].parts[1].inline_data'
    {"contents": [{"parts": [{}, {"inline_data": ""}]}]}
takes text only
    {"contents": [{"parts": [{"fileData": []}]}]}
executable_code
    {"contents": [{"role": "model", "parts": [{"executable_code": {}}]}]}
'contents[0].parts[0].function_call'
    {"contents": [{"parts": [{"functionCall": {"name": "a"}}]}]}
'contents[0].parts[0].function_response'
    {"contents": [{"role": "model", "parts": [{"functionResponse": {}}]}]}
'contents[0].parts[0].function_call.name'
    {"contents": [{"role": "model", "parts": [{"functionCall": {"name": ""}}]}]}
parts[0].function_call.args'
    {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "a", "args": "{}"}}]}]}
'contents[0].parts[0].function_response.name'
    {"contents": [{"role": "user", "parts": [{"functionResponse": {"response": {}}}]}]}
function_response.response'
    {"contents": [{"role": "user", "parts": [{"functionResponse": {"response": "x",
        "name": "a"}}]}]}
function_response.parts[0]
    {"contents": [{"role": "user", "parts": [{"functionResponse": {"response": {}, "name": "a",
        "parts": [{"executableCode": {}}]}}]}]}
'system_instruction'
    {"systemInstruction": 1}
'generation_config'
    {"generationConfig": []}
candidate_count
    {"generationConfig": {"candidateCount": 2}}
max_output_tokens
    {"generationConfig": {"maxOutputTokens": 0}}
stop_sequences
    {"generationConfig": {"stopSequences": [1]}}
'tools'
    {"tools": "look"}
'tools[0]'
    {"tools": ["look"]}
'tools[0].function_declarations[0].name'
    {"tools": [{"functionDeclarations": [{}]}]}
'tool_config'
    {"toolConfig": "AUTO"}
'cached_content' is not served here
    {"cachedContent": "cachedContents/7"}
Logprobs is not enabled for models/gemini-x
    {"generationConfig": {"responseLogprobs": true}}
    {"generationConfig": {"logprobs": 3}}
response_modalities
    {"generationConfig": {"responseModalities": ["TEXT", "AUDIO"]}}
response_mime_type
    {"generationConfig": {"responseMimeType": "text/html"}}
response_schema
    {"generationConfig": {"responseMimeType": "text/x.enum", "responseSchema": null}}
    {"generationConfig": {"responseMimeType": "text/x.enum", "responseSchema": {}}}
    {"generationConfig": {"responseMimeType": "text/x.enum", "responseSchema": {"enum": []}}}
    {"generationConfig": {"responseMimeType": "text/x.enum", "responseSchema": {"enum": [5]}}}
    {"generationConfig": {"responseMimeType": "text/x.enum",
        "responseSchema": {"enum": {"a": "b"}}}}
""")
"""Changes of the request, and the place or the words of the refusal."""
MEANS = hostile.means("""
hidden_parts = 1
    {"systemInstruction": {"parts": [{"inlineData": {}}]}}
schema = null
    {"generationConfig": {}}
    {"generationConfig": {"responseSchema": {"type": "OBJECT"}}}
    {"generationConfig": {"responseMimeType": "text/plain"}}
    {"generationConfig": {"responseLogprobs": false, "responseModalities": ["TEXT"]}}
schema = {}
    {"generationConfig": {"responseMimeType": "application/json"}}
schema = {"type": "object"}
    {"generationConfig": {"responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT"}}}
schema = {"type": "string", "enum": ["yes", "no"]}
    {"generationConfig": {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING",
        "enum": ["yes", "no"]}}}
schema = {"type": "null"}
    {"generationConfig": {"response_mime_type": "application/json",
        "responseJsonSchema": {"type": "null"}}}
reasoning = "signed"
    {"generationConfig": {"thinkingConfig": null}}
    {"generationConfig": {"thinkingConfig": {"thinkingBudget": 1}}}
reasoning = "shown"
    {"generationConfig": {"thinkingConfig": {"includeThoughts": true}}}
    {"generationConfig": {"thinking_config": {"include_thoughts": true}}}
requested_sampling = {"topK": 64, "thinkingConfig": {"includeThoughts": true}}
    {"generationConfig": {"topK": 64, "thinkingConfig": {"includeThoughts": true}, "seed": null},
        "toolConfig": null, "safetySettings": null}
""")
"""Changes of the request, and a field of the decoded call with its value."""


def test_what_the_sdk_sends_is_understood():
    server = Server()
    string = types.Schema(type=types.Type.STRING, min_length=1)
    schema = types.Schema(type=types.Type.OBJECT, properties={"at": string})
    look = types.FunctionDeclaration(name="look", description="Looks.", parameters=schema)
    call = types.Part(
        function_call=types.FunctionCall(id="c1", name="look", args={"at": "é"}),
        thought_signature=types.Part.model_validate(SIGNED).thought_signature,
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
args functionCall function_response id inlineData mode name output parts properties response role
text thought
thoughtSignature type generateContentRequest
"""
bodies = hostile.bodies([REQUEST, SNAKE_REQUEST], hostile.values(["model", "user"], FIELDS.split()))
