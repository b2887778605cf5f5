"""The canonical form of a message, by which a reply and its echo are compared, and digests of it.

Changes that harnesses make in an echo do not matter in this form. Tool call ids are part of it:
calls with different ids compare as different. The form ignores:

- the order of keys, and how a number is written (1.0, 1e0, more digits than JavaScript keeps);
- how many times arguments were encoded as JSON text;
- empty fields, and blank text of the assistant, which APIs refuse and harnesses drop;
- what the request's `echo_rule` says that its harness does to arguments;
- in a rerun, dates, times and ids that a program writes new at each start (`steady`).

Only digests of messages are kept. The digest of a prefix of a conversation covers the tools, the
echo rule and the canonical form of each message.

What any program may do to the text of a reply is undone by rules (`issued_forms`). A rule returns
the texts that a reply may have had before the change. They are compared with the recorded replies
when the text itself is not one of them: a rule can find a reply, but never makes two recorded
replies equal.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import orjson

from rolltap.addons.dialects.call import Message, ModelCall
from rolltap.addons.dialects.json_values import javascript_number

_SORTED = json.JSONEncoder(sort_keys=True, ensure_ascii=False)


def canonical(message: Message, model_call: ModelCall) -> str:
    """Return the canonical form of a message of a request, or of the reply to it.

    Reasoning and the issuing call (`call_id`) are left out.
    """
    content = message.get("content", "")
    kept = {
        **message,
        "content": content,
        "reasoning_content": "",
        "call_id": "",
    }
    if message["role"] != "assistant":
        kept["content"] = steady(content) if model_call.again else content
    elif not content.strip():
        kept["content"] = ""
    if "tool_calls" in message:
        calls = message["tool_calls"]
        kept["tool_calls"] = [_canonical_tool_call(call, model_call) for call in calls]
    return _SORTED.encode({key: value for key, value in kept.items() if value})


def _canonical_tool_call(tool_call: dict[str, Any], model_call: ModelCall) -> dict[str, Any]:
    name = tool_call["function"]["name"]
    parsed = tool_call["function"]["arguments"]
    try:
        while isinstance(parsed, str):  # the arguments of an echo may be parsed already
            parsed = json.loads(parsed)
        if model_call.echo_rule is not None and isinstance(parsed, dict):
            named = (tool for tool in model_call.tools if tool["function"]["name"] == name)
            parsed = model_call.echo_rule(parsed, next(named, None))
        parsed = _canonical_numbers(parsed)
    except (ValueError, RecursionError):
        pass  # text that is not JSON, and values nested too deeply, are compared as they are
    return {"id": tool_call["id"], "name": name, "arguments": parsed}


def _canonical_numbers(value: Any) -> Any:
    """Return `value` with each number replaced by its `javascript_number`."""
    if isinstance(value, dict):
        return {key: _canonical_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical_numbers(inner) for inner in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return javascript_number(value)
    return value


_UNSTEADY = re.compile(
    # 2026-11-26T10:58:03.1Z
    r"\d{4}[-/]\d\d[-/]\d\d(?:[T ,]+\d\d:\d\d(?::\d\d)?[.\d]*)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|\b\d{1,2}/\d{1,2}/\d{4}\b|\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?(?: [AP]M\b)?| [AP]M\b)"
    # Thursday, November 26, 2026
    r"|\b(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,? +)?"
    r"(?:\d{1,2} +)?"
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* +"
    r"(?:\d{1,2},? +)?(?:\d{4}|\d\d:\d\d)\b"
    r"|\b\d+(?:\.\d+)? ?(?:ms|s|secs?|seconds?)\b|(?i:duration_?ms)\W+[\d.]+"
    r"|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|\b(?=[a-f]*\d)[0-9a-f]{7,64}\b"
    r"|(?<=ID: )\w+"  # of a process, of a piece of output
    # the folder of a rollout's session, in a path or a name made of it
    r"|rolltap[-_]work[-_][\w-]{8}[-_/]\w{8}",
    re.ASCII,
)


def steady(text: str) -> str:
    """Return a text without what differs between two starts of one program.

    That is: dates, times, durations, ids of processes and commits, UUIDs, and folders that
    rolltap makes.
    """
    return _UNSTEADY.sub("~", text)


_BEFORE, _AFTER = 30, 50
"""Characters shown before and after the start of a difference."""


def first_digest(model_call: ModelCall) -> bytes:
    """Return the digest of a conversation without messages."""
    rule = model_call.echo_rule
    return _tools_digest(model_call, rule and rule.__name__)


def canonical_tools(model_call: ModelCall) -> str:
    """Return the canonical form of the tools."""
    text = _SORTED.encode(model_call.tools)
    return steady(text) if model_call.again else text


def extend_digest(digest: bytes, message: Message, model_call: ModelCall) -> bytes:
    """Return the digest of a prefix and the message after it.

    After no prefix (`b""`) it is equal for a reply and its echo in any conversation.
    """
    text = canonical(message, model_call).encode("utf-8", "replace")
    return hashlib.blake2b(digest + text, digest_size=16).digest()


def opening_digest(model_call: ModelCall) -> bytes:
    """Return the digest of the tools and the leading system messages.

    An agent's conversations have them in common. Rows do not hold the echo rule, so the digest
    does not depend on it.
    """
    digest = _tools_digest(model_call, None)
    for message in leading_system(model_call):
        digest = extend_digest(digest, message, model_call)
    return digest


def leading_system(model_call: ModelCall) -> list[Message]:
    """Return the system messages before all other messages."""
    return [*takewhile(lambda message: message["role"] == "system", model_call.messages)]


def describe_difference(ours: str, theirs: str) -> str:
    """Return an excerpt of both texts around the first character in which they differ.

    `theirs` may be cut.
    """
    at = 0
    for own, other in zip(ours, theirs, strict=False):
        if own != other:
            break
        at += 1
    if at == len(theirs):
        return f"it differs after {at} characters"
    shown = slice(max(0, at - _BEFORE), at + _AFTER)
    return f"{ours[shown]!r} where it had {theirs[shown]!r}"


def _tools_digest(model_call: ModelCall, rule: str | None) -> bytes:
    tools = canonical_tools(model_call) if model_call.again else model_call.tools
    try:
        # ten times faster: there are 40 KB of tools
        text = orjson.dumps([tools, rule], option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers of more than 64 bits
        text = json.dumps([tools, rule], sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_LITELLM_EMPTY = "[System: Empty message content sanitised to satisfy protocol]"


def issued_forms(echo: Message) -> Iterator[tuple[Message, str | None]]:
    """Yield the forms that the reply may have had which a program echoes as `echo`.

    With each form comes the reasoning that the reply must have had, None for any. The rules:

    - Reasoning in front: pydantic-ai and others write it as `<think>` text before the content.
    - A text for no text: LiteLLM fills an empty message, as Anthropic's API refuses one.
    - A newline at the end: gptme strips it or adds one.

    One rule more needs the replies (`History`). CrewAI and others drop the text beside tool calls:
    an echo of the same calls without text is that reply.
    """
    reasoning, content = _split_reasoning(echo)
    if reasoning is not None:
        yield {**echo, "content": content}, reasoning
    if content.strip() == _LITELLM_EMPTY and echo.get("tool_calls"):
        yield {**echo, "content": ""}, reasoning
    if content.endswith("\n") and content.strip():
        yield {**echo, "content": content.removesuffix("\n")}, reasoning
    elif content.strip():
        yield {**echo, "content": content + "\n"}, reasoning


def echoed_reasoning(echo: Message) -> str:
    """Return the reasoning that an echo shows: in its field, or as `<think>` text in front.

    It is empty without any.
    """
    field: str = echo.get("reasoning_content") or ""
    return field or _split_reasoning(echo)[0] or ""


def textless(echo: Message) -> bool:
    """Return True for an echo of tool calls without text.

    Reasoning and LiteLLM's text do not count.
    """
    content = _split_reasoning(echo)[1].strip()
    return bool(echo.get("tool_calls")) and content in ("", _LITELLM_EMPTY)


def _split_reasoning(echo: Message) -> tuple[str | None, str]:
    """Return the `<think>` text in front of an echo's content, and the content after it.

    The former is None when there is no such text.
    """
    content = echo["content"]
    found = _THINK.match(content)
    if found is None:
        return None, content
    return found[1].strip(), content[found.end() :]
