"""OpenAI Chat Completions, which the OpenAI SDKs, LiteLLM and most harnesses use.

Field names follow the OpenAI API reference. `reasoning_content` is an extension that servers of reasoning models and
their clients share.
"""

from collections.abc import Sequence
from typing import Any

from rolltap.addons.dialects.call import DialectError, ModelCall, Part, Reply, ReplyContext, ServedModel, Usage
from rolltap.addons.dialects.dialect import Dialect, Operation, StreamEncoder
from rolltap.addons.dialects.openai import encode_error
from rolltap.addons.dialects.openai_chat import reply
from rolltap.addons.dialects.openai_chat.request import decode

_PATHS = frozenset({"/v1/chat/completions", "/chat/completions"})


class OpenAIChat(Dialect):
    """The API's functions as a `Dialect`."""

    NAME = "openai-chat"
    CONVERSATION = "messages"

    def operation(self, method: str, path: str) -> Operation | None:
        """Return the operation of a request. The host is not checked."""
        if method == "POST" and path in _PATHS:
            return "generate"
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
        return encode_error(error)

    def encode_models(self, target: str, models: list[ServedModel], created: int) -> bytes:
        """Return the body of a list of models."""
        return reply.encode_models(target, models, created)
