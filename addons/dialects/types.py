"""The common language of all dialects, between the wire and the engine."""

import base64
import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls"]

Message = dict[str, Any]
"""A message as `renderers` takes it: `role` (system, user, assistant or tool), `content` (text), and where they apply
`reasoning_content`, `tool_calls` (`{"id", "type": "function", "function": {"name", "arguments"}}`, arguments parsed)
and `tool_call_id`. An assistant message may carry `call_id`: the call that its opaque fields say issued it."""

Tool = dict[str, Any]
"""A tool in the OpenAI form, `{"type": "function", "function": {"name", "description", "parameters"}}`."""

EchoRule = Callable[[dict[str, Any], Tool | None], dict[str, Any]]
"""(arguments of a tool call, the tool if the request has it) -> a form of the arguments that is the same for those that
the model sampled and for what a harness makes of them when it sends them back."""

FREEFORM_ARGUMENT = "input"
"""The one argument, a string, of the function that stands for a freeform tool."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SIGNATURE = "rolltap:"


def parse_json(text: str) -> Any:
    """The value of a JSON text, its strings `well_formed`. Raises `ValueError` and `RecursionError`."""
    value = json.loads(text)
    if _SURROGATE_ESCAPE.search(text):  # pairs are fine, and rare enough to look twice
        value = json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
    return value


def parse_arguments(text: str) -> Any:
    """The arguments of an echoed tool call; what is not JSON stays the text that the model sampled."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return text


def javascript_number(value: float) -> float:
    """`value` as a program in JavaScript reads and writes it: it has one kind of number, and 1.0 is 1."""
    try:
        value = float(value)
        return int(value) if value.is_integer() else value
    except OverflowError:
        return value


def well_formed(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate.

    Harnesses in JavaScript send them when they cut a text inside a character; no tokenizer and no Arrow string takes
    them.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def dump_json(value: Any) -> bytes:
    """Compact JSON as every dialect writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def sign(call_id: str) -> str:
    """The opaque field that is issued with a call's reasoning (a signature, encrypted content). It names the call and
    proves nothing: it is only ever looked up among the calls of the session that sends it. Base64, as Google's SDK
    decodes it."""
    return base64.b64encode((_SIGNATURE + call_id).encode()).decode()


def signed_call(signature: str | None) -> str | None:
    """The call that an opaque field was issued with, or None when it is not ours."""
    try:
        text = base64.b64decode(signature or "", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text.removeprefix(_SIGNATURE) if text.startswith(_SIGNATURE) else None


class DialectError(Exception):
    """A request that this API would answer with an error; `status` is its HTTP status, `code` its short name."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ContextOverflow(DialectError):
    """A prompt of `prompt_tokens` that leaves no room in a context window of `limit` tokens. Each API says it in its
    own words, which harnesses look for before they compact their history."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


def assistant_message(content: str, reasoning: str, calls: list[dict[str, Any]], call_id: str | None = None) -> Message:
    """A message of the assistant, without those of its fields that are empty."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if call_id:
        message["call_id"] = call_id
    return message


def message_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call of an assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class WireTool:
    """How the harness knows a tool that the model sees as a function of another name or form."""

    name: str
    namespace: str | None = None
    freeform: bool = False
    """Its input is a text (`FREEFORM_ARGUMENT`), not JSON arguments."""


@dataclass(slots=True)
class ModelCall:
    """A decoded request."""

    model: str
    messages: list[Message]
    tools: list[Tool]
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the token usage (Chat Completions only; the others always say it)."""
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    """Texts that end the reply and are not part of it."""
    schema: dict[str, Any] | None = None
    """JSON schema that the reply must match; `{}` for any JSON object."""
    requested_sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling and decoding wishes of the harness, as it wrote them. They are recorded, not obeyed."""
    hosted_tools: list[Any] = field(default_factory=list)
    """Tools that the provider would run itself, as the harness wrote them. The model is not shown them."""
    wire_tools: dict[str, WireTool] = field(default_factory=dict)
    """By the name that the model sees; only tools whose form on the wire differs."""
    client_metadata: dict[str, str] = field(default_factory=dict)
    """Signs of the call's purpose in the body, for its role: field -> value."""
    echo_rule: EchoRule | None = None
    """The harness's rewriting of tool calls' arguments in its echoes; None if it sends them as they are."""


@dataclass(slots=True)
class ToolCall:
    """A tool call that the model made. `arguments` is JSON text, as the harness receives it."""

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
    """Which of the call's stop texts ended it."""

    def to_message(self) -> Message:
        """The message as a harness that echoes it verbatim would send it back."""
        calls = [message_call(call.id, call.name, call.arguments) for call in self.tool_calls]
        return assistant_message(self.content, self.reasoning, calls)


@dataclass(slots=True)
class Usage:
    """Token counts of one call. `cached` of the `prompt` tokens came from the engine's prefix cache."""

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """The fields of a reply besides the sampled message."""

    call_id: str
    created: int
    """Seconds since the epoch."""
    target: str
    """The request's path and query."""
    model_call: ModelCall


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as a models list shows it; `context` is its window in tokens."""

    name: str
    context: int
