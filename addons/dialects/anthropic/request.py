"""Requests of the Messages API: options, tools, system prompt, messages and their content blocks.

A conversation must decode to the same messages in each request. These differences between the requests of a Claude
Code session are therefore removed:

- A system block with billing information differs in each request. It is dropped.
- `cache_control` moves to the last block. It is ignored.
- A content of one text block is sent as a string when it has no `cache_control`. Both decode to the same text.
- A tool with `defer_loading` is added to `tools` after a search found it. It is not part of the tools that the model
  sees. The first `tool_reference` block that loads it decodes to its definition.
"""

import json
from typing import Any, Literal

from rolltap.addons.dialects.anthropic.claude_code import is_claude_code, normal_arguments
from rolltap.addons.dialects.call import (
    DialectError,
    Message,
    ModelCall,
    Tool,
    assistant_message,
    message_tool_call,
    signed_call,
)
from rolltap.addons.dialects.dialect import decoded, name_results
from rolltap.addons.dialects.fields import Fields, Wording
from rolltap.addons.dialects.json_values import described
from rolltap.addons.dialects.media import hide, placeholder
from rolltap.addons.dialects.tools import from_object, function_tool

_BILLING = "x-anthropic-billing-header"

_CONTENT = "a string or a list of content blocks"
_HOSTED_BLOCKS = ("server_tool_use", "mcp_tool_use", "search_result")


def system_message(request: Fields, tools: dict[str, Tool]) -> list[Message]:
    """Return the system prompt as a list of at most one message. `tools` maps names to tools of the request."""
    texts = [_text(block, tools) for block in _blocks(request, "system")]
    texts = [text for text in texts if text and not text.startswith(_BILLING)]
    # blocks are separated by a blank line, because some harnesses send blocks without a final newline
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def conversation(request: Fields, tools: dict[str, Tool]) -> list[Message]:
    """Decode the messages of a request. Raises `DialectError`, also when there are none."""
    turns: list[tuple[str, list[Fields]]] = []
    for message in request.objects("messages"):
        role, blocks = message.choice("role", ("user", "assistant", "system")), _blocks(message, "content")
        if message["content"] is None:
            raise message.refusal("content", _CONTENT)
        if role == "assistant" and turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)  # one turn in this API; a harness may split a reply
        else:
            turns.append((role, blocks))
    if not turns:
        raise request.refusal("messages", "a list of at least one message")
    decoded: list[Message] = []
    for role, blocks in turns:
        if role == "assistant":
            decoded.append(_assistant(blocks, tools))
        elif role == "user":
            decoded += _user(blocks, tools)
        else:
            decoded.append({"role": "system", "content": "".join(_text(block, tools) for block in blocks)})
    return decoded


def hide_media(request: Fields) -> int:
    """Replace the images and documents of a request, also those in results of tools: see `hide`."""
    return hide(request.values, [("messages", "content"), ("messages", "content", "content")], _text_for, "text")


def _text_for(block: dict[str, Any]) -> str | None:
    kind, source = block.get("type"), block.get("source")
    if kind not in ("image", "document") or not isinstance(source, dict) or source.get("type") == "text":
        return None
    return placeholder(source.get("media_type"), str(kind))


def _blocks(fields: Fields, key: str) -> list[Fields]:
    """Return the blocks of a content. A string is one text block."""
    text = fields.maybe(key, str)
    return list(fields.objects(key, _CONTENT)) if text is None else [fields.at(key, {"type": "text", "text": text})]


def _assistant(blocks: list[Fields], tools: dict[str, Tool]) -> Message:
    texts, thoughts, tool_calls = [], [], []
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
                tool_calls.append(message_tool_call(block.identifier("id"), name, arguments))
            case _:
                texts.append(_text(block, tools))
    return assistant_message("".join(texts), "".join(thoughts), tool_calls, call_id)


def _user(blocks: list[Fields], tools: dict[str, Tool]) -> list[Message]:
    """Return one tool message for each tool result, then the text of the user, if any."""
    results: list[Message] = []
    texts = []
    for block in blocks:
        if block["type"] == "tool_result":
            results.append(_tool_result(block, tools))
        else:
            texts.append(_text(block, tools))
    text = "".join(texts)  # Claude Code ends each block but the last with a newline
    return [*results, {"role": "user", "content": text}] if text or not results else results


def _tool_result(block: Fields, tools: dict[str, Tool]) -> Message:
    text = "\n".join(_text(inner, tools) for inner in _blocks(block, "content"))
    if block["is_error"] is True:
        text = f"Error: {text}"  # chat templates have no field for the flag
    return {"role": "tool", "content": text, "tool_call_id": block.identifier("tool_use_id")}


def _text(block: Fields, tools: dict[str, Tool]) -> str:
    """Return the text of a block that is allowed in any message.

    A `tool_reference` becomes the tool's definition as JSON, and a later one to the same tool its name: definitions in
    `tools` are removed once they are shown. Blocks of hosted tools, which another model used, become JSON as well.
    """
    kind = block.text("type")
    if kind == "text":
        return block.text("text")
    if kind == "document" and block.inner("source")["type"] == "text":
        return block.inner("source").text("data")
    if kind == "tool_reference":
        name = block.label("tool_name")
        return _json_text(block, tools.pop(name, None) or {"name": name})
    if kind in _HOSTED_BLOCKS or kind.endswith("_tool_result"):
        return _json_text(block, {key: value for key, value in block.values.items() if key != "cache_control"})
    raise block.refusal("type", f"text here, not {described(kind)}; this model takes text only")


def _json_text(block: Fields, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise DialectError(f"{block.place()}: Input is nested too deeply.") from None


_WORDING = Wording("{place}: Input should be {expected}.", index=".{}")
_SAMPLING_FIELDS = [
    "temperature",
    "top_p",
    "top_k",
    "tool_choice",
    "thinking",
    "output_config",
    "output_format",
    "context_management",
    "service_tier",
    "speed",
    "inference_geo",
]


def decode(parsed: dict[str, Any], target: str) -> ModelCall:
    """Decode the request in `body`. Raises `DialectError` for an invalid or unsupported request."""
    request = Fields(parsed, _WORDING)
    counting = target.partition("?")[0].endswith("/count_tokens")
    callable_tools, shown, hosted = _read_tools(request)
    offered, choice = [*callable_tools, *(tool.get("name") for tool in hosted)], request.inner("tool_choice")
    if choice["type"] == "tool" and choice["name"] not in offered and not request["mcp_servers"]:  # which have others
        raise DialectError(f"Tool {described(choice['name'])} not found in provided tools")
    hidden = hide_media(request)
    messages = system_message(request, callable_tools) + conversation(request, callable_tools)
    if messages[-1]["role"] == "assistant" and not counting:
        raise DialectError(
            "This model does not support assistant message prefill. The conversation must end with a user message."
        )
    form = request.inner("output_config").inner("format")
    if not form.values:
        form = request.inner("output_format")  # the older name
    metadata, diagnostics = request.inner("metadata"), request.inner("diagnostics")
    model_call = ModelCall(
        model=request.optional("model", Fields.label) or "",
        messages=messages,
        tools=shown,
        stream=request["stream"] is True,
        max_tokens=None if counting else request.positive_integer("max_tokens"),
        stop=request.stop_texts("stop_sequences"),
        may_call=request.inner("tool_choice")["type"] != "none",
        reasoning=_reasoning(request.inner("thinking")),
        schema=form.maybe("schema", dict) if form["type"] == "json_schema" else None,
        requested_sampling=request.chosen(_SAMPLING_FIELDS),
        hidden=hidden,
        hosted_tools=[*hosted, *(server.values for server in request.objects("mcp_servers"))],
        client_metadata=metadata.texts_by_place("user_id") | diagnostics.texts_by_place("previous_message_id"),
        echo_rule=normal_arguments if is_claude_code(metadata.maybe("user_id", str)) else None,
    )
    model_call.messages = name_results(
        messages,
        "messages: unexpected `tool_use_id` found in `tool_result` blocks: {}. Each `tool_result` block must have a "
        "corresponding `tool_use` block in the previous message.",
    )
    return decoded(model_call)


def _reasoning(thinking: Fields) -> Literal["shown", "signed", "hidden"]:
    """Return the share of the reasoning that a request asks for with its field `thinking`."""
    if thinking["type"] not in ("enabled", "adaptive"):
        return "hidden"
    return "signed" if thinking["display"] == "omitted" else "shown"


def _read_tools(request: Fields) -> tuple[dict[str, Tool], list[Tool], list[Any]]:
    """Return the callable tools by name, those of them that the model sees from the start, and the hosted tools.

    A tool with a type of its own counts as hosted. That includes bash and the text editor, which the harness runs: they
    come without a schema, which only the provider's models know.
    """
    callable_tools: dict[str, Tool] = {}
    shown: list[Tool] = []
    hosted: list[Any] = []
    for tool in request.objects("tools"):
        if tool["type"] not in (None, "custom"):
            hosted.append(tool.values)
            continue
        name = tool.tool_name("name")
        callable_tools[name] = function_tool(name, tool.maybe("description", str), tool.maybe("input_schema", dict))
        if tool["defer_loading"] is not True:
            shown.append(callable_tools[name])
    return callable_tools, shown, hosted
