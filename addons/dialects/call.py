"""Types that all dialects decode to and encode from."""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from rolltap.addons.dialects.json_values import Object

FinishReason = Literal["stop", "length", "tool_calls"]

Message = Object
"""A message in the form of `renderers`: `role` (system, user, assistant or tool), `content` (text),
and optionally `reasoning_content`, `tool_calls` (`{"id", "type": "function", "function": {"name",
"arguments"}}`, arguments parsed), and for a tool's result `tool_call_id` and the tool's `name`
(absent when the call is unknown). An assistant message may have `call_id`: the id of the model call
that issued it, as found in the opaque fields of the message."""

Tool = Object
"""A tool in the OpenAI form, `{"type": "function", "function": {"name", "description",
"parameters"}}`."""

EchoRule = Callable[[Object, Tool | None], Object]
"""(arguments of a tool call, the tool if the request has it) -> a normal form of the arguments.
Sampled arguments and their echo by a harness that rewrites them have the same normal form."""

FREEFORM_ARGUMENT = "input"
"""The name of the only argument, a string, of the function that represents a freeform tool."""

_MEDIA_TYPE = re.compile(r"(?:data:)?([a-z]{1,16}/[a-z0-9.+-]{1,80})(?=[;,]|\Z)", re.I)
"""A media type, alone or at the start of a `data:` URL."""
_SIGNATURE = "rolltap:"
_LONGEST_SIGNATURE = 256


def sign(call_id: str) -> str:
    """Return the opaque field (signature, encrypted content) of the reply of a call.

    It contains the call's id and is not authenticated: `Conversations` looks the id up among the
    calls of the sending session. It is base64, because Google's SDK decodes it.
    """
    return base64.b64encode((_SIGNATURE + call_id).encode()).decode()


def signed_call(signature: Any) -> str | None:
    """Return the id of the call whose `sign` wrote an opaque field, or None for another field."""
    if not isinstance(signature, str) or len(signature) > _LONGEST_SIGNATURE:
        return None
    try:
        text = base64.b64decode(signature, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    call_id = text.removeprefix(_SIGNATURE)
    return None if call_id == text else call_id


def tool_call_id(call_id: str, index: int) -> str:
    """Return the id of the tool call number `index` (from 0) of a call's reply.

    It can be derived again from the reply's opaque field (`signed_call`), for a program that does
    not send it back.
    """
    digest = hashlib.blake2b(f"{call_id} {index}".encode(), digest_size=12)
    return f"call_{digest.hexdigest()}"


class DialectError(Exception):
    """An error that is sent to the harness.

    `status` is the HTTP status, `code` the short name of the error. `retry_after`, in seconds,
    becomes the header `retry-after`, unless the reply is a stream that has begun.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


class ContextOverflow(DialectError):
    """A prompt that leaves no room for a reply in a context window of `limit` tokens.

    Each dialect uses the wording of its API: harnesses search for it to decide whether to compact
    their history.
    """

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {prompt_tokens} tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


def assistant_message(
    content: str,
    reasoning: str,
    tool_calls: list[Object],
    call_id: str | None = None,
) -> Message:
    """Return an assistant message. Empty fields other than `content` are left out."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    if call_id:
        message["call_id"] = call_id
    return message


def message_tool_call(
    tool_call_id: str,
    name: str,
    arguments: Any,
) -> Object:
    """Return a tool call of an assistant message."""
    function = {"name": name, "arguments": arguments}
    return {"id": tool_call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class WireTool:
    """A tool's name and form on the wire, where they differ from the model's function."""

    name: str
    namespace: str | None = None
    freeform: bool = False
    """True when the input is a text (`FREEFORM_ARGUMENT`) instead of JSON arguments."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Part:
    """The result of decoding an element of a conversation: see `dialect.decode_parts`."""

    messages: list[Message] = field(default_factory=list)
    hidden_parts: int = 0
    """Number of images, audio parts and files in the element, which have a text in their place."""
    element: Object | None = None
    """The element, if its messages depend on the rest of the request. It is decoded again."""
    tool: tuple[str, str] | None = None
    """Namespace and name of the tool that the part calls, if it is in a namespace."""
    turn: Message | None = None
    """The turn of the model that ends with this part: see `dialect.join_turns`."""

    def hide(self, declared: Any, kind: str) -> str:
        """Return the text in the place of an image, of audio or of a file, and count it.

        A policy makes its harness send an image by accident, for instance by reading a PNG, and
        programs end when that is an error. The text is the same in each request, so that the
        conversation is continued. `declared` is the media type or `data:` URL, `kind` a word for
        what has neither.
        """
        self.hidden_parts += 1
        if isinstance(declared, str):
            found = _MEDIA_TYPE.match(declared)
            if found:
                kind = found[1]
        return f"[{kind}, not shown: this model reads text]"


@dataclass(slots=True)
class ModelCall:
    """A decoded request."""

    model: str
    messages: list[Message]
    tools: list[Tool]
    stream: bool = False
    include_usage: bool = False
    """True when a stream is to end with the token usage.

    Chat Completions only: other dialects always send it.
    """
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    """Stop texts. A stop text ends the reply and is not part of it."""
    schema: Object | None = None
    """The JSON schema that the harness wants the reply to match; `{}` for any JSON object.

    See `grammar`.
    """
    reply_is_enum: bool = False
    """True when the reply is to be one of the texts in the `enum` of the schema, without the quotes
    of JSON."""
    may_call: bool = True
    """False when the request forbids tool calls, although the model sees the tools."""
    reasoning: Literal["shown", "signed", "hidden"] = "shown"
    """The harness's share of the reply's reasoning: all of it, only the opaque field issued with
    it, or nothing."""
    requested_sampling: Object = field(default_factory=dict)
    """Options of the request as it has them, in their `recordable` form.

    The row keeps them (`Call.sampling`, key `asked`), and the `request_digest` covers them. They
    are applied only where another field of this class has them too, as `schema` or `may_call`.
    """
    hosted_tools: list[Any] = field(default_factory=list)
    """Tools that the provider would run itself, in their `recordable` form.

    The model does not see them.
    """
    wire_tools: dict[str, WireTool] = field(default_factory=dict)
    """Name that the model sees -> tool on the wire. Holds only tools whose name or form differs."""
    client_metadata: dict[str, str] = field(default_factory=dict)
    """Place of a field in the body -> its text, for fields that hint at the role of the call."""
    repeated: Object = field(default_factory=dict)
    """Fields of the request that its reply repeats, as they came.

    They may hold secrets, and are never recorded.
    """
    hidden_parts: int = 0
    """Number of images, audio parts and files in the messages, which have a text in their place."""
    parts: list[Part] = field(default_factory=list, compare=False, repr=False)
    """One part for each element of the conversation: see `Dialect.decode`.

    Empty when a dialect does not give them.
    """
    echo_rule: EchoRule | None = None
    """The rule for a harness that rewrites the arguments of tool calls in its echoes; None for
    other harnesses."""
    again: bool = False
    """True in a rerun: what differs between two starts of one program does not matter
    (`canonical.steady`)."""

    @property
    def grammar(self) -> Object | None:
        """vLLM's form of the `schema` if the engine is held to it.

        Not beside tools: the model could call none.
        """
        if self.schema is None or self.tools:
            return None
        if self.reply_is_enum:
            return {"choice": self.schema["enum"]}
        if self.schema:
            return {"json": self.schema}
        return {"json_object": True}

    @property
    def tool_names(self) -> set[str]:
        """The names of the tools, as the model sees them and on the wire."""
        names = {tool["function"]["name"] for tool in self.tools}
        names.update(wire.name for wire in self.wire_tools.values())
        return names

    def options_asked(self) -> Object:
        """Return the options for the record: key `asked` of `Call.sampling`.

        `json_schema` is there for a schema to which the engine is not held.
        """
        asked = {**self.requested_sampling}
        if self.hosted_tools:
            asked["hosted_tools"] = self.hosted_tools
        if self.schema is not None and self.grammar is None:
            asked["json_schema"] = True
        return asked


@dataclass(slots=True)
class ToolCall:
    """A sampled tool call. `arguments` is a text, which is usually but not always valid JSON."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Reply:
    """The assistant's message, parsed from the sampled tokens."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    stop: str | None = None
    """The stop text that ended the reply, if any."""
    unread: str | None = None
    """The reason for which a part that looks like a tool call is text, if there is such a part."""

    @classmethod
    def of_message(
        cls,
        message: Message,
        finish_reason: str | None,
    ) -> "Reply":
        """Return the reply in a recorded message. `finish_reason` is the engine's."""
        reply = cls(message["content"], message.get("reasoning_content", ""))
        for call in message.get("tool_calls", ()):
            reply.tool_calls.append(ToolCall(call["id"], **call["function"]))
        if finish_reason == "length":
            reply.finish_reason = "length"
        elif reply.tool_calls:
            reply.finish_reason = "tool_calls"
        return reply

    def issue(self, call_id: str) -> None:
        """Give each tool call the id that belongs to the reply of a call."""
        for index, tool_call in enumerate(self.tool_calls):
            tool_call.id = tool_call_id(call_id, index)

    def to_message(self) -> Message:
        """Return the reply as a message, with the arguments of tool calls as text."""
        calls = []
        for call in self.tool_calls:
            calls.append(message_tool_call(call.id, call.name, call.arguments))
        return assistant_message(self.content, self.reasoning, calls)


@dataclass(slots=True)
class Usage:
    """Token counts of one call, and its end.

    `cached` is the part of `prompt` that came from the engine's prefix cache, `reasoning` that of
    `completion` which is reasoning (`SampledReply.reasoning_tokens`).
    """

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0
    ended: datetime | None = None


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """Data for encoding a reply, besides the `Reply` and its `Usage`."""

    call_id: str
    created: int
    """Seconds since the epoch."""
    target: str
    """The request's path and query."""
    model_call: ModelCall
    prompt_tokens: int = 0
    """The number of prompt tokens, for streams that say it before anything is sampled."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model in a list of models. `context_window` is in tokens."""

    name: str
    context_window: int
