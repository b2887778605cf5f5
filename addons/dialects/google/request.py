"""Requests of the Gemini API."""

import re
from typing import Any
from urllib.parse import unquote

from rolltap.addons.dialects.call import DialectError, ModelCall
from rolltap.addons.dialects.dialect import decoded, name_results
from rolltap.addons.dialects.fields import Fields
from rolltap.addons.dialects.google.contents import conversation, hide_media, system_message
from rolltap.addons.dialects.google.protobuf import (
    WORDING,
    camel_case_fields,
    json_schema,
    message_field,
    repeated_field,
)
from rolltap.addons.dialects.json_values import nests_deeper
from rolltap.addons.dialects.tools import function_tool

METHOD = re.compile(
    r"/(?:v1|v1beta|v1beta1)/(?:(?:projects/[^/]+/locations/[^/]+/)?publishers/google/)?"
    r"models/(?P<model>.+):(?P<method>generateContent|streamGenerateContent|countTokens)"
)
"""The paths of the methods that are served."""

_ENUM = "text/x.enum"
"""The type of a reply that is one of the texts of an enumeration."""
_BODY_LEVELS = 100
"""The nesting that protobuf's parsers accept."""
_SAMPLING_FIELDS = [
    "temperature",
    "topP",
    "topK",
    "seed",
    "presencePenalty",
    "frequencyPenalty",
    "responseMimeType",
    "responseModalities",
    "thinkingConfig",
    "mediaResolution",
    "routingConfig",
    "modelSelectionConfig",
]


def decode(parsed: dict[str, Any], target: str) -> ModelCall:
    """Decode the request in `body`. The path in `target` contains the model and the method.

    Raises `DialectError` for an invalid or unsupported request.
    """
    match = METHOD.fullmatch(target.partition("?")[0])
    if match is None:
        raise DialectError("This path is not a method of this API.", status=404)
    if nests_deeper(parsed, _BODY_LEVELS):
        raise DialectError(f"The request body nests deeper than {_BODY_LEVELS} levels.")
    request = Fields(camel_case_fields(parsed), WORDING)
    if request["generateContentRequest"] is not None:  # countTokens has the whole request here
        request = message_field(request, "generateContentRequest")
    if request["cachedContent"]:
        why = "'cached_content' is not served here: send its contents, instructions and tools in the request."
        raise DialectError(why)
    model = unquote(match["model"])
    method = match["method"]
    named = Fields({"model": model}, WORDING)  # it is in the path
    config = message_field(request, "generationConfig")
    if config["candidateCount"] not in (None, 1):
        raise config.refusal("candidateCount", "1")
    _refuse_unsupported(config, model)
    calling = message_field(message_field(request, "toolConfig"), "functionCallingConfig")
    thoughts = message_field(config, "thinkingConfig")["includeThoughts"]
    hidden = hide_media(request)  # before the messages are decoded
    model_call = ModelCall(
        model=named.label("model"),
        messages=system_message(request) + conversation(request),
        tools=[],
        stream=method == "streamGenerateContent",
        max_tokens=config.optional("maxOutputTokens", Fields.positive_integer),
        stop=config.stop_texts("stopSequences"),
        may_call=calling["mode"] != "NONE",
        hidden=hidden,
        reasoning="shown" if thoughts is True else "signed",
        requested_sampling=config.chosen(_SAMPLING_FIELDS) | request.chosen(("toolConfig", "safetySettings")),
    )
    model_call.bare = config["responseMimeType"] == _ENUM
    if model_call.bare or config["responseMimeType"] == "application/json":
        model_call.schema = _schema(config, "responseJsonSchema", "responseSchema") or {}
    if model_call.bare:
        texts = config.at("responseSchema", model_call.schema or {}).texts("enum")
        if not texts:
            raise config.refusal("responseSchema", "a schema with an enum")
        model_call.schema = {"type": "string", "enum": texts}
    for tool in repeated_field(request, "tools"):
        _read_tool(tool, model_call)
    offered = model_call.tool_names
    for number, name in enumerate(calling.texts("allowedFunctionNames")):
        if name not in offered:
            raise calling.refusal("allowedFunctionNames", "the name of a declared function", number)
    model_call.messages = name_results(model_call.messages)
    return decoded(model_call)


def _refuse_unsupported(config: Fields, model: str) -> None:
    if config["responseLogprobs"] or config["logprobs"]:
        raise DialectError(f"Logprobs is not enabled for models/{model}")
    if any(modality != "TEXT" for modality in config.elements("responseModalities")):
        raise config.refusal("responseModalities", "['TEXT']")
    if config["responseMimeType"] not in (None, "", "text/plain", "application/json", _ENUM):
        raise config.refusal("responseMimeType", f"'text/plain', 'application/json' or '{_ENUM}'")


def _read_tool(tool: Fields, model_call: ModelCall) -> None:
    for function in repeated_field(tool, "functionDeclarations"):
        parameters = _schema(function, "parametersJsonSchema", "parameters")
        model_call.tools.append(
            function_tool(function.tool_name("name"), function.maybe("description", str), parameters)
        )
    model_call.hosted_tools += [{kind: value} for kind, value in tool.values.items() if kind != "functionDeclarations"]


def _schema(fields: Fields, as_json: str, as_openapi: str) -> dict[str, Any] | None:
    """Return the schema in the field `as_json`, or in the field `as_openapi` converted to a JSON schema, or None."""
    if fields[as_json] is not None:
        return fields.maybe(as_json, dict)
    schema = fields.maybe(as_openapi, dict)
    return None if schema is None else json_schema(schema)
