"""Requests that are not served and look like model calls: how they are recognised, answered, and what they need."""

import re
from collections.abc import Mapping
from difflib import get_close_matches

from rolltap.addons.dialects import anthropic, google, openai_chat
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.routes import ANY_PREFIX, find_route
from rolltap.addons.dialects.types import DialectError

_SAMPLES = re.compile(
    r"[/:](complete|completions|responses|messages|converse|invoke|(stream)?(raw)?predict|(stream|batch)?generate)"
    r"[a-z-]*$|/(api|v\d+)/chat$|/(batches|language-model)$",
    re.I,
)
"""Path endings of model APIs, including APIs that are not served here, and of batches of calls."""

_PATHS = {path.removeprefix("/v1/"): path for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages")}
"""End of a path that asks for a reply -> the path."""
_ALIKE = 0.85
"""Similarity of a mistyped path, of `difflib`: one letter that is wrong, missing or too much."""
_LONGEST = 100
"""Characters of a path that may be a mistyped one."""


def looks_like_model_call(method: str, target: str) -> bool:
    """Return True when a request that is not served is probably a model call of another API or version.

    A heuristic: a POST whose path ends like those of known model APIs.
    """
    return method == "POST" and _SAMPLES.search(target.partition("?")[0]) is not None


def advice(method: str, target: str) -> str:
    """Return what would make a request that is not served a model call, or "" when it is probably none.

    Either its API is behind a prefix that is not known, or its path is mistyped.
    """
    if method != "POST":
        return ""
    route = find_route(method, target, {}, ANY_PREFIX)
    if route is not None and route.prefix.lower() != "/v1":  # a base URL with `/v1` for a client that adds its own
        return f"set rolltap_prefix={route.prefix} to answer it"
    path = target.partition("?")[0]
    folders = [folder for folder in path[-_LONGEST:].lower().split("/") if folder] if len(path) <= _LONGEST else []
    for end in ("/".join(folders[-2:]), "/".join(folders[-1:])):
        for meant in get_close_matches(end, _PATHS, 1, _ALIKE):
            return f"did you mean {_PATHS[meant]}?"
    return ""


def not_served(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """Return the body of a 404 in the format of the API that the request resembles, else an empty JSON object."""
    path, wanted = target.partition("?")[0], advice(method, target)
    route = find_route(method, target, headers, ANY_PREFIX)
    if route is not None:
        dialect: Dialect = route.dialect
    elif "anthropic-version" in headers:
        dialect = anthropic
    elif path.startswith("/v1beta"):
        dialect = google
    elif path.startswith("/v1/") or wanted:
        dialect = openai_chat
    else:
        return b"{}"
    why = f"{method} {path} is not served here{f': {wanted}' if wanted else '.'}"
    return dialect.encode_error(DialectError(why, status=404, code="not_found"))
