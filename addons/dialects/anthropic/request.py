"""A request of the Messages API as a `ModelCall`."""

from typing import Any

from rolltap.addons.dialects.anthropic.claude_code import is_claude_code, normal_arguments
from rolltap.addons.dialects.anthropic.content import conversation, system_message
from rolltap.addons.dialects.fields import Fields, Wording, parse_object
from rolltap.addons.dialects.tools import function_tool
from rolltap.addons.dialects.types import DialectError, ModelCall, Tool

_WORDING = Wording("{place}: Input should be {what}.", index=".{}")
_WISHES = [
    "temperature",
    "top_p",
    "top_k",
    "tool_choice",
    "thinking",
    "output_config",
    "output_format",
    "context_management",
]


def decode(body: bytes, target: str) -> ModelCall:
    """The request in `body`. Raises `DialectError` for what the API itself would refuse."""
    request = Fields(parse_object(body), _WORDING)
    counting = target.partition("?")[0].endswith("/count_tokens")
    known, shown, hosted = _read_tools(request)
    messages = system_message(request, known) + conversation(request, known)
    if messages[-1]["role"] == "assistant" and not counting:
        raise DialectError(
            "This model does not support assistant message prefill. The conversation must end with a user message."
        )
    form = request.inner("output_config").inner("format")
    if not form.values:
        form = request.inner("output_format")  # its older name
    metadata, diagnostics = request.inner("metadata"), request.inner("diagnostics")
    return ModelCall(
        model=request.optional("model", Fields.text) or "",
        messages=messages,
        tools=[] if request.inner("tool_choice")["type"] == "none" else shown,
        stream=request["stream"] is True,
        max_tokens=None if counting else request.positive_integer("max_tokens"),
        stop=request.texts("stop_sequences"),
        schema=form.maybe("schema", dict) if form["type"] == "json_schema" else None,
        requested_sampling=request.chosen(_WISHES),
        hosted_tools=hosted,
        client_metadata=metadata.texts_by_place("user_id") | diagnostics.texts_by_place("previous_message_id"),
        echo_rule=normal_arguments if is_claude_code(metadata.maybe("user_id", str)) else None,
    )


def _read_tools(request: Fields) -> tuple[dict[str, Tool], list[Tool], list[Any]]:
    """All tools that can be called, by name; those that are shown from the start; and the hosted ones.

    A tool with a type of its own (web search, but also bash or the text editor) comes without a schema: only the
    provider's models know what it takes.
    """
    known: dict[str, Tool] = {}
    shown: list[Tool] = []
    hosted: list[Any] = []
    for tool in request.objects("tools"):
        if tool["type"] not in (None, "custom"):
            hosted.append(tool.values)
            continue
        name = tool.name("name")
        known[name] = function_tool(name, tool.maybe("description", str), tool.maybe("input_schema", dict))
        if tool["defer_loading"] is not True:
            shown.append(known[name])
    return known, shown, hosted
