"""Requests of the Gemini API, and the cached content that one names."""

import re
from typing import Any
from urllib.parse import unquote

from rolltap.addons.dialects.dialect import decoded
from rolltap.addons.dialects.fields import Fields, parse_object
from rolltap.addons.dialects.google.contents import conversation, hide_media, system_message
from rolltap.addons.dialects.google.protobuf import (
    WORDING,
    camel_case_fields,
    json_schema,
    message_field,
    repeated_field,
)
from rolltap.addons.dialects.json_values import nests_deeper
from rolltap.addons.dialects.model_call import DialectError, ModelCall
from rolltap.addons.dialects.stored import NamesStored, Stored
from rolltap.addons.dialects.tools import function_tool

FOLDER = "/cachedContents/"
"""Start of the paths under which cached contents are stored."""
FIRST = ("systemInstruction", "tools", "toolConfig")
"""Fields of a request that only its cached content may have."""
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


def decode(body: bytes, target: str) -> ModelCall:
    """Decode the request in `body`. The path in `target` contains the model and the method.

    Raises `DialectError` for an invalid or unsupported request, and `NamesStored`.
    """
    match = METHOD.fullmatch(target.partition("?")[0])
    if match is None:
        raise DialectError("This path is not a method of this API.", status=404)
    parsed = parse_object(body)
    _refuse_deep(parsed)
    request = Fields(camel_case_fields(parsed), WORDING)
    if request["generateContentRequest"] is not None:  # countTokens has the whole request here
        request = message_field(request, "generateContentRequest")
    model, method = unquote(match["model"]), match["method"]
    if request["cachedContent"]:
        raise NamesStored(lambda stored: _decode(_with_cached_content(request, model, stored), model, method))
    return _decode(request, model, method)


def decode_content(content: Fields) -> ModelCall:
    """Decode the content that requests may have in front, as one that has it. Its media become texts in place.

    Raises `DialectError` for a content that no request could have.
    """
    _refuse_deep(content.values)
    asked = [*as_list(content["contents"]), {"role": "user", "parts": [{"text": "."}]}]
    return _decode(content.replaced({**content.values, "contents": asked}), "", "generateContent")


def _refuse_deep(body: dict[str, Any]) -> None:
    if nests_deeper(body, _BODY_LEVELS):
        raise DialectError(f"The request body nests deeper than {_BODY_LEVELS} levels.")


def _decode(request: Fields, model: str, method: str) -> ModelCall:
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


def _with_cached_content(request: Fields, model: str, stored: Stored) -> Fields:
    """Return a request with the cached content that it names in front. Raises `DialectError`."""
    name = request.text("cachedContent")
    cached = find_cached(name, stored)
    if any(request[key] is not None for key in FIRST):
        raise DialectError(
            "CachedContent can not be used with GenerateContent request setting system_instruction, tools or "
            "tool_config. Proposed fix: move those values to CachedContent from GenerateContent request."
        )
    made_for = str(cached.get("model", "")).rpartition("/")[2]
    if made_for and made_for != model:
        raise DialectError("Model used by GenerateContent request and CachedContent has to be the same.")
    contents = [*as_list(cached.get("contents")), *as_list(request["contents"])]
    first = {key: cached[key] for key in FIRST if key in cached}
    return request.replaced({**request.values, **first, "contents": contents})


def find_cached(name: str, stored: Stored) -> dict[str, Any]:
    """Return a cached content as its entries have made it. Raises `DialectError` for one that is unknown."""
    entries = stored.entries(path_of(name))
    if entries is None:
        raise DialectError("CachedContent not found (or permission denied)", status=403)
    return {key: value for entry in entries for key, value in entry.items()}


def path_of(name: str) -> str:
    """Return the path under which a cached content is stored. Its names have a project, or none."""
    return f"{FOLDER}{name.rpartition('/')[2]}"


def as_list(value: Any) -> list[Any]:
    """Return a repeated field, which may be a single message without a list."""
    return value if isinstance(value, list) else [] if value is None else [value]
