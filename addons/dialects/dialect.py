"""The interface of a model API's package."""

from typing import Literal, Protocol

from rolltap.addons.dialects.types import DialectError, ModelCall, Reply, ReplyContext, ServedModel, Usage

Operation = Literal["generate", "count_tokens", "models"]


class StreamEncoder(Protocol):
    """Bytes of one streamed reply, in the order `start`, any of `delta` and `keep_alive`, then `finish` or `error`."""

    content_type: str

    def start(self) -> bytes:
        """The beginning, before anything is sampled."""

    def delta(self, reasoning: str, content: str) -> bytes:
        """New text, reasoning before content. Either may be empty, not both."""

    def keep_alive(self) -> bytes:
        """Bytes that change nothing and keep this API's clients from giving up."""

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """The tool calls and every event that ends the stream. The reply's text has gone out as deltas."""

    def error(self, error: DialectError) -> bytes:
        """The event for a failure after the stream began; nothing follows it."""


class Dialect(Protocol):
    """A module of this package. Each is pure: bytes and records in, bytes and records out."""

    NAME: str

    def operation(self, method: str, path: str) -> Operation | None:
        """The operation of a request, by its method and exact path without the query; None when it is not served."""

    def decode(self, body: bytes, target: str) -> ModelCall:
        """The request to `target` (path and query), for generation or for counting.

        Raises `DialectError` for what the API itself would refuse.
        """

    def encode_reply(self, context: ReplyContext, reply: Reply, usage: Usage) -> bytes:
        """The body of a reply to a request that did not ask for a stream."""

    def stream_encoder(self, context: ReplyContext) -> StreamEncoder:
        """The encoder of a streamed reply."""

    def encode_error(self, error: DialectError) -> bytes:
        """The body of an error reply."""

    def encode_token_count(self, tokens: int) -> bytes:
        """The body of a reply to a request to count tokens. Not called for APIs without one."""

    def encode_models(self, target: str, models: list[ServedModel], created: int) -> bytes:
        """The body of a reply to a request for the models, or for the one that `target` names."""
