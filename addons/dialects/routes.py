"""Routing: method, path and headers of a request to a model API and its operation."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rolltap.addons.dialects import anthropic, google, openai_chat, openai_responses
from rolltap.addons.dialects.dialect import Dialect, Operation
from rolltap.addons.dialects.types import DialectError

DIALECTS: list[Dialect] = [openai_chat, google, anthropic, openai_responses]

_SAMPLES = re.compile(
    r"[/:](complete|completions|responses|messages|converse|invoke|predict|(stream)?generate)[a-z-]*$", re.I
)
"""Path endings of model APIs, including APIs that are not served here."""

Service = Literal[Operation, "websocket"]
"""A request's operation; `websocket` opens a connection that speaks the Responses API."""


@dataclass(frozen=True, slots=True)
class Route:
    """An API and the service that a request asks of it."""

    dialect: Dialect
    service: Service

    def __str__(self) -> str:
        return f"{self.dialect.NAME} {self.service}"


ROUTES = {str(route): route for dialect in DIALECTS for route in (Route(dialect, s) for s in get_args(Service))}
"""Route by its text, which the endpoint receives in a header. Holds every pair of an API and a service."""


def find_route(method: str, target: str, headers: Mapping[str, str]) -> Route | None:
    """Return the route of a request to `target` (path and query), or None when it is not served.

    `headers` are looked up in lower case. OpenAI and Anthropic list models under the same path: the header
    `anthropic-version`, which Anthropic's API requires, selects Anthropic.
    """
    path = target.partition("?")[0]
    if headers.get("upgrade", "").lower() == "websocket" and openai_responses.operation("POST", path) == "generate":
        return Route(openai_responses, "websocket")
    for dialect in [anthropic, *DIALECTS] if "anthropic-version" in headers else DIALECTS:
        operation = dialect.operation(method, path)
        if operation is not None:
            return Route(dialect, operation)
    return None


def looks_like_model_call(method: str, target: str) -> bool:
    """Return True when a request that is not served is probably a model call of another API or version.

    A heuristic: a POST whose path ends like those of known model APIs.
    """
    return method == "POST" and _SAMPLES.search(target.partition("?")[0]) is not None


def not_served(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """Return the body of a 404 in the format of the API that the request resembles, else an empty JSON object."""
    path = target.partition("?")[0]
    if "anthropic-version" in headers:
        dialect: Dialect = anthropic
    elif path.startswith("/v1beta"):
        dialect = google
    elif path.startswith("/v1/"):
        dialect = openai_chat
    else:
        return b"{}"
    return dialect.encode_error(DialectError(f"{method} {path} is not served here.", status=404, code="not_found"))
