"""The OpenAI Responses API over HTTP, as Codex, Pi, opencode and the OpenAI SDKs speak it.

Field names follow the OpenAI API reference. Nothing is stored: a request brings its whole conversation.
"""

from rolltap.addons.dialects.dialect import Operation
from rolltap.addons.dialects.openai import encode_error as encode_error
from rolltap.addons.dialects.openai_responses.reply import encode_models as encode_models
from rolltap.addons.dialects.openai_responses.reply import encode_reply as encode_reply
from rolltap.addons.dialects.openai_responses.reply import encode_token_count as encode_token_count
from rolltap.addons.dialects.openai_responses.request import decode as decode
from rolltap.addons.dialects.openai_responses.stream import StreamEncoder

NAME = "openai-responses"
stream_encoder = StreamEncoder

_PATHS = frozenset({"/v1/responses", "/responses", "/backend-api/codex/responses", "/openai/v1/responses"})
_COUNTS = frozenset(f"{path}/input_tokens" for path in _PATHS)
_CATALOGUE = "/backend-api/codex/models"


def operation(method: str, path: str) -> Operation | None:
    """The operation of a request. The list of models at `/v1/models` is Chat Completions'; Codex asks for its own."""
    if method == "POST" and path in _PATHS:
        return "generate"
    if method == "POST" and path in _COUNTS:
        return "count_tokens"
    if method == "GET" and path == _CATALOGUE:
        return "models"
    return None
