"""Requests of the Messages API."""

from typing import Any, Literal

from rolltap.addons.dialects.anthropic.claude_code import is_claude_code, normal_arguments
from rolltap.addons.dialects.anthropic.content import conversation, hide_media, system_message
from rolltap.addons.dialects.decoded import decoded
from rolltap.addons.dialects.fields import Fields, Wording, parse_object
from rolltap.addons.dialects.tools import function_tool
from rolltap.addons.dialects.types import DialectError, ModelCall, Tool

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


def decode(body: bytes, target: str) -> ModelCall:
    """Decode the request in `body`. Raises `DialectError` for an invalid or unsupported request."""
    request = Fields(parse_object(body), _WORDING)
    counting = target.partition("?")[0].endswith("/count_tokens")
    callable_tools, shown, hosted = _read_tools(request)
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
