"""Which model API a request speaks, by its method and exact path."""

from collections.abc import Mapping
from dataclasses import dataclass

from rolltap.addons.dialects import chat, google, messages, responses
from rolltap.addons.dialects.dialect import Dialect, Operation

DIALECTS: list[Dialect] = [chat, google, messages, responses]


@dataclass(frozen=True, slots=True)
class Route:
    """A request that is served."""

    dialect: Dialect
    operation: Operation


def find_route(method: str, target: str, headers: Mapping[str, str]) -> Route | None:
    """Who answers a request to `target` (path and query), or None when it is not served.

    Several APIs list their models under one path. Clients of Anthropic's are known by a header that it demands.
    """
    path = target.partition("?")[0]
    for dialect in [messages, *DIALECTS] if "anthropic-version" in headers else DIALECTS:
        operation = dialect.operation(method, path)
        if operation is not None:
            return Route(dialect, operation)
    return None
