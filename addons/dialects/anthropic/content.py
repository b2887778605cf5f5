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

from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.tools import from_object
from rolltap.addons.dialects.types import DialectError, Message, Tool, assistant_message, message_call, signed_call

_BILLING = "x-anthropic-billing-header"

_CONTENT = "a string or a list of content blocks"
_HOSTED_BLOCKS = ("server_tool_use", "mcp_tool_use", "search_result")


def system_message(request: Fields, known: dict[str, Tool]) -> list[Message]:
    """The system prompt, a string or blocks, as no message or one. `known` holds the request's tools by name."""
    texts = [_text(block, known) for block in _blocks(request, "system")]
    texts = [text for text in texts if text and not text.startswith(_BILLING)]
    # a blank line, as some harnesses write blocks that neither end nor begin with one
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def conversation(request: Fields, known: dict[str, Tool]) -> list[Message]:
    """The messages of a request; there is at least one. Raises `DialectError`."""
    turns: list[tuple[str, list[Fields]]] = []
    for message in request.objects("messages"):
        role, blocks = message.choice("role", ("user", "assistant", "system")), _blocks(message, "content")
        if message["content"] is None:
            raise message.refusal("content", _CONTENT)
        if role == "assistant" and turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)  # this API makes one turn of them, and a harness may split a reply
        else:
            turns.append((role, blocks))
    if not turns:
        raise request.refusal("messages", "a list of at least one message")
    decoded: list[Message] = []
    for role, blocks in turns:
        if role == "assistant":
            decoded.append(_assistant(blocks, known))
        elif role == "user":
            decoded += _user(blocks, known)
        else:
            decoded.append({"role": "system", "content": "".join(_text(block, known) for block in blocks)})
    return decoded


def _blocks(fields: Fields, key: str) -> list[Fields]:
    """The blocks of a content; a string is one text block."""
    text = fields.maybe(key, str)
    return list(fields.objects(key, _CONTENT)) if text is None else [fields.at(key, {"type": "text", "text": text})]


def _assistant(blocks: list[Fields], known: dict[str, Tool]) -> Message:
    texts, thoughts, calls = [], [], []
    call_id = None
    for block in blocks:
        match block.text("type"):
            case "thinking":
                thoughts.append(block.text("thinking"))
                call_id = call_id or signed_call(block.maybe("signature", str))
            case "redacted_thinking":
                call_id = call_id or signed_call(block.maybe("data", str))
            case "tool_use":
                name, arguments = block.name("name"), from_object(block.object("input"))
                calls.append(message_call(block.text("id"), name, arguments))
            case _:
                texts.append(_text(block, known))
    return assistant_message("".join(texts), "".join(thoughts), calls, call_id)


def _user(blocks: list[Fields], known: dict[str, Tool]) -> list[Message]:
    """The tool results of a user message, each a message of its own, then what the user says."""
    results: list[Message] = []
    texts = []
    for block in blocks:
        if block["type"] == "tool_result":
            results.append(_tool_result(block, known))
        else:
            texts.append(_text(block, known))
    text = "".join(texts)  # Claude Code ends a block with a newline when another one follows
    return [*results, {"role": "user", "content": text}] if text or not results else results


def _tool_result(block: Fields, known: dict[str, Tool]) -> Message:
    text = "\n".join(_text(inner, known) for inner in _blocks(block, "content"))
    if block["is_error"] is True:
        text = f"Error: {text}"  # chat templates have no other place for the flag
    return {"role": "tool", "content": text, "tool_call_id": block.text("tool_use_id")}


def _text(block: Fields, known: dict[str, Tool]) -> str:
    """The text of a block that can stand in any message.

    A loaded tool is its definition as JSON. So is the echo of a hosted tool's use, which another model has made.
    """
    kind = block.text("type")
    if kind == "text":
        return block.text("text")
    if kind == "tool_reference":
        name = block.text("tool_name")
        return _json_text(block, known.get(name) or {"name": name})
    if kind in _HOSTED_BLOCKS or kind.endswith("_tool_result"):
        return _json_text(block, {key: value for key, value in block.values.items() if key != "cache_control"})
    raise block.refusal("type", f"text here, not {kind!r}; this model takes text only")


def _json_text(block: Fields, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise DialectError(f"{block.place()}: Input is nested too deeply.") from None
