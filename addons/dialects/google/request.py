"""A request of the Gemini API as a `ModelCall`."""

import re
from typing import Any
from urllib.parse import unquote

from rolltap.addons.dialects.fields import Fields, parse_object
from rolltap.addons.dialects.google.contents import conversation, system_message
from rolltap.addons.dialects.google.protobuf import WORDING, json_schema, message, named, nests_deeper, repeated
from rolltap.addons.dialects.tools import function_tool
from rolltap.addons.dialects.types import DialectError, ModelCall

METHOD = re.compile(
    r"/(?:v1|v1beta|v1beta1)/(?:(?:projects/[^/]+/locations/[^/]+/)?publishers/google/)?"
    r"models/(?P<model>.+):(?P<method>generateContent|streamGenerateContent|countTokens)"
)
"""The paths of the methods that are served."""

_BODY_LEVELS = 100
"""At which protobuf's parsers stop."""
_READ = frozenset({"maxOutputTokens", "stopSequences", "candidateCount"})


def decode(body: bytes, target: str) -> ModelCall:
    """The request in `body`; `target` names the model and says whether the reply is a stream.

    Raises `DialectError` for what the API itself would refuse.
    """
    match = METHOD.fullmatch(target.partition("?")[0])
    if match is None:
        raise DialectError(f"{target} is not a method of this API.", status=404)
    parsed = parse_object(body)
    if nests_deeper(parsed, _BODY_LEVELS):
        raise DialectError(f"The request body nests deeper than {_BODY_LEVELS} levels.")
    request = Fields(named(parsed), WORDING)
    if request["generateContentRequest"] is not None:  # how countTokens wraps more than the contents
        request = message(request, "generateContentRequest")
    if request["cachedContent"]:
        raise DialectError("'cached_content' is not supported: this server stores no content.")
    config = message(request, "generationConfig")
    if config["candidateCount"] not in (None, 1):
        raise config.refusal("candidateCount", "1")
    model_call = ModelCall(
        model=unquote(match["model"]),
        messages=system_message(request) + conversation(request),
        tools=[],
        stream=match["method"] == "streamGenerateContent",
        max_tokens=config.optional("maxOutputTokens", Fields.positive_integer),
        stop=config.texts("stopSequences"),
        requested_sampling={field: value for field, value in config.values.items() if field not in _READ}
        | request.chosen(("toolConfig", "safetySettings")),
    )
    if config["responseMimeType"] == "application/json":
        model_call.schema = _schema(config, "responseJsonSchema", "responseSchema") or {}
    for tool in repeated(request, "tools"):
        _read_tool(tool, model_call)
    if message(message(request, "toolConfig"), "functionCallingConfig")["mode"] == "NONE":
        model_call.tools = []
    return model_call


def _read_tool(tool: Fields, model_call: ModelCall) -> None:
    for function in repeated(tool, "functionDeclarations"):
        parameters = _schema(function, "parametersJsonSchema", "parameters")
        model_call.tools.append(function_tool(function.name("name"), function.maybe("description", str), parameters))
    model_call.hosted_tools += [{kind: given} for kind, given in tool.values.items() if kind != "functionDeclarations"]


def _schema(fields: Fields, as_json: str, as_openapi: str) -> dict[str, Any] | None:
    """A schema, which may be given in two manners."""
    if fields[as_json] is not None:
        return fields.maybe(as_json, dict)
    schema = fields.maybe(as_openapi, dict)
    return None if schema is None else json_schema(schema)
