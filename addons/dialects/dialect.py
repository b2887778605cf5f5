"""The interface that each model API's package implements."""

from typing import Literal, Protocol

from rolltap.addons.dialects.types import DialectError, ModelCall, Reply, ReplyContext, ServedModel, Usage

Operation = Literal["generate", "count_tokens", "models", "stored"]


class StreamEncoder(Protocol):
    """Stateful encoder of one streamed reply.

    Call `start` once, then `delta` and `keep_alive` any number of times, then `finish` or `error` once.
    """

    content_type: str

    def start(self) -> bytes:
        """Return the first bytes of the stream, before anything is sampled."""

    def delta(self, reasoning: str, content: str) -> bytes:
        """Return the events of new text, reasoning before content. At least one of the two is not empty.

        Bytes are returned even for text that is not sent, so that idle timers do not end a reply that grows.
        """

    def keep_alive(self) -> bytes:
        """Return bytes that reset the idle timers of this API's clients and add nothing to the reply."""

    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """Return the events of the tool calls and of the end. The reply's text was sent by `delta` before."""

    def error(self, error: DialectError) -> bytes:
        """Return the last event of a stream that failed after `start`."""


class Dialect(Protocol):
    """A model API's package. Its functions do no I/O and keep no state; only stream encoders have state."""

    NAME: str

    def operation(self, method: str, path: str) -> Operation | None:
        """Return the operation of a request, or None when it is not served.

        `path` is exact: it has neither a query nor the prefix of a provider (`routes.KNOWN_PREFIXES`).
        """

    def decode(self, body: bytes, target: str) -> ModelCall:
        """Decode a request to `target` (path and query) that asks for a reply or for a token count.

        Raises `DialectError` for an invalid or unsupported request, and its kind `NamesStored`.
        """

    def encode_reply(self, context: ReplyContext, reply: Reply, usage: Usage) -> bytes:
        """Return the body of a reply that is not streamed."""

    def stream_encoder(self, context: ReplyContext) -> StreamEncoder:
        """Return a new encoder for one streamed reply."""

    def encode_error(self, error: DialectError) -> bytes:
        """Return the body of an error reply."""

    def encode_token_count(self, num_tokens: int) -> bytes:
        """Return the body of a reply to a `count_tokens` request. APIs without that operation raise."""

    def encode_models(self, target: str, models: list[ServedModel], created: int) -> bytes:
        """Return the body of a reply that lists `models`, or that describes the one model which `target` names.

        `created` is in seconds since the epoch.
        """
