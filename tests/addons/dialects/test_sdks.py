"""The providers' own SDKs read the replies, whole and streamed, and send them back."""

import json
from dataclasses import replace

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors, types
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.responses import Response

from rolltap.addons.dialects.call import ContextOverflow, DialectError, Reply, ToolCall
from rolltap.addons.dialects.json_values import parse_arguments
from tests.addons.dialects.server import Server

USER = {"role": "user", "content": "Hi"}
LOOK = ToolCall("call_1", "look", '{"at": "é\\n", "n": {"a": [1.5, null]}}')
CALLS = [
    LOOK,
    ToolCall("call_2", "look", "not JSON"),
    ToolCall("call_3", "patch", '{"input": "+ x\\n"}'),
    ToolCall("call_4", "agents__spawn", '{"n": 1}'),
]
REPLIES = {
    "text": Reply("Hé <b>\u2028l\x85lo 😀\r\n\n there."),
    "nothing": Reply(),
    "reasoning and text": Reply("Hi.", "Hm.\n\nYes?"),
    "only reasoning, cut": Reply("", "Hm, I", finish_reason="length"),
    "cut text": Reply("I was abou", finish_reason="length"),
    "cut after a call": Reply("", "", [LOOK], "length"),
    "stop text": Reply("Hi", stop="END"),
    "a call": Reply("", "", [LOOK], "tool_calls"),
    "several calls": Reply("All of them:", "I look, patch and spawn.", CALLS, "tool_calls"),
}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
TOOLS = [
    FUNCTION,
    {"type": "custom", "name": "patch"},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Agents.",
        "tools": [{**FUNCTION, "name": "spawn"}],
    },
]
"""Tools of the Responses API. It sends calls of the last two in forms of their own."""
THINKING = {"type": "enabled", "budget_tokens": 1024}
THOUGHTS = types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=True))


def openai_client(server):
    return openai.OpenAI(api_key="k", max_retries=0, http_client=server.client)


def anthropic_client(server):
    return anthropic.Anthropic(api_key="k", max_retries=0, http_client=server.client)


def google_client(server, **options):
    return genai.Client(
        api_key="k", http_options=types.HttpOptions(httpx_client=server.client), **options
    )


def dumped(arguments):
    """Return the text of arguments that an API sends as an object."""
    return arguments.get("INVALID_JSON") or json.dumps(arguments, ensure_ascii=False)


def ended(calls, cut):
    """Return the finish reason where an API says only whether the reply was cut."""
    return "length" if cut else "tool_calls" if calls else "stop"


def texts_of(parts):
    return "".join(part.text for part in parts)


class Chat:
    ways = ("whole", "stream")
    raises = openai.APIError

    def ask(self, server, way="whole", messages=(USER,)):
        create = openai_client(server).chat.completions.create
        if way == "whole":
            return create(model="gpt-x", messages=messages)
        state = ChatCompletionStreamState()
        usage = {"include_usage": True}
        for chunk in create(model="gpt-x", messages=messages, stream=True, stream_options=usage):
            state.handle_chunk(chunk)
        return state.current_completion_snapshot

    def read(self, completion):
        """Return what the SDK parsed: the reply, the tokens of prompt, reply and cache, the id and
        the model."""
        (choice,) = completion.choices
        message = choice.message
        usage = completion.usage
        calls = []
        for call in message.tool_calls or ():
            calls.append(ToolCall(call.id, call.function.name, call.function.arguments))
        reasoning = getattr(message, "reasoning_content", "")
        reply = Reply(message.content or "", reasoning, calls, choice.finish_reason)
        cached = usage.prompt_tokens_details.cached_tokens
        assert usage.total_tokens == 10
        counts = (usage.prompt_tokens, usage.completion_tokens, cached)
        return reply, counts, completion.id, completion.model

    def echoed(self, server, way):
        """Ask once more, after the reply, and return what the reply decodes to."""
        message = self.ask(server, way).choices[0].message
        self.ask(server, messages=[USER, message.to_dict(), USER])
        return server.calls[-1].messages[1]


class Responses:
    ways = ("whole", "stream", "accumulated")
    raises = openai.APIError

    def ask(self, server, way="whole", **fields):
        responses = openai_client(server).responses
        asked = {"model": "gpt-x", "input": [USER], "tools": TOOLS, **fields}
        if way == "accumulated":
            with responses.stream(**asked) as stream:
                return stream.get_final_response()
        if way == "whole":
            response = responses.create(**asked)
        else:
            for event in responses.create(**asked, stream=True):
                type(event).model_validate(event.to_dict(mode="json", warnings=False))
            response = event.response
        # the SDK's own parsing does not validate types
        Response.model_validate_json(json.dumps(response.to_dict(mode="json", warnings=False)))
        return response

    def read(self, response):
        usage = response.usage
        reasoning = ""
        calls = []
        for item in response.output:
            if item.type == "reasoning":
                reasoning += texts_of(item.summary)
            elif item.type == "custom_tool_call":
                calls.append(ToolCall(item.call_id, item.name, json.dumps({"input": item.input})))
            elif item.type == "function_call":
                name = f"{item.namespace}__{item.name}" if item.namespace else item.name
                calls.append(ToolCall(item.call_id, name, item.arguments))
        reason = ended(calls, response.status == "incomplete")
        reply = Reply(response.output_text, reasoning, calls, reason)
        counts = (usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens)
        return reply, counts, response.id, response.model

    def echoed(self, server, way):
        output = [item.to_dict() for item in self.ask(server, way).output]
        self.ask(server, input=[USER, *output])
        return server.calls[-1].messages[1]


class Messages:
    ways = ("whole", "stream", "beta stream")
    raises = anthropic.APIError

    def ask(self, server, way="whole", **fields):
        client = anthropic_client(server)
        asked = {"model": "claude-x", "max_tokens": 100, "messages": [USER], "thinking": THINKING}
        asked.update(fields)
        if way == "whole":
            return client.messages.create(**asked)
        messages = client.messages
        if way == "beta stream":
            messages = client.beta.messages
            asked["betas"] = ["interleaved-thinking-2025-05-14"]
        with messages.stream(**asked) as stream:
            return stream.get_final_message()

    def read(self, message):
        usage = message.usage
        content = ""
        reasoning = ""
        calls = []
        for block in message.content:
            if block.type == "tool_use":
                calls.append(ToolCall(block.id, block.name, dumped(block.input)))
            elif block.type == "thinking":
                reasoning += block.thinking
            else:
                content += block.text
        reasons = {"max_tokens": "length", "tool_use": "tool_calls"}
        reason = reasons.get(message.stop_reason, "stop")
        reply = Reply(content, reasoning, calls, reason, message.stop_sequence)
        assert (message.stop_reason == "stop_sequence") == bool(message.stop_sequence)
        cached = usage.cache_read_input_tokens
        counts = (usage.input_tokens + cached, usage.output_tokens, cached)
        return reply, counts, message.id, message.model

    def echoed(self, server, way):
        content = [block.to_dict(mode="json") for block in self.ask(server, way).content]
        self.ask(server, messages=[USER, {"role": "assistant", "content": content}, USER])
        return server.calls[-1].messages[1]


class Gemini:
    ways = ("whole", "stream", "Vertex AI")
    raises = errors.APIError

    def ask(self, server, way="whole", config=THOUGHTS):
        models = google_client(server, vertexai=way == "Vertex AI").models
        generate = models.generate_content_stream if way == "stream" else models.generate_content
        answer = generate(model="gemini-x", contents="Hi", config=config)
        return list(answer) if way == "stream" else [answer]

    def read(self, responses):
        last = responses[-1]
        texts = {False: "", True: ""}
        calls = []
        signatures = 0
        for response in responses:
            for part in response.candidates[0].content.parts:
                if part.function_call:
                    call = part.function_call
                    calls.append(ToolCall(call.id, call.name, dumped(call.args)))
                texts[bool(part.thought)] += part.text or ""
                signatures += bool(part.thought_signature)
        assert signatures == 1
        cut = last.candidates[0].finish_reason is types.FinishReason.MAX_TOKENS
        reply = Reply(texts[False], texts[True], calls, ended(calls, cut))
        usage = last.usage_metadata
        cached = usage.cached_content_token_count
        counts = (usage.prompt_token_count, usage.candidates_token_count, cached)
        return reply, counts, last.response_id, last.model_version

    def echoed(self, server, way):
        chat = google_client(server, vertexai=way == "Vertex AI").chats.create(
            model="gemini-x", config=THOUGHTS
        )
        for _ in range(2):
            list(chat.send_message_stream("Hi")) if way == "stream" else chat.send_message("Hi")
        return server.calls[-1].messages[1]


CHAT = Chat()
RESPONSES = Responses()
MESSAGES = Messages()
GEMINI = Gemini()
SDKS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES, "gemini": GEMINI}
WAYS = []
for name, sdk in SDKS.items():
    WAYS += [pytest.param(sdk, way, id=f"{name}-{way}") for way in sdk.ways]
every_way = pytest.mark.parametrize(("sdk", "way"), WAYS)
every_reply = pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)


@every_way
@every_reply
def test_the_sdk_reads_what_the_reply_holds(sdk, way, reply):
    if way == "accumulated" and reply.finish_reason == "length":
        return  # the SDK returns no incomplete responses
    read, counts, reply_id, model = sdk.read(sdk.ask(Server(reply), way))
    assert read == (reply if sdk is MESSAGES else replace(reply, stop=None))
    assert counts == (7, 3, 4)
    assert reply_id.endswith("c9")
    assert model in ("gpt-x", "claude-x", "gemini-x")


@every_way
@every_reply
def test_what_the_sdk_sends_back_is_the_reply(sdk, way, reply):
    empty = not (reply.content or reply.tool_calls)
    if (way == "accumulated" and reply.finish_reason == "length") or (sdk is GEMINI and empty):
        return  # the SDK returns no incomplete responses; Google's leaves empty replies out
    issued = reply.to_message()
    if sdk is GEMINI or (reply.reasoning and sdk is not CHAT):
        issued["call_id"] = "c9"
    for call in issued.get("tool_calls", ()):
        call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
    assert sdk.echoed(Server(reply), way) == issued


@pytest.mark.parametrize("sdk", SDKS.values(), ids=SDKS)
@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500, 503, 504, 529])
def test_an_error_is_raised_with_its_status(sdk, status):
    with pytest.raises(sdk.raises, match=r"No\.") as raised:
        sdk.ask(Server(DialectError("No.", status=status)))
    assert getattr(raised.value, "status_code", None) or raised.value.code == status


@pytest.mark.parametrize(
    ("sdk", "words"),
    [
        (CHAT, "maximum context length is 8 tokens"),
        (RESPONSES, "maximum context length is 8 tokens"),
        (MESSAGES, "prompt is too long: 9 tokens > 8 maximum"),
        (GEMINI, r"input token count \(9\) exceeds the maximum number of tokens allowed \(8\)"),
    ],
    ids=SDKS,
)
def test_an_overflow_has_the_wording_of_the_api(sdk, words):
    with pytest.raises(sdk.raises, match=words):
        sdk.ask(Server(ContextOverflow(9, 8)))


@pytest.mark.parametrize(
    ("sdk", "way"),
    [(CHAT, "stream"), (MESSAGES, "stream"), (MESSAGES, "beta stream"), (GEMINI, "stream")],
)
def test_an_error_within_a_stream_is_raised(sdk, way):
    with pytest.raises(sdk.raises, match=r"The engine is down\."):
        sdk.ask(Server(DialectError("The engine is down.", status=503)), way)


@pytest.mark.parametrize("way", MESSAGES.ways)
def test_thinking_is_sent_as_the_program_asks(way):
    server = Server(REPLIES["reasoning and text"])
    for thinking in (anthropic.omit, {"type": "disabled"}):
        (text,) = MESSAGES.ask(server, way, thinking=thinking).content
        assert text.text == "Hi."
    for kind in (THINKING, {"type": "adaptive"}):
        thinking, text = MESSAGES.ask(server, way, thinking={**kind, "display": "omitted"}).content
        assert (thinking.thinking, bool(thinking.signature), text.text) == ("", True, "Hi.")


@pytest.mark.parametrize("way", GEMINI.ways)
def test_thoughts_are_sent_to_those_who_ask_for_them(way):
    reply, *_ = GEMINI.read(GEMINI.ask(Server(REPLIES["several calls"]), way, config=None))
    assert reply == replace(REPLIES["several calls"], reasoning="")


def test_a_stream_of_messages_begins_with_the_number_of_prompt_tokens():
    client = anthropic_client(Server(REPLIES["text"]))
    with client.messages.stream(model="claude-x", max_tokens=9, messages=[USER]) as stream:
        start = next(iter(stream))
    assert (start.type, start.message.usage.input_tokens) == ("message_start", 7)


def test_tokens_are_counted():
    server = Server()
    asked = {"model": "m", "messages": [USER], "system": "Be brief."}
    responses = openai_client(server).responses
    assert anthropic_client(server).messages.count_tokens(**asked).input_tokens == 42
    assert responses.input_tokens.count(model="m", input="Hi").input_tokens == 42
    assert google_client(server).models.count_tokens(model="m", contents="Hi").total_tokens == 42
    assert [call.messages[-1] for call in server.calls] == [USER] * 3


LISTED = [("tiny", 4096), ("org/big", 8192), ("org/any", 4096)]
"""Names and context windows of the listed models, and of a name that is not."""


def test_openais_models_are_listed_and_any_name_is_one():
    models = openai_client(Server()).models
    found = [*models.list(), models.retrieve("org/any")]
    assert [(model.id, model.max_model_len) for model in found] == LISTED


def test_anthropics_models_are_listed_and_any_name_is_one():
    models = anthropic_client(Server()).models
    found = [*models.list(limit=1), models.retrieve("org/any")]
    assert [(model.id, model.max_input_tokens) for model in found] == LISTED
    assert {(model.type, model.created_at.timestamp()) for model in found} == {("model", 5)}


def test_googles_models_are_listed_and_any_name_is_one():
    models = google_client(Server()).models
    found = [*models.list(), models.get(model="org/any")]
    assert [(model.name, model.input_token_limit) for model in found] == [
        (f"models/{name}", window) for name, window in LISTED
    ]
    for model in found:
        assert "generateContent" in model.supported_actions
