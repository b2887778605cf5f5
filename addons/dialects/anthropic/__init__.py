"""The Anthropic Messages API, which the Anthropic SDKs and Claude Code use.

Field names follow Anthropic's API reference.
"""

from collections.abc import Sequence
from typing import Any

from rolltap.addons.dialects.anthropic import reply
from rolltap.addons.dialects.anthropic.request import decode
from rolltap.addons.dialects.call import DialectError, ModelCall, Part, Reply, ReplyContext, ServedModel, Usage
from rolltap.addons.dialects.dialect import Dialect, Operation, StreamEncoder


class AnthropicMessages(Dialect):
    """The API's functions as a `Dialect`."""

    NAME = "anthropic-messages"
    CONVERSATION = "messages"

    def operation(self, method: str, path: str) -> Operation | None:
        """Return the operation of a request. OpenAI has the same path for its models: see `routes.find_route`."""
        if method == "POST" and path == "/v1/messages":
            return "generate"
        if method == "POST" and path == "/v1/messages/count_tokens":
            return "count_tokens"
        if method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/")):
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
        return reply.StreamEncoder(context)

    def encode_error(self, error: DialectError) -> bytes:
        """Return the body of an error reply."""
        return reply.encode_error(error)

    def encode_token_count(self, num_tokens: int) -> bytes:
        """Return the body of a reply to a `count_tokens` request."""
        return reply.encode_token_count(num_tokens)

    def encode_models(self, target: str, models: list[ServedModel], created: int) -> bytes:
        """Return the body of a list of models."""
        return reply.encode_models(target, models, created)
