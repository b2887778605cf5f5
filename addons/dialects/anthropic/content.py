"""The conversation of a request to the Anthropic Messages API: system prompt, messages and their content blocks.

One conversation must decode to the same messages in every request, so what Claude Code changes between the requests
of a session is taken out here:

- a system block of billing information, which differs in every request, is dropped;
- `cache_control`, which moves to the last block, is ignored;
- a content of one text block, written as a bare string when it has no `cache_control`, is the same as the string;
- a tool with `defer_loading`, which joins `tools` once it was searched for, is not shown among the tools. It is
  described where a `tool_reference` block loads it, and may be called from there on.
"""

import json
from typing import Any

from rolltap.addons.dialects.tools import echoed_call, from_object
from rolltap.addons.dialects.types import DialectError, Message, Tool, signed_call

_BILLING = "x-anthropic-billing-header"

_HOSTED_BLOCKS = ("server_tool_use", "mcp_tool_use", "search_result")

_Block = tuple[str, dict[str, Any]]
"""A content block and its place in the request, as this API's errors name it: `messages.0.content.1`."""


def system_message(system: Any, known: dict[str, Tool]) -> list[Message]:
    """The system prompt, a string or blocks, as no message or one. `known` holds the request's tools by name."""
    blocks = _blocks(system or [], "system")
    texts = [_text(block, known) for block in blocks]
    texts = [text for text in texts if text and not text.startswith(_BILLING)]
    # a blank line, as some harnesses write blocks that neither end nor begin with one
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def conversation(messages: Any, known: dict[str, Tool]) -> list[Message]:
    """The messages of a request; there is at least one. Raises `DialectError`."""
    if not isinstance(messages, list) or not messages:
        raise DialectError("messages: Input should be a list of at least one message.")
    turns: list[tuple[str, list[_Block]]] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DialectError(f"messages.{i}: Input should be an object.")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise DialectError(f"messages.{i}.role: Input should be 'user', 'assistant' or 'system', not {role!r}.")
        blocks = _blocks(message.get("content"), f"messages.{i}.content")
        if role == "assistant" and turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)  # this API makes one turn of them, and a harness may split a reply
        else:
            turns.append((role, blocks))
    decoded: list[Message] = []
    for role, blocks in turns:
        if role == "assistant":
            decoded.append(_assistant(blocks, known))
        elif role == "user":
            decoded += _user(blocks, known)
        else:
            decoded.append({"role": "system", "content": "".join(_text(block, known) for block in blocks)})
    return decoded


def _blocks(content: Any, where: str) -> list[_Block]:
    """The blocks of a content; a string is one text block."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise DialectError(f"{where}: Input should be a string or a list of content blocks.")
    blocks = [(f"{where}.{i}", block) for i, block in enumerate(content)]
    for place, block in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise DialectError(f"{place}: Input should be a content block with a type.")
    return blocks


def _assistant(blocks: list[_Block], known: dict[str, Tool]) -> Message:
    texts, thoughts, calls = [], [], []
    call_id = None
    for where, block in blocks:
        match block["type"]:
            case "thinking":
                thoughts.append(text_field(block, "thinking", where))
                call_id = call_id or signed_call(block.get("signature"))
            case "redacted_thinking":
                call_id = call_id or signed_call(block.get("data"))
            case "tool_use":
                calls.append(_tool_use(block, where))
            case _:
                texts.append(_text((where, block), known))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if call_id:
        message["call_id"] = call_id
    return message


def _tool_use(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, arguments = text_field(block, "name", where), block.get("input")
    if not name:
        raise DialectError(f"{where}.name: Input should not be empty.")
    if not isinstance(arguments, dict):
        raise DialectError(f"{where}.input: Input should be an object.")
    return echoed_call(text_field(block, "id", where), name, from_object(arguments))


def _user(blocks: list[_Block], known: dict[str, Tool]) -> list[Message]:
    """The tool results of a user message, each a message of its own, then what the user says."""
    results: list[Message] = []
    texts = []
    for where, block in blocks:
        if block["type"] == "tool_result":
            results.append(_tool_result(block, where, known))
        else:
            texts.append(_text((where, block), known))
    text = "".join(texts)  # Claude Code ends a block with a newline when another one follows
    return [*results, {"role": "user", "content": text}] if text or not results else results


def _tool_result(block: dict[str, Any], where: str, known: dict[str, Tool]) -> Message:
    content = block.get("content")
    blocks = _blocks([] if content is None else content, f"{where}.content")
    text = "\n".join(_text(inner, known) for inner in blocks)
    if block.get("is_error") is True:
        text = f"Error: {text}"  # chat templates have no other place for the flag
    return {"role": "tool", "content": text, "tool_call_id": text_field(block, "tool_use_id", where)}


def _text(placed: _Block, known: dict[str, Tool]) -> str:
    """The text of a block that can stand in any message.

    A loaded tool is its definition as JSON. So is the echo of a hosted tool's use, which another model has made.
    """
    where, block = placed
    kind = block["type"]
    if kind == "text":
        return text_field(block, "text", where)
    if kind == "tool_reference":
        name = text_field(block, "tool_name", where)
        return _json_text(known.get(name) or {"name": name}, where)
    if kind in _HOSTED_BLOCKS or kind.endswith("_tool_result"):
        return _json_text({key: value for key, value in block.items() if key != "cache_control"}, where)
    raise DialectError(f"{where}.type: Input should be text here, not {kind!r}; this model takes text only.")


def text_field(block: dict[str, Any], key: str, where: str) -> str:
    """A string that must be there. Raises `DialectError`."""
    value = block.get(key)
    if not isinstance(value, str):
        raise DialectError(f"{where}.{key}: Input should be a string.")
    return value


def _json_text(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise DialectError(f"{where}: Input is nested too deeply.") from None
