"""The OpenAI Responses API over HTTP, which Codex, Pi, opencode and the OpenAI SDKs use.

Field names follow the OpenAI API reference. A request may name earlier replies of its session by id.
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

_PATHS = frozenset({"/v1/responses", "/responses"})
_COMPACT_PATHS = frozenset(f"{path}/compact" for path in _PATHS)
_COUNT_PATHS = frozenset(f"{path}/input_tokens" for path in _PATHS)
_CATALOGUE = "/backend-api/codex/models"


def operation(method: str, path: str) -> Operation | None:
    """Return the operation of a request. `/v1/models` belongs to Chat Completions; Codex has its own catalogue path."""
    if method == "POST" and path in _PATHS | _COMPACT_PATHS:
        return "generate"
    if method == "POST" and path in _COUNT_PATHS:
        return "count_tokens"
    if method == "GET" and path == _CATALOGUE:
        return "models"
    return None
