"""Requests of the Responses API."""

from typing import Any

from rolltap.addons.dialects.call import DialectError, Message, ModelCall, dump_json
from rolltap.addons.dialects.dialect import decoded, name_results
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.openai import WORDING, refuse_unsupported, require_offered, wanted_schema
from rolltap.addons.dialects.openai_responses.ids import INSTRUCTIONS, names_stored, resolve
from rolltap.addons.dialects.openai_responses.items import decode_input, hide_items
from rolltap.addons.dialects.openai_responses.reply import REPEATED, is_compact
from rolltap.addons.dialects.openai_responses.tools import ToolNames, read_tools
from rolltap.addons.dialects.stored import FindCall, NamesStored

_SAMPLING_FIELDS = [
    "temperature",
    "top_p",
    "reasoning",
    "text",
    "tool_choice",
    "parallel_tool_calls",
    "service_tier",
    "truncation",
    "presence_penalty",
    "frequency_penalty",
    "store",
    "include",
    "max_tool_calls",
    "context_management",
]
_LONGEST_REPEATED = 512 * 1024
"""Bytes of a field that the response repeats: no longer one is encoded in the event loop."""
_LOGPROBS = "message.output_text.logprobs"


def decode(parsed: dict[str, Any], target: str) -> ModelCall:
    """Decode the request in `body`. Raises `DialectError` for an invalid or unsupported request, and `NamesStored`."""
    request = Fields(parsed, WORDING)
    if is_compact(target):
        request.label("model")
        given = request.maybe("input", str)
        items = request.elements("input") if given is None else [{"role": "user", "content": given}]
        request = request.replaced(
            {**request.values, "input": [*items, {"type": "compaction_trigger"}], "stream": False}
        )
    if request["conversation"]:
        raise DialectError("'conversation' is not supported: name the last response as 'previous_response_id'.")
    hidden = hide_items(request)
    if not names_stored(request):
        return _decode(request, [], hidden)

    def complete(find: FindCall) -> ModelCall:
        return _decode(*resolve(request, find), hidden)

    raise NamesStored(complete)


def _decode(request: Fields, before: list[Message], hidden: int) -> ModelCall:
    """Decode a request without ids and media. `before` are messages before its input."""
    for name in ("prompt", "background"):
        if request[name]:
            raise DialectError(f"'{name}' is not supported: this server stores neither templates nor unread replies.")
    refuse_unsupported(request, ["top_logprobs"])
    if _LOGPROBS in request.elements("include"):
        raise request.refusal("include", f"a list without '{_LOGPROBS}', which is not supported with this model")
    form, metadata = request.inner("text").inner("format"), request.inner("client_metadata")
    model_call = ModelCall(
        model=request.optional("model", Fields.label) or "",
        messages=[],
        tools=[],
        stream=request["stream"] is True,
        max_tokens=request.optional("max_output_tokens", Fields.positive_integer),
        schema=wanted_schema(form, form),
        may_call=request["tool_choice"] != "none",
        requested_sampling=request.chosen(_SAMPLING_FIELDS),
        repeated={
            key: value
            for key, value in request.chosen((*REPEATED, "tools")).items()
            if key in ("tools", "instructions") or len(dump_json(value)) <= _LONGEST_REPEATED  # the window bounds these
        },
        hidden=hidden,
        client_metadata=metadata.texts_by_place(*metadata.values)
        | request.texts_by_place("prompt_cache_key", "previous_response_id"),
    )
    if request["instructions"] is not None:
        model_call.requested_sampling[INSTRUCTIONS] = True
    names = ToolNames()
    read_tools(request, model_call, names)
    decode_input(request, before, model_call, names)
    require_offered(request.inner("tool_choice"), model_call.tool_names)
    compacted = any(item["type"] == "compaction" for item in request.maybe("input", list) or [] if "type" in item)
    called = {call["id"] for message in before for call in message.get("tool_calls", ())}
    compacted |= any(message["role"] == "tool" and message["tool_call_id"] not in called for message in before)
    # the call of a result may be part of a compaction, also of an earlier one
    orphan = "" if compacted else "No tool call found for function call output with call_id {}."
    model_call.messages = name_results(model_call.messages, orphan)
    return decoded(model_call)
