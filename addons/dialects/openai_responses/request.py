"""Requests of the Responses API."""

from rolltap.addons.dialects.decoded import decoded
from rolltap.addons.dialects.fields import Fields, parse_object
from rolltap.addons.dialects.openai import WORDING, hide_media, refuse_unsupported, wanted_schema
from rolltap.addons.dialects.openai_responses.input import decode_input
from rolltap.addons.dialects.openai_responses.tools import ToolNames, read_tools
from rolltap.addons.dialects.types import DialectError, ModelCall

_SAMPLING_FIELDS = [
    "temperature",
    "top_p",
    "reasoning",
    "text",
    "tool_choice",
    "parallel_tool_calls",
    "service_tier",
    "truncation",
    "store",
    "include",
    "max_tool_calls",
    "context_management",
]
_LOGPROBS = "message.output_text.logprobs"


def decode(body: bytes, target: str) -> ModelCall:
    """Decode the request in `body`. Raises `DialectError` for an invalid or unsupported request."""
    request = Fields(parse_object(body), WORDING)
    _refuse_stored(request)
    refuse_unsupported(request, ["top_logprobs"])
    if _LOGPROBS in request.elements("include"):
        raise request.refusal("include", f"a list without '{_LOGPROBS}', which is not supported with this model")
    form, metadata = request.inner("text").inner("format"), request.inner("client_metadata")
    hidden = hide_media(request.values, ("input", "content"), ("input", "output"))
    model_call = ModelCall(
        model=request.optional("model", Fields.label) or "",
        messages=[],
        tools=[],
        stream=request["stream"] is True,
        max_tokens=request.optional("max_output_tokens", Fields.positive_integer),
        schema=wanted_schema(form, form),
        may_call=request["tool_choice"] != "none",
        requested_sampling=request.chosen(_SAMPLING_FIELDS),
        hidden=hidden,
        client_metadata=metadata.texts_by_place(*metadata.values) | request.texts_by_place("prompt_cache_key"),
    )
    names = ToolNames()
    read_tools(request, model_call, names)
    decode_input(request, model_call, names)
    return decoded(model_call)


def _refuse_stored(request: Fields) -> None:
    if request["previous_response_id"] is not None:
        raise DialectError(
            "The response that 'previous_response_id' names was not found: responses are not stored. "
            "Send the whole conversation in 'input'.",
            code="previous_response_not_found",
        )
    for name in ("conversation", "prompt", "background"):
        if request[name]:
            raise DialectError(f"'{name}' is not supported: this server stores nothing.")
