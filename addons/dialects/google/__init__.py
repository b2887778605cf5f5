"""The Gemini API, which the Google Gen AI SDKs, Gemini CLI and clients of Vertex AI use.

It serves generateContent, streamGenerateContent, countTokens and the list of models.

Field names follow the Gemini API reference.
"""

import re
from collections.abc import Sequence
from typing import Any

from rolltap.addons.dialects.call import DialectError, ModelCall, Part, Reply, ReplyContext, ServedModel, Usage
from rolltap.addons.dialects.dialect import Dialect, Operation, StreamEncoder
from rolltap.addons.dialects.google import reply
from rolltap.addons.dialects.google.request import METHOD, decode

_MODELS = re.compile(r"/v1beta/models(/[^:]+)?")  # /v1/models is routed to OpenAI, which has it too


class GoogleGenerateContent(Dialect):
    """The API's functions as a `Dialect`."""

    NAME = "google-generate-content"
    CONVERSATION = "contents"

    def operation(self, method: str, path: str) -> Operation | None:
        """Return the operation of a request. The host is not checked."""
        if method == "GET" and _MODELS.fullmatch(path):
            return "models"
        match = METHOD.fullmatch(path) if method == "POST" else None
        if match is None:
            return None
        return "count_tokens" if match["method"] == "countTokens" else "generate"

    def decode(self, request: dict[str, Any], target: str, known: Sequence[Part] = ()) -> ModelCall:
        """Decode a request."""
        return decode(request, target)

    def encode_reply(self, context: ReplyContext, sampled: Reply, usage: Usage) -> bytes:
        """Return the body of a reply that is not streamed."""
        return reply.encode_reply(context, sampled, usage)

    def stream_encoder(self, context: ReplyContext) -> StreamEncoder:
        """Return a new encoder."""
        return reply.stream_encoder(context)

    def encode_error(self, error: DialectError) -> bytes:
        """Return the body of an error reply."""
        return reply.encode_error(error)

    def encode_token_count(self, num_tokens: int) -> bytes:
        """Return the body of a reply to a `count_tokens` request."""
        return reply.encode_token_count(num_tokens)

    def encode_models(self, target: str, models: list[ServedModel], created: int) -> bytes:
        """Return the body of a list of models."""
        return reply.encode_models(target, models, created)
