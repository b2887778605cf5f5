"""Which model API a request speaks, by its method and exact path."""

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
"""How the paths of the known model APIs end, those that are served and those that are not."""

Service = Literal[Operation, "websocket"]
"""A request's operation; `websocket` opens a connection that speaks the Responses API."""


@dataclass(frozen=True, slots=True)
class Route:
    """A request that is served."""

    dialect: Dialect
    service: Service

    def __str__(self) -> str:
        return f"{self.dialect.NAME} {self.service}"


ROUTES = {str(route): route for dialect in DIALECTS for route in (Route(dialect, s) for s in get_args(Service))}
"""Every pair of an API and a service by its text, for who is told of a route in a header."""


def find_route(method: str, target: str, headers: Mapping[str, str]) -> Route | None:
    """The API and the operation of a request to `target` (path and query), or None when it is not served.

    Several APIs list their models under one path. Clients of Anthropic's are known by a header that it demands.
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
    """Whether a request that is not served probably asks a model for a reply, in an API or version unknown here."""
    return method == "POST" and _SAMPLES.search(target.partition("?")[0]) is not None


def not_served(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """The body of a 404 in the words of the API that the request seems to be of, or an empty JSON object."""
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
