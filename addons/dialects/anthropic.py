"""The Anthropic Messages API, which the Anthropic SDKs and Claude Code use.

Field names follow Anthropic's API reference. A conversation must decode to the same messages in
each request. The requests of one Claude Code session differ, and so do replies and their echoes:

| on the wire | here |
| --- | --- |
| a system block with billing information differs in each request | dropped |
| `cache_control` moves to the last block | ignored |
| a content of one text block is a string when it has no `cache_control` | the same text |
| blocks end with a newline, but for the last of a message | joined without one |
| blocks of the system prompt end without one | joined with a blank line |
| a reply is sent back as several assistant messages | one turn |
| a tool with `defer_loading` is in `tools` once a search found it | shown by its `tool_reference` |
| the results of tools are blocks of a user message | tool messages before the user's text |
| blocks of hosted tools, which another model used | JSON |
| `input` of a tool call is an object | text that is no object is wrapped: `tools.as_object` |
| an idle connection is kept open | a `ping` |
| Claude Code rewrites arguments of calls | `claude_code.normal_arguments` |
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from rolltap.addons.dialects import dialect
from rolltap.addons.dialects.call import (
    ContextOverflow,
    DialectError,
    Message,
    ModelCall,
    Part,
    Reply,
    ReplyContext,
    ServedModel,
    Tool,
    ToolCall,
    Usage,
    assistant_message,
    message_tool_call,
    sign,
    signed_call,
)
from rolltap.addons.dialects.claude_code import is_claude_code, normal_arguments
from rolltap.addons.dialects.fields import Fields, Wording
from rolltap.addons.dialects.json_values import Object, described, dump_json
from rolltap.addons.dialects.tools import as_object, from_object, function_tool

_WORDING = Wording("{place}: Input should be {expected}.", index=".{}")
_BILLING = "x-anthropic-billing-header"
_ROLES = ("user", "assistant", "system")
_CONTENT = "a string or a list of content blocks"
_HOSTED_BLOCKS = ("server_tool_use", "mcp_tool_use", "search_result")
_RECORDED_OPTIONS = [
    "temperature",
    "top_p",
    "top_k",
    "tool_choice",
    "thinking",
    "output_config",
    "output_format",
    "context_management",
    "service_tier",
    "speed",
    "inference_geo",
]
"""Options that the row keeps (`Call.sampling`, key `asked`), part of the `request_digest`. `decode`
also reads those of them that are applied."""
_PREFILL = "This model does not support assistant message prefill."
_ORPHAN = (
    "messages: unexpected `tool_use_id` found in `tool_result` blocks: {}. "
    "Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
)
_EMPTY_BLOCKS = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class AnthropicMessages(dialect.Dialect):
    """The Messages API."""

    NAME = "anthropic-messages"
    CONVERSATION = "messages"
    GENERATE = ("/v1/messages",)
    COUNT_TOKENS = ("/v1/messages/count_tokens",)
    MODELS = "/v1/models"

    def decode(
        self,
        request: Object,
        target: str,
        known: Sequence[Part] = (),
    ) -> ModelCall:
        fields = Fields(request, _WORDING)
        counting = target.partition("?")[0] in self.COUNT_TOKENS
        metadata = fields.inner("metadata")
        diagnostics = fields.inner("diagnostics")
        model_call = ModelCall(
            model=fields.label("model", ""),
            messages=[],
            tools=[],
            stream=fields["stream"] is True,
            stop=fields.stop_texts("stop_sequences"),
            may_call=fields.inner("tool_choice")["type"] != "none",
            reasoning=_reasoning(fields.inner("thinking")),
            schema=_schema(fields),
            requested_sampling=fields.chosen(_RECORDED_OPTIONS),
            client_metadata={
                **metadata.texts_by_place("user_id"),
                **diagnostics.texts_by_place("previous_message_id"),
            },
        )
        if not counting:
            model_call.max_tokens = fields.positive_integer("max_tokens")
        if is_claude_code(metadata.maybe("user_id", str)):
            model_call.echo_rule = normal_arguments
        blocks = _Blocks(_read_tools(fields, model_call))
        system = blocks.read_system(fields)
        parts = dialect.decode_parts(fields, self.CONVERSATION, known, blocks.read_message)
        if not parts:
            raise fields.refusal(self.CONVERSATION, "a list of at least one message")
        parts = dialect.name_parts(parts, _ORPHAN)
        model_call.hidden_parts = system.hidden_parts
        model_call.messages = system.messages + dialect.join_turns(parts, separator="")
        if model_call.messages[-1]["role"] == "assistant" and not counting:
            raise DialectError(f"{_PREFILL} The conversation must end with a user message.")
        return dialect.decoded(model_call, parts)

    def encode_reply(
        self,
        context: ReplyContext,
        reply: Reply,
        usage: Usage,
    ) -> bytes:
        content: list[Object] = []
        shown = context.model_call.reasoning
        if reply.reasoning and shown != "hidden":
            thinking = {**_EMPTY_BLOCKS["thinking"], "signature": sign(context.call_id)}
            if shown == "shown":
                thinking["thinking"] = reply.reasoning
            content.append(thinking)
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        for call in reply.tool_calls:
            arguments = as_object(call.arguments)
            content.append(_tool_use(call, arguments))
        message = _message(context, usage)
        message["content"] = content
        return dump_json(message | _stop(reply))

    def stream_encoder(self, context: ReplyContext) -> dialect.StreamEncoder:
        return _StreamEncoder(context)

    def encode_error(self, error: DialectError) -> bytes:
        return dump_json(_error(error))

    def encode_token_count(self, num_tokens: int) -> bytes:
        return dump_json({"input_tokens": num_tokens})

    def model_entry(self, model: ServedModel, created: int) -> Object:
        return {
            "type": "model",
            "id": model.name,
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "max_input_tokens": model.context_window,
            "max_tokens": model.context_window,
        }

    def model_list(self, entries: list[Object]) -> Object:
        return {
            "data": entries,
            "has_more": False,
            "first_id": entries[0]["id"],
            "last_id": entries[-1]["id"],
        }


def _schema(fields: Fields) -> Object | None:
    form = fields.inner("output_config").inner("format")
    if not form.values:
        form = fields.inner("output_format")  # the older name
    if form["type"] != "json_schema":
        return None
    return form.maybe("schema", dict)


def _reasoning(thinking: Fields) -> Literal["shown", "signed", "hidden"]:
    if thinking["type"] not in ("enabled", "adaptive"):
        return "hidden"
    if thinking["display"] == "omitted":
        return "signed"
    return "shown"


def _read_tools(fields: Fields, model_call: ModelCall) -> dict[str, Tool]:
    """Add the tools of a request to `model_call`. Return all that can be called, by name.

    A tool with a type of its own counts as hosted. That includes bash and the text editor, which
    the harness runs: they come without a schema, which only the provider's models know.
    """
    tools: dict[str, Tool] = {}
    hosted = model_call.hosted_tools
    for tool in fields.objects("tools"):
        if tool["type"] not in (None, "custom"):
            hosted.append(tool.values)
            continue
        name = tool.tool_name("name")
        schema = tool.maybe("input_schema", dict)
        tools[name] = function_tool(name, tool.maybe("description", str), schema)
        if tool["defer_loading"] is not True:
            model_call.tools.append(tools[name])
    offered = set(tools)
    for tool_of_type in hosted:
        offered.add(str(tool_of_type.get("name")))
    servers = [server.values for server in fields.objects("mcp_servers")]
    choice = fields.inner("tool_choice")
    if choice["type"] == "tool" and str(choice["name"]) not in offered and not servers:
        raise DialectError(f"Tool {described(choice['name'])} not found in provided tools")
    hosted += servers  # they have tools that the request does not name
    return tools


class _Blocks:
    """The content blocks of a request, which show the definition of each of `tools` once."""

    def __init__(self, tools: dict[str, Tool]) -> None:
        self._tools = tools
        self._part = Part()
        """The part that is made: of the system prompt, then of each message."""
        self._has_reference = False

    def read_system(self, fields: Fields) -> Part:
        """Return the system prompt as at most one message."""
        texts = []
        for block in _blocks(fields, "system"):
            text = self._text(block)
            if text and not text.startswith(_BILLING):
                texts.append(text)
        if texts:
            text = "\n\n".join(texts)
            self._part.messages.append({"role": "system", "content": text})
        return self._part

    def read_message(self, message: Fields) -> Part:
        """Return the part of a message. Raises `DialectError`."""
        self._part = Part()
        self._has_reference = False
        role = message.choice("role", _ROLES)
        if message["content"] is None:
            raise message.refusal("content", _CONTENT)
        blocks = _blocks(message, "content")
        if role == "assistant":
            self._read_assistant(blocks)
        else:
            self._read_other(role, blocks)
        if self._has_reference:
            self._part.element = message.values
        return self._part

    def _read_assistant(self, blocks: list[Fields]) -> None:
        texts = []
        thoughts = []
        tool_calls = []
        call_id = None
        for block in blocks:
            match block.text("type"):
                case "thinking":
                    thoughts.append(block.text("thinking"))
                    call_id = call_id or signed_call(block["signature"])
                case "redacted_thinking":
                    call_id = call_id or signed_call(block["data"])
                case "tool_use":
                    name = block.name("name")
                    arguments = from_object(block.object("input"))
                    call = message_tool_call(block.identifier("id"), name, arguments)
                    tool_calls.append(call)
                case _:
                    texts.append(self._text(block))
        message = assistant_message("".join(texts), "".join(thoughts), tool_calls, call_id)
        self._part.messages.append(message)

    def _read_other(self, role: str, blocks: list[Fields]) -> None:
        texts = []
        for block in blocks:
            if role == "user" and block["type"] == "tool_result":
                self._part.messages.append(self._tool_result(block))
            else:
                texts.append(self._text(block))
        text = "".join(texts)
        if text or not self._part.messages:
            self._part.messages.append({"role": role, "content": text})

    def _tool_result(self, block: Fields) -> Message:
        texts = [self._text(inner) for inner in _blocks(block, "content")]
        text = "\n".join(texts)
        if block["is_error"] is True:
            text = f"Error: {text}"  # chat templates have no field for the flag
        return {
            "role": "tool",
            "content": text,
            "tool_call_id": block.identifier("tool_use_id"),
        }

    def _text(self, block: Fields) -> str:
        """Return the text of a block that is allowed in any message.

        A `tool_reference` becomes the definition of the tool as JSON, a later one to the same tool
        its name.
        """
        kind = block.text("type")
        if kind == "text":
            return block.text("text")
        source = block.maybe("source", dict)
        if kind in ("image", "document") and source is not None:
            if source.get("type") == "text":
                return block.inner("source").text("data")
            return self._part.hide(source.get("media_type"), kind)
        if kind == "tool_reference":
            self._has_reference = True
            name = block.label("tool_name")
            return _json(self._tools.pop(name, {"name": name}))
        if kind in _HOSTED_BLOCKS or kind.endswith("_tool_result"):
            fields = {**block.values}
            fields.pop("cache_control", None)
            return _json(fields)
        expected = f"text here, not {described(kind)}; this model takes text only"
        raise block.refusal("type", expected)


def _blocks(fields: Fields, key: str) -> list[Fields]:
    """Return the blocks of a content. A string is one text block."""
    text = fields.maybe(key, str)
    if text is not None:
        return [fields.at(key, {"type": "text", "text": text})]
    return list(fields.objects(key, _CONTENT))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class _StreamEncoder(dialect.StreamEncoder):
    """Encoder of blocks that do not overlap."""

    def __init__(self, context: ReplyContext) -> None:
        super().__init__(context)
        self._index = 0  # of the open block or, when none is open, of the next one
        self._open: Literal["thinking", "text"] | None = None

    def start(self) -> bytes:
        """Return the message without content.

        Its usage does not know yet how much of the prompt is cached.
        """
        message = _message(self._context, Usage(self._context.prompt_tokens, 0))
        message |= {"content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=message)

    def delta(self, reasoning: str, content: str) -> bytes:
        events = b""
        if reasoning and self._context.model_call.reasoning != "hidden":
            events += self._text("thinking", reasoning)
        if content:
            events += self._text("text", content)
        return events or self.keep_alive()

    def keep_alive(self) -> bytes:
        return _event("ping")

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        events = self._close()
        for call in reply.tool_calls:
            arguments = dump_json(as_object(call.arguments)).decode()
            events += self._start(_tool_use(call, {}))
            events += self._delta({"type": "input_json_delta", "partial_json": arguments})
            events += self._stop()
        events += _event("message_delta", delta=_stop(reply), usage=_usage(usage))
        return events + _event("message_stop")

    def error(self, error: DialectError) -> bytes:
        return dialect.server_event(_error(error))

    def _text(self, kind: Literal["thinking", "text"], text: str) -> bytes:
        events = b""
        if self._open != kind:
            events += self._close()
            self._open = kind
            events += self._start(_EMPTY_BLOCKS[kind])
        if kind == "text" or self._context.model_call.reasoning == "shown":
            events += self._delta({"type": f"{kind}_delta", kind: text})
        return events

    def _close(self) -> bytes:
        events = b""
        if self._open == "thinking":
            signature = sign(self._context.call_id)
            events += self._delta({"type": "signature_delta", "signature": signature})
        if self._open:
            events += self._stop()
        self._open = None
        return events

    def _start(self, block: Object) -> bytes:
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Object) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        event = _event("content_block_stop", index=self._index)
        self._index += 1
        return event


def _event(kind: str, **fields: Any) -> bytes:
    return dialect.server_event({"type": kind, **fields})


def _message(context: ReplyContext, usage: Usage) -> Object:
    return {
        "id": f"msg_{context.call_id}",
        "type": "message",
        "role": "assistant",
        "model": context.model_call.model,
        "usage": _usage(usage),
    }


def _tool_use(call: ToolCall, arguments: Object) -> Object:
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": arguments,
    }


def _stop(reply: Reply) -> Object:
    if reply.finish_reason == "stop" and reply.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}


def _usage(usage: Usage) -> Object:
    return {
        "input_tokens": usage.prompt - usage.cached,  # without those read from the cache
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _error(error: DialectError) -> Object:
    message = str(error)
    if isinstance(error, ContextOverflow):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    general = 400 if error.status < 500 else 500
    kind = _ERROR_TYPES.get(error.status, _ERROR_TYPES[general])
    return {"type": "error", "error": {"type": kind, "message": message}}
