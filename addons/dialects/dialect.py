"""The base class of the model APIs, and the steps of decoding that all of them share.

A dialect decodes each element of a conversation to a `Part`, from the element alone. What depends
on other elements, such as the names of tool results, is done over the parts. So a request that
repeats the elements of the last one can give their parts in place of them, and its cost is that of
the new elements.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import ClassVar, Literal
from urllib.parse import unquote

from rolltap.addons.dialects.call import (
    DialectError,
    Message,
    ModelCall,
    Part,
    Reply,
    ReplyContext,
    ServedModel,
    Usage,
    assistant_message,
)
from rolltap.addons.dialects.fields import LONGEST_NAME, Fields
from rolltap.addons.dialects.json_values import (
    Object,
    dump_json,
    is_word,
    recordable,
    recordable_tools,
)

Operation = Literal["generate", "count_tokens", "models"]


class StreamEncoder(ABC):
    """Stateful encoder of one streamed reply.

    Call `start` once, then `delta` and `keep_alive` any number of times, then `finish` or `error`
    once.
    """

    content_type = "text/event-stream"

    def __init__(self, context: ReplyContext) -> None:
        self._context = context

    @abstractmethod
    def start(self) -> bytes:
        """Return the first bytes of the stream, before anything is sampled."""

    @abstractmethod
    def delta(self, reasoning: str, content: str) -> bytes:
        """Return the events of new text, reasoning before content. One of the two may be empty.

        Bytes are returned even for text that is not sent, so that idle timers do not end a reply
        that grows.
        """

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Return bytes that reset the idle timers of clients and add nothing to the reply."""

    @abstractmethod
    def finish(self, reply: Reply, usage: Usage) -> bytes:
        """Return the events of the tool calls and of the end.

        The reply's text was sent by `delta` before.
        """

    @abstractmethod
    def error(self, error: DialectError) -> bytes:
        """Return the last event of a stream that failed after `start`."""


def server_event(data: Object) -> bytes:
    """Return a server-sent event, whose name is the `type` in its data, if there is one."""
    event = b"data: " + dump_json(data) + b"\n\n"
    if "type" in data:
        event = f"event: {data['type']}\n".encode() + event
    return event


class Dialect(ABC):
    """A model API: bytes and JSON on the wire <-> `ModelCall` and `Reply`.

    It does no I/O and has no state. Only stream encoders have state.
    """

    NAME: ClassVar[str]
    CONVERSATION: ClassVar[str]
    """The request's field with the list of the conversation's elements."""
    GENERATE: ClassVar[tuple[str, ...]] = ()
    """Paths to which requests for a reply are posted."""
    COUNT_TOKENS: ClassVar[tuple[str, ...]] = ()
    MODELS: ClassVar[str]
    """Path of the list of models. One model is below it."""

    def operation(self, method: str, path: str) -> Operation | None:
        """Return the operation of a request, or None when it is not served.

        `path` has neither a query nor what the base URL of a provider has before the API's own
        paths.
        """
        if method == "POST" and path in self.GENERATE:
            return "generate"
        if method == "POST" and path in self.COUNT_TOKENS:
            return "count_tokens"
        if method == "GET" and (path == self.MODELS or path.startswith(f"{self.MODELS}/")):
            return "models"
        return None

    @abstractmethod
    def decode(
        self,
        request: Object,
        target: str,
        known: Sequence[Part] = (),
    ) -> ModelCall:
        """Decode the JSON object of a request to `target` (path and query).

        `known` are `ModelCall.parts` of an earlier request to this API. Its first `len(known)`
        elements had the same bytes as those of `request`, which may have None in their place. The
        messages of these parts are in the result as the same objects, except where elements are
        joined to one message. `request` is not changed.

        Raises `DialectError` for an invalid or unsupported request, also `NeedsStoredState`.
        """

    @abstractmethod
    def encode_reply(
        self,
        context: ReplyContext,
        reply: Reply,
        usage: Usage,
    ) -> bytes:
        """Return the body of a reply that is not streamed."""

    @abstractmethod
    def stream_encoder(self, context: ReplyContext) -> StreamEncoder:
        """Return a new encoder for one streamed reply."""

    @abstractmethod
    def encode_error(self, error: DialectError) -> bytes:
        """Return the body of an error reply."""

    def encode_token_count(self, num_tokens: int) -> bytes:
        """Return the body of a reply to a `count_tokens` request.

        APIs without that operation raise.
        """
        raise NotImplementedError

    def encode_models(
        self,
        target: str,
        models: list[ServedModel],
        created: int,
    ) -> bytes:
        """Return the body of a list of `models`, or of the one model which `target` names.

        A request to `.../models/NAME` may have any name. `created` is in seconds since the epoch.
        """
        name = unquote(target.partition("?")[0].partition("/models/")[2])
        if name:
            named = ServedModel(name, models[0].context_window)
            return dump_json(self.model_entry(named, created))
        entries = [self.model_entry(model, created) for model in models]
        return dump_json(self.model_list(entries))

    @abstractmethod
    def model_entry(self, model: ServedModel, created: int) -> Object:
        """Return a model as it is listed."""

    @abstractmethod
    def model_list(self, entries: list[Object]) -> Object:
        """Return a list of models."""


_LONGEST_SCHEMA = 256 * 1024
"""Characters of the JSON schema of a reply.

It is written to the run, and the engine makes a grammar of it.
"""


def decoded(model_call: ModelCall, parts: list[Part]) -> ModelCall:
    """Add the parts to a decoded request, and bring its options to their `recordable` form.

    Raises `DialectError` when the JSON schema of the reply is too long.
    """
    if model_call.schema and len(json.dumps(model_call.schema)) > _LONGEST_SCHEMA:
        why = f"is longer than {_LONGEST_SCHEMA:,} characters"
        raise DialectError(f"The JSON schema of the reply {why}.")
    model_call.parts = parts
    model_call.hidden_parts += sum(part.hidden_parts for part in parts)
    model_call.requested_sampling = recordable(model_call.requested_sampling, model_call.tool_names)
    model_call.hosted_tools = recordable_tools(model_call.hosted_tools)
    return model_call


def name_results(messages: Iterable[Message], orphan: str = "") -> list[Message]:
    """Return messages with the `name` of its tool in each one that answers a call before it.

    Chat templates print this name. A continued prompt is made from the new messages alone, which
    lack the call. If several calls have the same id, the result answers the last one. Names longer
    than a tool can have are not repeated: many results may answer one call. A result of an unknown
    id is a `DialectError` in the words of `orphan`, in which `{}` stands for the id; without such
    words, and without an id, it keeps its own name. A message that gets another name is a copy.
    """
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        answered = message.get("tool_call_id", "")
        name = names.get(answered, "")
        if answered and orphan and answered not in names:
            shown = answered if is_word(answered) else f"({len(answered)} characters)"
            raise DialectError(orphan.format(shown))
        if answered and name != message.get("name") and 0 < len(name) <= LONGEST_NAME:
            message = {**message, "name": name}
        named.append(message)
    return named


def name_parts(parts: Sequence[Part], orphan: str = "") -> list[Part]:
    """Return the parts with names as `name_results` gives them.

    No part is changed: in another request, other calls may be before it.
    """
    named = iter(name_results(all_messages(parts), orphan))
    whole: list[Part] = []
    for part in parts:
        messages = [*islice(named, len(part.messages))]
        if messages != part.messages:
            part = replace(part, messages=messages)
        whole.append(part)
    return whole


def decode_parts(
    request: Fields,
    key: str,
    known: Sequence[Part],
    decode: Callable[[Fields], Part],
) -> list[Part]:
    """Return a part for each element of the conversation in the field `key`: known ones, others.

    `decode` returns the part of an element, which it does not change. Raises what it raises.
    """
    parts: list[Part] = []
    for index, part in enumerate(known):
        if part.element is not None:
            part = decode(request.element(key, index, part.element))
        parts.append(part)
    for element in request.objects(key, start=len(known)):
        parts.append(decode(element))
    return parts


def all_messages(parts: Iterable[Part]) -> Iterator[Message]:
    """Yield the messages of all parts."""
    for part in parts:
        yield from part.messages


def join_turns(parts: Sequence[Part], separator: str) -> list[Message]:
    """Return the messages of all parts, consecutive ones of the assistant as one: a turn.

    Their texts are joined with `separator`. The message of a turn names the first call that one of
    them names.
    """
    messages: list[Message] = []
    for assistant, group in groupby(parts, key=_is_assistant):
        run = list(group)
        if not assistant:
            messages += all_messages(run)
            continue
        turn = run[-1].turn
        if turn is None or any(part.element is not None for part in run):
            turn = run[-1].turn = _joined([*all_messages(run)], separator)
        messages.append(turn)
    return messages


def _is_assistant(part: Part) -> bool:
    return bool(part.messages) and part.messages[0]["role"] == "assistant"


def _joined(messages: list[Message], separator: str) -> Message:
    if len(messages) == 1:
        return messages[0]
    contents: list[str] = []
    thoughts: list[str] = []
    tool_calls: list[Object] = []
    call_id = None
    for message in messages:
        contents.append(message["content"])
        thoughts.append(message.get("reasoning_content", ""))
        tool_calls += message.get("tool_calls", ())
        call_id = call_id or message.get("call_id")
    content = separator.join(filter(None, contents))
    reasoning = separator.join(filter(None, thoughts))
    return assistant_message(content, reasoning, tool_calls, call_id)
