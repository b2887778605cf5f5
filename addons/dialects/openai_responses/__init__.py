"""The OpenAI Responses API over HTTP, which Codex, Pi, opencode and the OpenAI SDKs use.

Field names follow the OpenAI API reference. A request may name earlier replies of its session by id.
"""

from collections.abc import Sequence
from typing import Any

from rolltap.addons.dialects.call import ModelCall, Part, Reply, ReplyContext, ServedModel, Usage
from rolltap.addons.dialects.dialect import Operation, StreamEncoder
from rolltap.addons.dialects.openai import OpenAIDialect
from rolltap.addons.dialects.openai_responses import reply, stream
from rolltap.addons.dialects.openai_responses.request import decode

_PATHS = frozenset({"/v1/responses", "/responses"})
_COMPACT_PATHS = frozenset(f"{path}/compact" for path in _PATHS)
_COUNT_PATHS = frozenset(f"{path}/input_tokens" for path in _PATHS)
_CATALOGUE = "/backend-api/codex/models"


class OpenAIResponses(OpenAIDialect):
    """The API's functions as a `Dialect`."""

    NAME = "openai-responses"
    CONVERSATION = "input"

    def operation(self, method: str, path: str) -> Operation | None:
        """Return the operation of a request. `/v1/models` belongs to Chat Completions. Codex has its own."""
        if method == "POST" and path in _PATHS | _COMPACT_PATHS:
            return "generate"
        if method == "POST" and path in _COUNT_PATHS:
            return "count_tokens"
        if method == "GET" and path == _CATALOGUE:
            return "models"
        return None

    def decode(self, request: dict[str, Any], target: str, known: Sequence[Part] = ()) -> ModelCall:
        """Decode a request."""
        return decode(request, target)

    def encode_reply(self, context: ReplyContext, sampled: Reply, usage: Usage) -> bytes:
        """Return the body of a reply that is not streamed."""
        return reply.encode_reply(context, sampled, usage)

    def stream_encoder(self, context: ReplyContext) -> StreamEncoder:
        """Return a new encoder."""
        return stream.StreamEncoder(context)

    def encode_token_count(self, num_tokens: int) -> bytes:
        """Return the body of a reply to a `count_tokens` request."""
        return reply.encode_token_count(num_tokens)

    def encode_models(self, target: str, models: list[ServedModel], created: int) -> bytes:
        """Return the body of a list of models."""
        return reply.encode_models(target, models, created)
