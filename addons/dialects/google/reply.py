"""A reply of the Gemini API, its errors, and the models that it can come from."""

from typing import Any
from urllib.parse import unquote

from rolltap.addons.dialects.google.protobuf import nests_deeper
from rolltap.addons.dialects.tools import as_object, wrapped
from rolltap.addons.dialects.types import (
    ContextOverflow,
    DialectError,
    Reply,
    ReplyContext,
    ServedModel,
    Usage,
    dump_json,
    sign,
)

_ARGUMENT_LEVELS = 80
"""Protobuf's parsers stop at 100; arguments stand about 10 levels below the top of a body."""
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
    """The body of a reply to a request that did not ask for a stream."""
    parts = text_parts(reply.reasoning, reply.content)
    if reply.content and not reply.tool_calls:
        parts[-1]["thoughtSignature"] = sign(context.call_id)
    else:
        parts += last_parts(context, reply)
    return dump_json(response(context, parts, reply, usage))


def encode_error(error: DialectError) -> bytes:
    """The body of an error reply, and the last chunk of a stream that failed."""
    text = str(error)
    if isinstance(error, ContextOverflow):
        text = (
            f"The input token count ({error.prompt_tokens}) exceeds the maximum number of tokens allowed "
            f"({error.limit})."
        )
    status = _STATUS.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    return dump_json({"error": {"code": error.status, "message": text, "status": status}})


def encode_token_count(tokens: int) -> bytes:
    """The body of a reply to countTokens."""
    return dump_json({"totalTokens": tokens})


def encode_models(target: str, models: list[ServedModel], created: int) -> bytes:
    """The body of a reply to `GET /v1beta/models`, or to that of one model: every name is answered by the engine."""
    name = unquote(target.partition("?")[0].partition("/models/")[2])
    if name:
        return dump_json(_model(name, models[0].context))
    return dump_json({"models": [_model(model.name, model.context) for model in models]})


def _model(name: str, context: int) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "version": "001",
        "displayName": name,
        "inputTokenLimit": context,
        "outputTokenLimit": context,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def response(
    context: ReplyContext, parts: list[dict[str, Any]], reply: Reply | None = None, usage: Usage | None = None
) -> dict[str, Any]:
    """A `GenerateContentResponse`: a whole reply or the last chunk with `reply` and `usage`, else a chunk."""
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}}
    chunk: dict[str, Any] = {"candidates": [candidate]}
    if reply is not None:
        candidate["finishReason"] = "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"
    candidate["index"] = 0
    if usage is not None:
        chunk["usageMetadata"] = {
            "promptTokenCount": usage.prompt,
            "candidatesTokenCount": usage.completion,
            "totalTokenCount": usage.prompt + usage.completion,
            "cachedContentTokenCount": usage.cached,
        }
    return chunk | {"modelVersion": context.model_call.model, "responseId": context.call_id}


def text_parts(reasoning: str, content: str) -> list[dict[str, Any]]:
    """Reasoning and content, as many of them as there are."""
    thought = [{"text": reasoning, "thought": True}] if reasoning else []
    return thought + ([{"text": content}] if content else [])


def last_parts(context: ReplyContext, reply: Reply) -> list[dict[str, Any]]:
    """The parts after the reply's text: the calls, or an empty text; the first of them carries the signature."""
    parts: list[dict[str, Any]] = [
        {"functionCall": {"id": call.id, "name": call.name, "args": _args(call.arguments)}} for call in reply.tool_calls
    ]
    parts = parts or [{"text": ""}]
    parts[0]["thoughtSignature"] = sign(context.call_id)
    return parts


def _args(arguments: str) -> dict[str, Any]:
    args = as_object(arguments)
    return wrapped(arguments) if nests_deeper(args, _ARGUMENT_LEVELS) else args
