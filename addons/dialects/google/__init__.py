"""The Gemini API, as the Google Gen AI SDKs, Gemini CLI and Vertex AI's clients speak it: generateContent,
streamGenerateContent and countTokens.

Field names follow the Gemini API reference.
"""

import json
import re
from typing import Any
from urllib.parse import parse_qs, unquote

from rolltap.addons.dialects.dialect import Operation
from rolltap.addons.dialects.fields import parse_object, positive_integer, stop_texts
from rolltap.addons.dialects.google.contents import messages, system_message
from rolltap.addons.dialects.google.protobuf import json_schema, message, nests_deeper, repeated
from rolltap.addons.dialects.tools import as_object, function_tool, wrapped
from rolltap.addons.dialects.types import (
    ContextOverflow,
    DialectError,
    Head,
    ModelCall,
    Reply,
    ServedModel,
    Usage,
    dump_json,
    sign,
)

NAME = "google-generate-content"

_GENERATE = re.compile(
    r"/(?:v1|v1beta|v1beta1)/(?:(?:projects/[^/]+/locations/[^/]+/)?publishers/google/)?"
    r"models/(?P<model>.+):(?P<method>generateContent|streamGenerateContent|countTokens)"
)
_MODELS = re.compile(r"/v1beta/models(?:/(?P<model>[^:]+))?")  # /v1/models is OpenAI's as well, and goes to it

# protobuf's parsers stop at 100 levels; arguments stand about 10 levels below the top of a body
_BODY_LEVELS = 100
_ARGUMENT_LEVELS = 80

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
_READ = frozenset({"maxOutputTokens", "stopSequences", "candidateCount"})


def operation(method: str, path: str) -> Operation | None:
    """What a request asks for. Any host counts."""
    if method == "GET" and _MODELS.fullmatch(path):
        return "models"
    match = _GENERATE.fullmatch(path) if method == "POST" else None
    if match is None:
        return None
    return "count_tokens" if match["method"] == "countTokens" else "generate"


def decode(body: bytes, target: str) -> ModelCall:
    """The request in `body`; `target` names the model and says whether the reply is a stream.

    Raises `DialectError` for what the API itself would refuse.
    """
    match = _GENERATE.fullmatch(target.partition("?")[0])
    if match is None:
        raise DialectError(f"{target} is not a method of this API.", status=404)
    parsed = parse_object(body)
    if nests_deeper(parsed, _BODY_LEVELS):
        raise DialectError(f"The request body nests deeper than {_BODY_LEVELS} levels.")
    request = message(parsed, "request")
    if "generateContentRequest" in request:  # how countTokens wraps more than the contents
        request = message(request["generateContentRequest"], "generate_content_request")
    if request.get("cachedContent"):
        raise DialectError("'cached_content' is not supported: this server stores no content.")
    config = message(request.get("generationConfig", {}), "generation_config")
    if config.get("candidateCount", 1) != 1:
        raise DialectError("'generation_config.candidate_count' must be 1.")
    model_call = ModelCall(
        model=unquote(match["model"]),
        messages=system_message(request.get("systemInstruction")) + messages(request.get("contents")),
        tools=[],
        stream=match["method"] == "streamGenerateContent",
        stop=stop_texts(config.get("stopSequences"), "generation_config.stop_sequences"),
        schema=_schema(config),
        asked={field: value for field, value in config.items() if field not in _READ}
        | {field: request[field] for field in ("toolConfig", "safetySettings") if field in request},
    )
    if "maxOutputTokens" in config:
        model_call.max_tokens = positive_integer(config["maxOutputTokens"], "generation_config.max_output_tokens")
    _read_tools(request, model_call)
    return model_call


def _schema(config: dict[str, Any]) -> dict[str, Any] | None:
    if config.get("responseMimeType") != "application/json":
        return None
    schema = config.get("responseJsonSchema", json_schema(config.get("responseSchema")))
    return schema if isinstance(schema, dict) else {}


def _read_tools(request: dict[str, Any], model_call: ModelCall) -> None:
    config = message(request.get("toolConfig", {}), "tool_config")
    calling = message(config.get("functionCallingConfig", {}), "tool_config.function_calling_config")
    may_call = calling.get("mode") != "NONE"
    for i, value in enumerate(repeated(request.get("tools"), "tools")):
        tool = message(value, f"tools[{i}]")
        where = f"tools[{i}].function_declarations"
        for j, declaration in enumerate(repeated(tool.pop("functionDeclarations", None), where)):
            function = message(declaration, f"{where}[{j}]")
            name = function.get("name")
            if not isinstance(name, str) or not name:
                raise DialectError(f"* '{where}[{j}].name': Name cannot be empty.")
            parameters = function.get("parametersJsonSchema", json_schema(function.get("parameters")))
            if may_call:
                model_call.tools.append(function_tool(name, function.get("description"), parameters))
        model_call.hosted_tools += [{kind: settings} for kind, settings in tool.items()]


def encode_reply(head: Head, reply: Reply, usage: Usage) -> bytes:
    """The body of a reply to a request that did not ask for a stream."""
    parts = _text_parts(reply.reasoning, reply.content)
    if reply.content and not reply.tool_calls:
        parts[-1]["thoughtSignature"] = sign(head.call_id)
    else:
        parts += _last_parts(head, reply)
    return dump_json(_response(head, parts, reply, usage))


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
    match = _MODELS.fullmatch(target.partition("?")[0])
    if match is not None and match["model"] is not None:
        return dump_json(_model(unquote(match["model"]), models[0].context))
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


def stream_encoder(head: Head) -> "EventStreamEncoder | ArrayStreamEncoder":
    """The encoder of a streamed reply: server-sent events if the query asks for them, else a JSON array."""
    query = parse_qs(head.target.partition("?")[2])
    wanted = query.get("alt", query.get("$alt"))
    return EventStreamEncoder(head) if wanted == ["sse"] else ArrayStreamEncoder(head)


class EventStreamEncoder:
    """Server-sent events of one streamed reply."""

    content_type = "text/event-stream"

    def __init__(self, head: Head) -> None:
        self._head = head

    def start(self) -> bytes:
        """Nothing: clients take each event for a chunk of the reply."""
        return b""

    def delta(self, reasoning: str, content: str) -> bytes:
        """New text, reasoning before content."""
        return _event(_response(self._head, _text_parts(reasoning, content)))

    def keep_alive(self) -> bytes:
        """A blank line, because Gemini CLI's parser takes no comments."""
        return b"\n"

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """The chunk that ends the stream."""
        return _event(_response(self._head, _last_parts(self._head, reply), reply, usage))

    def error(self, error: DialectError) -> bytes:
        """The event for a failure after the stream began."""
        return _event(json.loads(encode_error(error)))


class ArrayStreamEncoder:
    """A JSON array of the chunks of one streamed reply."""

    content_type = "application/json"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._before = b""

    def start(self) -> bytes:
        """The array's begin."""
        return b"["

    def delta(self, reasoning: str, content: str) -> bytes:
        """New text, reasoning before content."""
        return self._element(dump_json(_response(self._head, _text_parts(reasoning, content))))

    def keep_alive(self) -> bytes:
        """White space."""
        return b"\n"

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """The chunk that ends the stream."""
        return self._element(dump_json(_response(self._head, _last_parts(self._head, reply), reply, usage))) + b"]"

    def error(self, error: DialectError) -> bytes:
        """The element for a failure after the stream began."""
        return self._element(encode_error(error)) + b"]"

    def _element(self, value: bytes) -> bytes:
        before, self._before = self._before, b",\r\n"
        return before + value


def _event(value: Any) -> bytes:
    # in ASCII, because Google's Python SDK splits lines at U+0085, U+2028 and U+2029 too
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\r\n\r\n"


def _response(
    head: Head, parts: list[dict[str, Any]], reply: Reply | None = None, usage: Usage | None = None
) -> dict[str, Any]:
    """A `GenerateContentResponse`: a whole reply or the last chunk with `reply` and `usage`, else a chunk."""
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}}
    response: dict[str, Any] = {"candidates": [candidate]}
    if reply is not None:
        candidate["finishReason"] = "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"
    candidate["index"] = 0
    if usage is not None:
        response["usageMetadata"] = {
            "promptTokenCount": usage.prompt,
            "candidatesTokenCount": usage.completion,
            "totalTokenCount": usage.prompt + usage.completion,
            "cachedContentTokenCount": usage.cached,
        }
    return response | {"modelVersion": head.model_call.model, "responseId": head.call_id}


def _text_parts(reasoning: str, content: str) -> list[dict[str, Any]]:
    thought = [{"text": reasoning, "thought": True}] if reasoning else []
    return thought + ([{"text": content}] if content else [])


def _last_parts(head: Head, reply: Reply) -> list[dict[str, Any]]:
    """What comes after the reply's text: the calls, or an empty text; the first of them carries the signature."""
    parts: list[dict[str, Any]] = [
        {"functionCall": {"id": call.id, "name": call.name, "args": _args(call.arguments)}} for call in reply.tool_calls
    ]
    parts = parts or [{"text": ""}]
    parts[0]["thoughtSignature"] = sign(head.call_id)
    return parts


def _args(arguments: str) -> dict[str, Any]:
    args = as_object(arguments)
    return wrapped(arguments) if nests_deeper(args, _ARGUMENT_LEVELS) else args
