"""The OpenAI Responses API over HTTP, as Codex, Pi, opencode and the OpenAI SDKs speak it.

Field names follow the OpenAI API reference. Nothing is stored: a request brings its whole conversation.
"""

from rolltap.addons.dialects.dialect import Operation
from rolltap.addons.dialects.openai import encode_error
from rolltap.addons.dialects.openai_responses.reply import encode_models, encode_reply, encode_token_count
from rolltap.addons.dialects.openai_responses.request import decode
from rolltap.addons.dialects.openai_responses.stream import StreamEncoder

__all__ = [
    "NAME",
    "decode",
    "encode_error",
    "encode_models",
    "encode_reply",
    "encode_token_count",
    "operation",
    "stream_encoder",
]

NAME = "openai-responses"

_PATHS = frozenset({"/v1/responses", "/responses", "/backend-api/codex/responses", "/openai/v1/responses"})
_COUNTS = frozenset(f"{path}/input_tokens" for path in _PATHS)
_CATALOGUE = "/backend-api/codex/models"

stream_encoder = StreamEncoder


def operation(method: str, path: str) -> Operation | None:
    """What a request asks for. The list of models at `/v1/models` is Chat Completions'; Codex asks for its own."""
    if method == "POST" and path in _PATHS:
        return "generate"
    if method == "POST" and path in _COUNTS:
        return "count_tokens"
    if method == "GET" and path == _CATALOGUE:
        return "models"
    return None
