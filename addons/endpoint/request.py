"""The part of a harness's request that its session records and judges.

vLLM's sampling parameters of one call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rolltap.addons.dialects.model_call import ModelCall
from rolltap.addons.store.rows import printable

SECRET_HEADER = "x-rolltap-secret"
SESSION_HEADER = "x-rolltap-session"
HOST_HEADER = "x-rolltap-host"
ROUTE_HEADER = "x-rolltap-route"
PREFIX_HEADER = "x-rolltap-prefix"
END = "end"
"""Value of `ROUTE_HEADER` for a request that ends its session."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request of a session, without its body.

    `host`, `method` and `path` are recorded, so they are printable and cut.
    """

    session_id: str
    host: str
    """The host that the harness asked."""
    method: str
    path: str
    """The path that the harness asked."""
    target: str
    """Path and query without the prefix of the route."""
    headers: Mapping[str, str]
    """Looked up without case."""


def asked_path(request: web.Request) -> str:
    """Return the path that the harness asked, prefix and all."""
    return printable(request.headers.get(PREFIX_HEADER, "") + request.path)


def client_request(request: web.Request) -> ClientRequest:
    """Return a request without its body."""
    headers = request.headers
    return ClientRequest(
        session_id=headers[SESSION_HEADER],
        host=printable(headers[HOST_HEADER]),
        method=printable(request.method),
        path=asked_path(request),
        target=request.raw_path,
        headers=headers,
    )


def parameters(
    sampling: Mapping[str, Any], stop_token_ids: Sequence[int], model_call: ModelCall, max_new_tokens: int
) -> dict[str, Any]:
    """Return vLLM's sampling parameters: the run's, and the harness's token limit, stop texts and grammar.

    `max_new_tokens` is the room that the prompt leaves in the context window.
    """
    own_limit = sampling.get("max_tokens", max_new_tokens)
    found = {
        **sampling,
        "max_tokens": min(model_call.max_tokens or max_new_tokens, max_new_tokens, own_limit),
        "stop_token_ids": stop_token_ids,
    }
    if model_call.stop:
        found["stop"] = model_call.stop
    if model_call.grammar is not None:
        found["structured_outputs"] = {"json": model_call.grammar} if model_call.grammar else {"json_object": True}
    return found
