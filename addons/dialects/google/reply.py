"""Replies and errors of the Gemini API, and its list of models.

A stream is of server-sent events, or a JSON array.
"""

import json
from typing import Any
from urllib.parse import parse_qs, unquote

from rolltap.addons.dialects.call import (
    ContextOverflow,
    DialectError,
    Reply,
    ReplyContext,
    ServedModel,
    Usage,
    dump_json,
    sign,
)
from rolltap.addons.dialects.dialect import StreamEncoder
from rolltap.addons.dialects.json_values import nests_deeper
from rolltap.addons.dialects.tools import as_object, wrapped

_ARGUMENT_LEVELS = 80
"""Protobuf's parsers accept 100 levels. Arguments are about 10 levels below the top of a body."""
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def encode_reply(context: ReplyContext, reply: Reply, usage: Usage) -> bytes:
    """Return the body of a reply that is not streamed."""
    parts = text_parts(context, reply.reasoning, reply.content)
    if reply.content and not reply.tool_calls:
        parts[-1]["thoughtSignature"] = sign(context.call_id)
    else:
        parts += last_parts(context, reply)
    return dump_json(response(context, parts, reply, usage))


def encode_error(error: DialectError) -> bytes:
    """Return the body of an error reply. It is also the last chunk of a stream that failed."""
    text = str(error)
    if isinstance(error, ContextOverflow):
        counted = f"The input token count ({error.prompt_tokens})"
        text = f"{counted} exceeds the maximum number of tokens allowed ({error.limit})."
    status = _STATUS.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    return dump_json({"error": {"code": error.status, "message": text, "status": status}})


def encode_token_count(num_tokens: int) -> bytes:
    """Return the body of a reply to countTokens."""
    return dump_json({"totalTokens": num_tokens})


def encode_models(target: str, models: list[ServedModel], created: int) -> bytes:
    """Return the body of a reply to `GET /v1beta/models`, or to `GET /v1beta/models/NAME` with any name."""
    name = unquote(target.partition("?")[0].partition("/models/")[2])
    if name:
        return dump_json(_model(name, models[0].context_window))
    return dump_json({"models": [_model(model.name, model.context_window) for model in models]})


def _model(name: str, context_window: int) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "version": "001",
        "displayName": name,
        "inputTokenLimit": context_window,
        "outputTokenLimit": context_window,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def response(
    context: ReplyContext, parts: list[dict[str, Any]], reply: Reply | None = None, usage: Usage | None = None
) -> dict[str, Any]:
    """Return a `GenerateContentResponse`. A whole reply and the last chunk of a stream have `reply` and `usage`."""
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}}
    chunk: dict[str, Any] = {"candidates": [candidate]}
    if reply is not None:
        candidate["finishReason"] = "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"
    candidate["index"] = 0
    if usage is not None:
        chunk["usageMetadata"] = {
            "promptTokenCount": usage.prompt,
            "candidatesTokenCount": usage.completion - usage.reasoning,
            "thoughtsTokenCount": usage.reasoning,
            "totalTokenCount": usage.prompt + usage.completion,
            "cachedContentTokenCount": usage.cached,
        }
    return chunk | {"modelVersion": context.model_call.model, "responseId": context.call_id}


def text_parts(context: ReplyContext, reasoning: str, content: str) -> list[dict[str, Any]]:
    """Return one part each for reasoning, if the request asks for it, and content, unless empty."""
    shown = reasoning and context.model_call.reasoning == "shown"
    thought = [{"text": reasoning, "thought": True}] if shown else []
    return thought + ([{"text": content}] if content else [])


def last_parts(context: ReplyContext, reply: Reply) -> list[dict[str, Any]]:
    """Return the parts after the reply's text: the function calls, or an empty text. The first has the signature."""
    parts: list[dict[str, Any]] = [
        {"functionCall": {"id": call.id, "name": call.name, "args": _args(call.arguments)}} for call in reply.tool_calls
    ]
    parts = parts or [{"text": ""}]
    parts[0]["thoughtSignature"] = sign(context.call_id)
    return parts


def _args(arguments: str) -> dict[str, Any]:
    args = as_object(arguments)
    return wrapped(arguments) if nests_deeper(args, _ARGUMENT_LEVELS) else args


def stream_encoder(context: ReplyContext) -> "EventStreamEncoder":
    """Return an encoder of server-sent events if the query has `alt=sse`, else of a JSON array."""
    query = parse_qs(context.target.partition("?")[2])
    alt = query.get("alt", query.get("$alt"))
    return EventStreamEncoder(context) if alt == ["sse"] else ArrayStreamEncoder(context)


class EventStreamEncoder(StreamEncoder):
    """Encoder of one streamed reply as server-sent events, each of which contains one chunk."""

    def start(self) -> bytes:
        """Return no bytes, because clients parse each event as a chunk of the reply."""
        return b""

    def delta(self, reasoning: str, content: str) -> bytes:
        """Return a chunk of new text, reasoning before content. Reasoning that is not sent becomes a keep-alive."""
        parts = text_parts(self._context, reasoning, content)
        return self._chunk(response(self._context, parts)) if parts else self.keep_alive()

    def keep_alive(self) -> bytes:
        """Return a blank line, because Gemini CLI's parser does not accept SSE comments."""
        return b"\n"

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """Return the last chunk, with the function calls and the usage."""
        return self._chunk(response(self._context, last_parts(self._context, reply), reply, usage))

    def error(self, error: DialectError) -> bytes:
        """Return the chunk of a failure after `start`."""
        return self._chunk(json.loads(encode_error(error)))

    def _chunk(self, value: dict[str, Any]) -> bytes:
        # ASCII, because Google's Python SDK also splits lines at U+0085, U+2028 and U+2029
        return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\r\n\r\n"


class ArrayStreamEncoder(EventStreamEncoder):
    """Encoder of one streamed reply as a JSON array of chunks."""

    content_type = "application/json"
    _separator = b""

    def start(self) -> bytes:
        """Return the beginning of the array."""
        return b"["

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """Return the last chunk and the end of the array."""
        return super().finish(reply, usage) + b"]"

    def error(self, error: DialectError) -> bytes:
        """Return the chunk of a failure and the end of the array."""
        return super().error(error) + b"]"

    def _chunk(self, value: dict[str, Any]) -> bytes:
        separator, self._separator = self._separator, b",\r\n"
        return separator + dump_json(value)
