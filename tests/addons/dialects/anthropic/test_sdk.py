"""Replies of this dialect, parsed by Anthropic's own SDK."""

import json

import anthropic
import pytest

from rolltap.addons.dialects import anthropic as dialect
from rolltap.addons.dialects.model_call import (
    ContextOverflow,
    DialectError,
    Reply,
    ToolCall,
    parse_arguments,
    sign,
)
from tests.addons.dialects.server import USAGE, Server

LOOK = ToolCall("call_1", "look", '{"at": "é\\n", "n": 1.5}')
REPLIES = {
    "text": Reply("Hi <b>\u2028😀"),
    "reasoning": Reply("Hi.", "Hm."),
    "reasoning only": Reply("", "Hm.", finish_reason="length"),
    "one call": Reply("", "", [LOOK], "tool_calls"),
    "several calls": Reply(
        "Both:", "I look.", [LOOK, ToolCall("call_2", "go", "{}"), ToolCall("call_3", "go", "not JSON")], "tool_calls"
    ),
    "cut": Reply("Hi th", finish_reason="length"),
    "cut after a call": Reply("", "", [LOOK], "length"),
    "stop text": Reply("Hi", stop="END"),
    "nothing": Reply(),
}
PLAIN = {"model": "claude-x", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}
ASKED = {**PLAIN, "thinking": {"type": "enabled", "budget_tokens": 1024}}


def client_of(reply):
    """Return an SDK client whose requests are answered with a `Reply` or a `DialectError`."""
    return anthropic.Anthropic(api_key="k", max_retries=0, http_client=Server(reply).client)


def plain(client, asked=ASKED):
    return client.messages.create(**asked)


def streamed(client, asked=ASKED):
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


def beta_streamed(client, asked=ASKED):
    with client.beta.messages.stream(**asked, betas=["interleaved-thinking-2025-05-14"]) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("ask", [plain, streamed, beta_streamed])
@pytest.mark.parametrize("name", REPLIES)
def test_the_sdk_reads_what_the_reply_holds(name, ask):
    reply = REPLIES[name]
    message = ask(client_of(reply))
    assert (message.id, message.role, message.model) == ("msg_c9", "assistant", "claude-x")

    blocks = {kind: [block for block in message.content if block.type == kind] for kind in ("thinking", "text")}
    assert [(b.thinking, b.signature) for b in blocks["thinking"]] == [(reply.reasoning, sign("c9"))] * bool(
        reply.reasoning
    )
    assert [b.text for b in blocks["text"]] == [reply.content] * bool(reply.content)
    calls = [(b.id, b.name, b.input) for b in message.content if b.type == "tool_use"]
    parsed = [parse_arguments(call.arguments) for call in reply.tool_calls]
    wrapped = [value if isinstance(value, dict) else {"INVALID_JSON": value} for value in parsed]
    assert calls == [(c.id, c.name, value) for c, value in zip(reply.tool_calls, wrapped, strict=True)]

    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish_reason]
    assert message.stop_reason == ("stop_sequence" if reply.stop else reason)
    assert message.stop_sequence == reply.stop
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 4, 3)
    assert usage.cache_creation_input_tokens == 0


@pytest.mark.parametrize("ask", [plain, streamed, beta_streamed])
@pytest.mark.parametrize("thinking", [{}, {"thinking": {"type": "disabled"}}], ids=["absent", "disabled"])
def test_a_program_that_does_not_ask_for_thinking_gets_text_first(thinking, ask):
    for name in ("reasoning", "several calls"):
        message = ask(client_of(REPLIES[name]), {**PLAIN, **thinking})
        assert message.content[0].text == REPLIES[name].content
        assert "thinking" not in {block.type for block in message.content}
    assert ask(client_of(REPLIES["reasoning only"]), {**PLAIN, **thinking}).content == []


@pytest.mark.parametrize("ask", [plain, streamed, beta_streamed])
@pytest.mark.parametrize("kind", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}])
def test_thinking_that_is_to_be_omitted_is_a_signature(kind, ask):
    message = ask(client_of(REPLIES["reasoning"]), {**PLAIN, "thinking": {**kind, "display": "omitted"}})
    thinking, text = message.content
    assert (thinking.thinking, thinking.signature, text.text) == ("", sign("c9"), "Hi.")


def test_a_stream_begins_with_the_number_of_prompt_tokens():
    with client_of(REPLIES["text"]).messages.stream(**PLAIN) as stream:
        start = next(iter(stream))
    assert (start.type, start.message.usage.input_tokens) == ("message_start", USAGE.prompt)


@pytest.mark.parametrize("ask", [plain, streamed])
@pytest.mark.parametrize("name", REPLIES)
def test_what_the_sdk_sends_back_is_the_reply(name, ask):
    reply = REPLIES[name]
    echo = {"role": "assistant", "content": [b.to_dict(mode="json") for b in ask(client_of(reply)).content]}
    request = {**ASKED, "messages": [*ASKED["messages"], echo, {"role": "user", "content": "Well?"}]}
    decoded = dialect.decode(json.dumps(request).encode(), "/v1/messages").messages[1]
    assert decoded.pop("call_id", None) == ("c9" if reply.reasoning else None)
    issued = reply.to_message()
    for call in issued.get("tool_calls", []):
        call["function"]["arguments"] = parse_arguments(call["function"]["arguments"])
    assert decoded == issued


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, anthropic.BadRequestError, "invalid_request_error"),
        (401, anthropic.AuthenticationError, "authentication_error"),
        (403, anthropic.PermissionDeniedError, "permission_error"),
        (404, anthropic.NotFoundError, "not_found_error"),
        (413, anthropic.APIStatusError, "request_too_large"),
        (422, anthropic.UnprocessableEntityError, "invalid_request_error"),
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (500, anthropic.InternalServerError, "api_error"),
        (502, anthropic.InternalServerError, "api_error"),
        (503, anthropic.InternalServerError, "overloaded_error"),
        (504, anthropic.InternalServerError, "timeout_error"),
        (529, anthropic.OverloadedError, "overloaded_error"),
    ],
)
def test_an_error_has_the_type_of_its_status(status, error, kind):
    with pytest.raises(error) as raised:
        plain(client_of(DialectError("No.", status=status)))
    assert raised.value.status_code == status
    assert raised.value.body == {"type": "error", "error": {"type": kind, "message": "No."}}


def test_an_overflow_is_a_bad_request():
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9 tokens > 8 maximum"):
        plain(client_of(ContextOverflow(9, 8)))


@pytest.mark.parametrize("ask", [streamed, beta_streamed])
def test_an_error_within_a_stream_is_raised(ask):
    with pytest.raises(anthropic.APIStatusError, match=r"overloaded_error.*The engine is down\."):
        ask(client_of(DialectError("The engine is down.", status=503)))


def test_tokens_are_counted():
    counted = client_of(None).messages.count_tokens(model="claude-x", messages=ASKED["messages"], system="Be brief.")
    assert counted.input_tokens == 42


def test_models_are_listed_on_one_page():
    listed = list(client_of(None).models.list(limit=1))
    assert [(m.id, m.display_name, m.max_input_tokens) for m in listed] == [
        ("tiny", "tiny", 4096),
        ("org/big", "org/big", 8192),
    ]
    assert {m.created_at.timestamp() for m in listed} == {5}


@pytest.mark.parametrize("name", ["claude-x", "org/any"])
def test_any_model_is_there(name):
    model = client_of(None).models.retrieve(name)
    assert (model.id, model.type, model.max_input_tokens) == (name, "model", 4096)
