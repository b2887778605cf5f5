"""Requests of Chat Completions."""

from typing import Any

from rolltap.addons.dialects.call import (
    FREEFORM_ARGUMENT,
    Message,
    ModelCall,
    WireTool,
    assistant_message,
    message_tool_call,
    parse_arguments,
)
from rolltap.addons.dialects.dialect import decoded, name_results
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.openai import (
    WORDING,
    content_text,
    hide_media,
    refuse_unsupported,
    require_offered,
    wanted_schema,
)
from rolltap.addons.dialects.tools import freeform_tool

_SAMPLING_FIELDS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "n",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "verbosity",
    "service_tier",
    "store",
    "modalities",
]
_LEGACY = ("functions", "function_call")
_UNSUPPORTED = ("logprobs", "top_logprobs", "audio", "echo", "continue_final_message", "prompt_logprobs")
"""Fields that change what a reply is. The last three are vLLM's. Other fields that are not read here are hints."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_KEYS = {"text": "text", "refusal": "refusal"}


def decode(parsed: dict[str, Any], target: str) -> ModelCall:
    """Decode the request in `body`. Raises `DialectError` for an invalid or unsupported request."""
    request = Fields(parsed, WORDING)
    hidden = hide_media(request.values, ("messages", "content"))
    messages = [_message(message) for message in request.objects("messages", "a non-empty list")]
    if not messages:
        raise request.refusal("messages", "a non-empty list")
    if request["n"] not in (None, 1):
        raise request.refusal("n", "1")
    refuse_unsupported(request, _UNSUPPORTED)
    refuse_unsupported(request, _LEGACY, "Use 'tools' and 'tool_choice' instead.")
    if any(modality != "text" for modality in request.elements("modalities")):
        raise request.refusal("modalities", "['text']")
    limit = "max_tokens" if request["max_completion_tokens"] is None else "max_completion_tokens"
    form, metadata = request.inner("response_format"), request.inner("metadata")
    model_call = ModelCall(
        model=request.optional("model", Fields.label) or "",
        messages=messages,
        tools=[],
        stream=request["stream"] is True,
        include_usage=request.inner("stream_options")["include_usage"] is True,
        max_tokens=request.optional(limit, Fields.positive_integer),
        stop=request.stop_texts("stop"),
        may_call=request["tool_choice"] != "none",
        schema=wanted_schema(form, form.inner("json_schema")),
        requested_sampling=request.chosen(_SAMPLING_FIELDS),
        client_metadata=metadata.texts_by_place(*metadata.values),
        hidden=hidden,
    )
    for tool in request.objects("tools"):
        _read_tool(tool, model_call)
    if request["web_search_options"]:
        model_call.hosted_tools.append({"type": "web_search_options", **request.inner("web_search_options").values})
    require_offered(request.inner("tool_choice"), model_call.tool_names)
    model_call.messages = name_results(
        messages, "Invalid parameter: 'tool_call_id' of '{}' not found in 'tool_calls' of previous message."
    )
    return decoded(model_call)


def _read_tool(tool: Fields, model_call: ModelCall) -> None:
    kind = tool.optional("type", Fields.text) or "function"
    if kind == "function":
        described = tool.inner("function")
        described.tool_name("name")
        model_call.tools.append({"type": kind, "function": described.values})
    elif kind == "custom":
        custom = tool.inner("custom")
        name, grammar = custom.tool_name("name"), custom.inner("format").inner("grammar")
        function = freeform_tool(name, custom.maybe("description", str), grammar.maybe("definition", str))
        model_call.tools.append(function)
        model_call.wire_tools[name] = WireTool(name, freeform=True)
    else:
        model_call.hosted_tools.append(tool.values)


def _message(message: Fields) -> Message:
    role = message.choice("role", _ROLES)
    content = content_text(message, "content", _TEXT_KEYS)
    if role == "assistant":
        refuse_unsupported(message, ["function_call"], "Use 'tool_calls' instead.")
        reasoning = message.maybe("reasoning_content", str) or message.maybe("reasoning", str)
        return assistant_message(content, reasoning or "", [_tool_call(call) for call in message.objects("tool_calls")])
    if role == "tool":
        tool_call_id = message.optional("tool_call_id", Fields.identifier) or ""
        result = {"role": role, "content": content, "tool_call_id": tool_call_id}
        name = message.maybe("name", str)
        return {**result, "name": name} if name else result
    return {"role": "system" if role == "developer" else role, "content": content}


def _tool_call(call: Fields) -> dict[str, Any]:
    tool_call_id = call.optional("id", Fields.identifier) or ""
    function = call.inner("function")
    if not function.values and call["custom"]:
        custom = call.inner("custom")
        text = custom.optional("input", Fields.text) or ""
        return message_tool_call(tool_call_id, custom.name("name"), {FREEFORM_ARGUMENT: text})
    arguments = {} if function["arguments"] is None else function["arguments"]
    parsed = parse_arguments(arguments) if isinstance(arguments, str) else arguments
    return message_tool_call(tool_call_id, function.name("name"), parsed)
