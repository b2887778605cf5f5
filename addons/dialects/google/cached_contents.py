"""Cached contents of the Gemini API: what comes first in the requests that name it.

A cached content lasts as long as its session: an engine may be slower than the time to live that a program chose for
Google's. Errors are in the words of the API.
"""

import re
from datetime import UTC, datetime
from typing import Any

from rolltap.addons.dialects.fields import Fields, parse_object
from rolltap.addons.dialects.google.protobuf import WORDING, camel_case_fields
from rolltap.addons.dialects.stored import DELETED, Stored, StoredAnswer, StoredRequest
from rolltap.addons.dialects.types import DialectError

_PATH = re.compile(r"/(?:v1|v1beta|v1beta1)/(?P<name>(?:projects/[^/]+/locations/[^/]+/)?cachedContents(?:/[^/:]+)?)")
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?s")
_CONTENT = ("model", "displayName", "systemInstruction", "tools", "toolConfig", "contents")
_FIRST = ("systemInstruction", "tools", "toolConfig")
_LIFETIME = 3600
"""Seconds, unless the request has a `ttl` or an `expireTime`."""


def is_served(method: str, path: str) -> bool:
    """Return True for a request that `serve` answers."""
    match = _PATH.fullmatch(path)
    if match is None:
        return False
    return method in (("GET", "POST") if match["name"].endswith("cachedContents") else ("GET", "PATCH", "DELETE"))


def with_cached_content(request: Fields, model: str, stored: Stored) -> Fields:
    """Return a request with the cached content that it names in front. Raises `DialectError`."""
    name = request.text("cachedContent")
    cached = _find(name, stored)
    if any(request[key] is not None for key in _FIRST):
        raise DialectError(
            "CachedContent can not be used with GenerateContent request setting system_instruction, tools or "
            "tool_config. Proposed fix: move those values to CachedContent from GenerateContent request."
        )
    made_for = str(cached.get("model", "")).rpartition("/")[2]
    if made_for and made_for != model:
        raise DialectError("Model used by GenerateContent request and CachedContent has to be the same.")
    contents = [*_as_list(cached.get("contents")), *_as_list(request["contents"])]
    first = {key: cached[key] for key in _FIRST if key in cached}
    return request.replaced({**request.values, **first, "contents": contents})


def serve(request: StoredRequest, stored: Stored) -> StoredAnswer:
    """Answer a request to create, list, read, change or delete cached contents. Raises `DialectError`."""
    match = _PATH.fullmatch(request.target.partition("?")[0])
    if match is None or not is_served(request.method, match[0]):
        raise DialectError("This path is not a method of this API.", status=404)
    name = match["name"]
    match request.method:
        case "POST":
            name = f"{name}/{request.new_id}"
            content = Fields(_body(request), WORDING).chosen(_CONTENT)
            entry = {"name": name, **content, "createTime": _time(request.now), **_expiry(_body(request), request.now)}
            return StoredAnswer(_shown(entry), _key(name), entry)
        case "PATCH":
            changed = _expiry(_body(request), request.now)
            return StoredAnswer(_shown(_find(name, stored) | changed), _key(name), changed)
        case "DELETE":
            _find(name, stored)
            return StoredAnswer({}, _key(name), DELETED)
    if name.endswith("cachedContents"):
        keys = [key for key in stored.objects if key.startswith("/cachedContents/") and not stored.is_deleted(key)]
        return StoredAnswer({"cachedContents": [_shown(_find(key, stored)) for key in keys]})
    return StoredAnswer(_shown(_find(name, stored)))


def _find(name: str, stored: Stored) -> dict[str, Any]:
    """Return a cached content as its entries have made it. Raises `DialectError` for one that is unknown."""
    entries = stored.entries(_key(name))
    if entries is None:
        raise DialectError("CachedContent not found (or permission denied)", status=403)
    return {key: value for entry in entries for key, value in entry.items()}


def _key(name: str) -> str:
    """Return the path under which a cached content is stored. Its names have a project, or none."""
    return f"/cachedContents/{name.rpartition('/')[2]}"


def _body(request: StoredRequest) -> dict[str, Any]:
    return camel_case_fields(parse_object(request.body) if request.body else {})


def _expiry(body: dict[str, Any], now: int) -> dict[str, Any]:
    """Return `updateTime` and `expireTime`."""
    ttl = body.get("ttl")
    seconds = float(ttl[:-1]) if isinstance(ttl, str) and _SECONDS.fullmatch(ttl) else _LIFETIME
    expires = body.get("expireTime")
    return {
        "updateTime": _time(now),
        "expireTime": expires if isinstance(expires, str) and expires else _time(now + seconds),
    }


def _shown(cached: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in cached.items() if key not in (*_FIRST, "contents")}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _as_list(value: Any) -> list[Any]:
    """Return a repeated field, which may be a single message without a list."""
    return value if isinstance(value, list) else [] if value is None else [value]
