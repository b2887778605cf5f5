"""What every dialect decodes to and encodes from: the common language between the wire and the engine."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "tool_calls"]

Message = dict[str, Any]
"""A message as `renderers` takes it: role, content (text), and where they apply `reasoning_content`,
`tool_calls` (`{"id", "type": "function", "function": {"name", "arguments"}}`, arguments parsed) and `tool_call_id`."""

Tool = dict[str, Any]
"""A tool in the OpenAI form, `{"type": "function", "function": {"name", "description", "parameters"}}`."""


_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> Any:
    """The value of a JSON text, its strings `well_formed`. Raises `ValueError` and `RecursionError`."""
    value = json.loads(text)
    if _SURROGATE_ESCAPE.search(text):  # pairs are fine, and rare enough to look twice
        value = json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
    return value


def well_formed(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate.

    Harnesses in JavaScript send them when they cut a text inside a character; no tokenizer and no Arrow string takes
    them.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class DialectError(Exception):
    """A request that this API would answer with an error; `status` is its HTTP status, `code` its short name."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(slots=True)
class ModelCall:
    """A decoded request."""

    model: str
    messages: list[Message]
    tools: list[Tool]
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the token usage."""
    max_tokens: int | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    """Sampling and decoding wishes of the harness, as it wrote them. They are recorded, not obeyed."""


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

    def to_message(self) -> Message:
        """The message as a harness that echoes it verbatim would send it back."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(slots=True)
class Usage:
    """Token counts of one call. `cached` of the `prompt` tokens came from the engine's prefix cache."""

    prompt: int
    completion: int
    cached: int = 0
