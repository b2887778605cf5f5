"""Cached contents of the Gemini API: the content that comes first in the requests that name it, and its storage.

A cached content lasts as long as its session: an engine may be slower than the time to live that a program chose for
Google's. Errors are in the words of the API.
"""

import re
from datetime import UTC, datetime
from typing import Any

from rolltap.addons.dialects.fields import Fields, parse_object
from rolltap.addons.dialects.google.protobuf import WORDING, camel_case_fields
from rolltap.addons.dialects.google.request import FIRST, FOLDER, decode_content, find_cached, path_of
from rolltap.addons.dialects.json_values import is_word
from rolltap.addons.dialects.model_call import DialectError
from rolltap.addons.dialects.stored import (
    DELETED,
    Shape,
    Stored,
    StoredAnswer,
    StoredRequest,
    fields_of_a_tool,
    flag,
    hosted_tool,
    identifier,
    kept,
    label,
    own_signature,
    text,
    word,
)

_CALL: Shape = {"id": identifier, "name": text, "args": fields_of_a_tool}
_RESPONSE: Shape = {"id": identifier, "name": text, "response": fields_of_a_tool, "parts": {"text": text}}
_TEXT: Shape = {"text": text, "thought": flag, "thoughtSignature": own_signature}
_CONTENT: Shape = {"role": word, "parts": {**_TEXT, "functionCall": _CALL, "functionResponse": _RESPONSE}}
_PARAMETERS: Shape = {"parameters": fields_of_a_tool, "parametersJsonSchema": fields_of_a_tool}
_FUNCTION: Shape = {"name": label, "description": text, **_PARAMETERS}


def _names(names: Any) -> list[str]:
    return [name for name in names if label(name)] if isinstance(names, list) else []


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Store tools: functions as the model sees them, hosted ones in their recordable form."""
    return [_tool(camel_case_fields(tool)) for tool in (tools if isinstance(tools, list) else [tools])]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    functions = tool.pop("functionDeclarations", None)
    stored = {} if functions is None else {"functionDeclarations": kept(functions, _FUNCTION, camel_case_fields)}
    for kind, value in tool.items():
        stored |= hosted_tool({kind: value}) or {}
    return stored


_CACHED: Shape = {
    "model": label,
    "displayName": label,
    "systemInstruction": _CONTENT,
    "contents": _CONTENT,
    "tools": _tools,
    "toolConfig": {"functionCallingConfig": {"mode": word, "allowedFunctionNames": _names}},
}


_PATH = re.compile(r"/(?:v1|v1beta|v1beta1)/(?P<name>(?:projects/[^/]+/locations/[^/]+/)?cachedContents(?:/[^/:]+)?)")
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?s", re.ASCII)
_LIFETIME = 3600
"""Seconds, unless the request has a `ttl` or an `expireTime`."""


def is_served(method: str, path: str) -> bool:
    """Return True for a request that `serve` answers."""
    match = _PATH.fullmatch(path)
    if match is None:
        return False
    return method in (("GET", "POST") if match["name"].endswith("cachedContents") else ("GET", "PATCH", "DELETE"))


def serve(request: StoredRequest, stored: Stored) -> StoredAnswer:
    """Answer a request to create, list, read, change or delete cached contents. Raises `DialectError`."""
    match = _PATH.fullmatch(request.target.partition("?")[0])
    if match is None or not is_served(request.method, match[0]):
        raise DialectError("This path is not a method of this API.", status=404)
    name = match["name"]
    match request.method:
        case "POST":
            name = f"{name}/{request.new_id}"
            body = _body(request)
            content, hidden = _given_content(Fields(body, WORDING))
            entry = {"name": name, **content, "createTime": _time(request.now), **_expiry(body, request.now)}
            return StoredAnswer(_shown(entry), path_of(name), entry, hidden)
        case "PATCH":
            changed = _expiry(_body(request), request.now)
            return StoredAnswer(_shown(find_cached(name, stored) | changed), path_of(name), changed)
        case "DELETE":
            find_cached(name, stored)
            return StoredAnswer({}, path_of(name), DELETED)
    if name.endswith("cachedContents"):
        return StoredAnswer({"cachedContents": [_shown(find_cached(path, stored)) for path in stored.names(FOLDER)]})
    return StoredAnswer(_shown(find_cached(name, stored)))


def _given_content(body: Fields) -> tuple[dict[str, Any], int]:
    """Return what is stored of a content in a body, and the number of images, audio and files in it.

    Raises `DialectError` for a content that no request could have in front.
    """
    for key in ("model", "displayName"):
        body.optional(key, Fields.label)
    model_call = decode_content(body.replaced(body.chosen(_CACHED)))
    return kept(body.chosen(_CACHED), _CACHED, camel_case_fields), model_call.hidden


def _body(request: StoredRequest) -> dict[str, Any]:
    return camel_case_fields(parse_object(request.body) if request.body else {})


def _expiry(body: dict[str, Any], now: int) -> dict[str, Any]:
    """Return `updateTime` and `expireTime`."""
    ttl = body.get("ttl")
    seconds = float(ttl[:-1]) if isinstance(ttl, str) and _SECONDS.fullmatch(ttl) else _LIFETIME
    expires = body.get("expireTime")
    return {
        "updateTime": _time(now),
        "expireTime": expires if isinstance(expires, str) and expires and is_word(expires) else _time(now + seconds),
    }


def _shown(cached: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in cached.items() if key not in (*FIRST, "contents")}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
