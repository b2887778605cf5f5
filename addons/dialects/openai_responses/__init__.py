"""The OpenAI Responses API over HTTP, as Codex, Pi, opencode and the OpenAI SDKs speak it.

Field names follow the OpenAI API reference. Nothing is stored: a request brings its whole conversation.
"""

from typing import Any

from rolltap.addons.dialects.dialect import Operation
from rolltap.addons.dialects.fields import parse_object, positive_integer
from rolltap.addons.dialects.openai_error import encode_error as encode_error
from rolltap.addons.dialects.openai_responses.codex_catalogue import catalogue
from rolltap.addons.dialects.openai_responses.input import decode_input
from rolltap.addons.dialects.openai_responses.output import ending, output_items, response
from rolltap.addons.dialects.openai_responses.stream import StreamEncoder
from rolltap.addons.dialects.openai_responses.tools import ToolNames, read_tools
from rolltap.addons.dialects.types import DialectError, Head, ModelCall, Reply, ServedModel, Usage, dump_json

NAME = "openai-responses"

_PATHS = frozenset({"/v1/responses", "/responses", "/backend-api/codex/responses", "/openai/v1/responses"})
_COUNTS = frozenset(f"{path}/input_tokens" for path in _PATHS)
_CATALOGUE = "/backend-api/codex/models"

_WISHES = [
    "temperature",
    "top_p",
    "reasoning",
    "text",
    "tool_choice",
    "parallel_tool_calls",
    "service_tier",
    "truncation",
]
_STORED = ["conversation", "prompt", "background"]


def operation(method: str, path: str) -> Operation | None:
    """What a request asks for. The list of models at `/v1/models` is Chat Completions'; Codex asks for its own."""
    if method == "POST" and path in _PATHS:
        return "generate"
    if method == "POST" and path in _COUNTS:
        return "count_tokens"
    if method == "GET" and path == _CATALOGUE:
        return "models"
    return None


def decode(body: bytes, target: str) -> ModelCall:
    """The request in `body`. Raises `DialectError` for what the API itself would refuse."""
    request = parse_object(body)
    _refuse_stored(request)
    most = request.get("max_output_tokens")
    model_call = ModelCall(
        model=str(request.get("model") or ""),
        messages=[],
        tools=[],
        stream=request.get("stream") is True,
        max_tokens=None if most is None else positive_integer(most, "max_output_tokens"),
        schema=_schema(request.get("text")),
        asked={key: request[key] for key in _WISHES if request.get(key) is not None},
        hints=_hints(request),
    )
    names = ToolNames()
    read_tools(request.get("tools"), "tools", model_call, names)
    decode_input(request, model_call, names)
    if request.get("tool_choice") == "none":
        model_call.tools = []
    return model_call


def _refuse_stored(request: dict[str, Any]) -> None:
    if request.get("previous_response_id") is not None:
        raise DialectError(
            "The response that 'previous_response_id' names was not found: responses are not stored. "
            "Send the whole conversation in 'input'.",
            code="previous_response_not_found",
        )
    for name in _STORED:
        if request.get(name):
            raise DialectError(f"'{name}' is not supported: nothing is stored here.")


def _schema(text: Any) -> dict[str, Any] | None:
    wanted = text.get("format") if isinstance(text, dict) else None
    if not isinstance(wanted, dict) or wanted.get("type") not in ("json_object", "json_schema"):
        return None
    schema = wanted.get("schema")
    return schema if isinstance(schema, dict) else {}


def _hints(request: dict[str, Any]) -> dict[str, str]:
    metadata = request.get("client_metadata")
    hints = {f"client_metadata.{k}": v for k, v in metadata.items()} if isinstance(metadata, dict) else {}
    hints["prompt_cache_key"] = request.get("prompt_cache_key")
    return {key: value for key, value in hints.items() if isinstance(value, str)}


def encode_reply(head: Head, reply: Reply, usage: Usage) -> bytes:
    """The body of a reply to a request that did not ask for a stream."""
    return dump_json(response(head, **ending(reply, usage), output=output_items(head, reply)))


def stream_encoder(head: Head) -> StreamEncoder:
    """The encoder of a streamed reply."""
    return StreamEncoder(head)


def encode_token_count(tokens: int) -> bytes:
    """The body of a reply to `POST /v1/responses/input_tokens`."""
    return dump_json({"object": "response.input_tokens", "input_tokens": tokens})


def encode_models(target: str, models: list[ServedModel], created: int) -> bytes:
    """The body of a reply to Codex's request for its catalogue of models."""
    return dump_json(catalogue(models))
