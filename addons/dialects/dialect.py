"""The interface that each model API's package implements, and the last step of decoding, which is the same for all."""

import json
from typing import Literal, Protocol

from rolltap.addons.dialects.fields import LONGEST_NAME
from rolltap.addons.dialects.json_values import is_word, recordable, recordable_tools
from rolltap.addons.dialects.model_call import DialectError, Message, ModelCall, Reply, ReplyContext, ServedModel, Usage

Operation = Literal["generate", "count_tokens", "models"]


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


_LONGEST_SCHEMA = 256 * 1024
"""Characters of the JSON schema of a reply. It is written to the run, and the engine makes a grammar of it."""


def decoded(model_call: ModelCall, orphan: str = "") -> ModelCall:
    """Name the tool results of a decoded request, and bring its options to their `recordable` form.

    Raises `DialectError` when the JSON schema of the reply is too long, and the error `orphan` as `name_results`.
    """
    if model_call.schema and len(json.dumps(model_call.schema)) > _LONGEST_SCHEMA:
        raise DialectError(f"The JSON schema of the reply is longer than {_LONGEST_SCHEMA:,} characters.")
    model_call.messages = name_results(model_call.messages, orphan)
    model_call.requested_sampling = recordable(model_call.requested_sampling, model_call.tool_names)
    model_call.hosted_tools = recordable_tools(model_call.hosted_tools)
    return model_call


def name_results(messages: list[Message], orphan: str = "") -> list[Message]:
    """Return the messages with the `name` of its tool in each tool message that answers a tool call before it.

    Chat templates print this name. A continued prompt is made from the new messages alone, which lack the call. If
    several calls have the same id, the result answers the last one. Names longer than a tool can have are not repeated:
    many results may answer one call. A result of an unknown id is a `DialectError` in the words of `orphan`, in which
    `{}` stands for the id; without such words, and without an id, it keeps its own name.
    """
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and (answered := message["tool_call_id"]):
            if orphan and answered not in names:
                raise DialectError(orphan.format(answered if is_word(answered) else f"({len(answered)} characters)"))
            name = names.get(answered, "")
            message = {**message, "name": name} if 0 < len(name) <= LONGEST_NAME else message
        named.append(message)
    return named
