"""Replies of this dialect, parsed by Google's own SDK, and requests of the SDK, decoded by this dialect."""

import json

import pytest
from google import genai
from google.genai import errors, types

from rolltap.addons.dialects.model_call import (
    ContextOverflow,
    DialectError,
    Reply,
    ToolCall,
    sign,
)
from tests.addons.dialects.server import Server

REPLIES = {
    "text": Reply("Hé\u2028l\x85lo 😀\r\n"),
    "reasoning and text": Reply("Done.", "I think.\n\nHard."),
    "a call": Reply(tool_calls=[ToolCall("c1", "look", '{"at": "é", "n": 1.5}')], finish_reason="tool_calls"),
    "calls with reasoning and text": Reply(
        "Wait.",
        "I look twice.",
        [ToolCall("c1", "look", '{"at": {"a": [1, null]}}'), ToolCall("c2", "look", "{}")],
        "tool_calls",
    ),
    "cut off": Reply("And th", "Hm.", finish_reason="length"),
    "ended by a stop sequence": Reply("One,", stop="END"),
    "nothing": Reply(),
}
THOUGHTS = types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=True))
ECHOED = {name: reply for name, reply in REPLIES.items() if name != "nothing"}  # the SDK leaves empty replies out


def connect(server, **options):
    """Return an SDK client whose requests are answered by a `Server`."""
    return genai.Client(api_key="x", http_options=types.HttpOptions(httpx_client=server.client), **options)


def generate(client, **request):
    return [client.models.generate_content(model="gemini-x", **request)]


def generate_stream(client, **request):
    return list(client.models.generate_content_stream(model="gemini-x", **request))


def read(responses):
    """Return what the SDK parsed: text, reasoning, tool calls and signatures."""
    parts = [part for response in responses for part in response.candidates[0].content.parts]
    text = "".join(part.text for part in parts if part.text and not part.thought)
    reasoning = "".join(part.text for part in parts if part.text and part.thought)
    calls = [part.function_call for part in parts if part.function_call]
    calls = [ToolCall(call.id, call.name, json.dumps(call.args, ensure_ascii=False)) for call in calls]
    return text, reasoning, calls, [part.thought_signature for part in parts if part.thought_signature]


@pytest.mark.parametrize("ask", [generate, generate_stream])
@pytest.mark.parametrize("config", [None, THOUGHTS], ids=["hidden thoughts", "thoughts"])
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
def test_the_sdk_reads_what_the_reply_holds(ask, config, reply):
    responses = ask(connect(Server(reply)), contents="Hi", config=config)
    text, reasoning, calls, signatures = read(responses)
    assert (text, calls) == (reply.content, reply.tool_calls)
    assert reasoning == (reply.reasoning if config else "")
    assert len(signatures) == 1
    last = responses[-1]
    reason = types.FinishReason.MAX_TOKENS if reply.finish_reason == "length" else types.FinishReason.STOP
    assert last.candidates[0].finish_reason is reason
    assert last.model_version == "gemini-x"
    assert last.response_id == "c9"
    usage = last.usage_metadata
    assert (usage.prompt_token_count, usage.candidates_token_count, usage.cached_content_token_count) == (7, 3, 4)
    assert usage.total_token_count == 10


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("reply", ECHOED.values(), ids=ECHOED.keys())
def test_the_sdks_chat_sends_the_reply_back_as_it_was_issued(streamed, reply):
    server = Server(reply)
    chat = connect(server).chats.create(model="gemini-x", config=THOUGHTS)
    for _ in range(2):
        list(chat.send_message_stream("Hi")) if streamed else chat.send_message("Hi")
    _, echoed, _ = server.calls[1].messages
    expected = reply.to_message() | {"call_id": "c9"}
    for call in expected.get("tool_calls", []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert echoed == expected


def test_what_the_sdk_sends_is_understood():
    server = Server()
    look = types.FunctionDeclaration(
        name="look",
        description="Looks.",
        parameters=types.Schema(
            type=types.Type.OBJECT, properties={"at": types.Schema(type=types.Type.STRING, min_length=1)}
        ),
    )
    call = types.Part(
        function_call=types.FunctionCall(id="c1", name="look", args={"at": "é"}),
        thought_signature=types.Part.model_validate({"thoughtSignature": sign("call-7")}).thought_signature,
    )
    answer = types.Part(function_response=types.FunctionResponse(id="c1", name="look", response={"result": "Nothing."}))
    generate(
        connect(server),
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
            tools=[types.Tool(function_declarations=[look]), types.Tool(google_search=types.GoogleSearch())],
            response_mime_type="application/json",
            response_schema={"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
        ),
    )
    (decoded,) = server.calls
    assert decoded.model == "gemini-x"
    assert decoded.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}],
            "call_id": "call-7",
        },
        {"role": "tool", "content": "Nothing.", "tool_call_id": "c1", "name": "look"},
        {"role": "user", "content": "Go on."},
    ]
    (tool,) = decoded.tools
    assert tool["function"] == {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "minLength": 1}}},
    }
    assert decoded.hosted_tools == [{"googleSearch": {}}]
    assert (decoded.max_tokens, decoded.stop) == (5, ["END"])
    assert decoded.schema["properties"] == {"a": {"type": "integer"}}
    assert decoded.requested_sampling["temperature"] == 0.5


@pytest.mark.parametrize("ask", [generate, generate_stream])
def test_vertex_ai_is_the_same_under_its_own_paths(ask):
    server = Server(Reply("Hi."))
    responses = ask(connect(server, vertexai=True), contents="Hi")
    assert read(responses)[0] == "Hi."
    assert server.calls[0].model == "gemini-x"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (DialectError("No."), "INVALID_ARGUMENT", errors.ClientError),
        (DialectError("Who?", status=401), "UNAUTHENTICATED", errors.ClientError),
        (DialectError("Down.", status=503), "UNAVAILABLE", errors.ServerError),
    ],
)
@pytest.mark.parametrize("ask", [generate, generate_stream])
def test_the_sdk_raises_its_own_error(ask, error, status, kind):
    with pytest.raises(kind) as raised:
        ask(connect(Server(error)), contents="Hi")
    assert (raised.value.code, raised.value.status, raised.value.message) == (error.status, status, str(error))


def test_the_sdk_raises_on_an_error_in_the_stream():
    server = Server(ContextOverflow(9, 8))
    received = []
    with pytest.raises(errors.ClientError, match="exceeds the maximum number of tokens") as raised:
        received.extend(connect(server).models.generate_content_stream(model="gemini-x", contents="Hi"))
    assert read(received)[0] == "Hal"
    assert raised.value.status == "INVALID_ARGUMENT"


def test_the_sdk_counts_tokens_and_lists_models():
    server = Server()
    client = connect(server)
    assert client.models.count_tokens(model="gemini-x", contents="Hi").total_tokens == 42
    assert server.calls[0].messages == [{"role": "user", "content": "Hi"}]
    listed = [(model.name, model.input_token_limit) for model in client.models.list()]
    assert listed == [("models/tiny", 4096), ("models/org/big", 8192)]
    assert client.models.get(model="other").name == "models/other"
