"""Rules for texts that programs change when they send a reply back, whatever program it is.

A rule returns the texts that a reply may have had before the change. They are compared with the recorded replies when
the text itself is not one of them: a rule can find a reply, but never makes two recorded replies equal.
"""

import re
from collections.abc import Iterator

from rolltap.addons.dialects.types import Message

_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_LITELLM_EMPTY = "[System: Empty message content sanitised to satisfy protocol]"


def issued_forms(echo: Message) -> Iterator[tuple[Message, str | None]]:
    """Yield the forms in which the reply may have been issued that a program echoes as the assistant message `echo`.

    With each form comes the reasoning that the reply must have had, None for any. The rules:

    - Reasoning in front: pydantic-ai and others write reasoning as `<think>` text before the content.
    - A text for no text: LiteLLM fills an empty message, as Anthropic's API refuses one.
    - A newline at the end: gptme strips it or adds one.
    """
    reasoning, content = _split_reasoning(echo)
    if reasoning is not None:
        yield {**echo, "content": content}, reasoning
    if content.strip() == _LITELLM_EMPTY and echo.get("tool_calls"):
        yield {**echo, "content": ""}, reasoning
    if content.strip():
        unended = content.removesuffix("\n")
        yield {**echo, "content": unended if unended != content else content + "\n"}, reasoning


def echoed_reasoning(echo: Message) -> str:
    """Return the reasoning that an echo shows: in its field, or as `<think>` text in front; empty without any."""
    field: str = echo.get("reasoning_content") or ""
    return field or _split_reasoning(echo)[0] or ""


def _split_reasoning(echo: Message) -> tuple[str | None, str]:
    """Return the `<think>` text in front of an echo's content, None without any, and the content after it."""
    found = _THINK.match(echo["content"])
    return (found[1].strip(), echo["content"][found.end() :]) if found else (None, echo["content"])
