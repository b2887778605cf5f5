"""Routing of requests about what is stored: `/v1/conversations`, and earlier responses."""

import re

from rolltap.addons.dialects.openai_responses.conversations import serve_conversation
from rolltap.addons.dialects.openai_responses.earlier import serve_response
from rolltap.addons.dialects.stored import Stored, StoredAnswer, StoredRequest
from rolltap.addons.dialects.types import DialectError

_PATH = re.compile(
    r"/v1/(?:responses/(?P<response>resp_[^/]+)"
    r"|conversations(?:/(?P<conversation>conv_[^/]+)(?P<items>/items(?:/(?P<item>[^/]+))?)?)?)"
)


def is_served(method: str, path: str) -> bool:
    """Return True for a request that `serve` answers."""
    match = _PATH.fullmatch(path)
    if match is None:
        return False
    if match["response"] or match["item"]:
        return method in ("GET", "DELETE")
    if match["items"]:
        return method in ("GET", "POST")
    return method == "POST" or (match["conversation"] is not None and method in ("GET", "DELETE"))


def serve(request: StoredRequest, stored: Stored) -> StoredAnswer:
    """Answer a request. Raises `DialectError`."""
    match = _PATH.fullmatch(request.target.partition("?")[0])
    if match is None or not is_served(request.method, match[0]):
        raise DialectError("This path is not served here.", status=404, code="not_found")
    if match["response"]:
        return serve_response(request, match["response"], stored)
    return serve_conversation(request, match["conversation"], bool(match["items"]), match["item"], stored)
