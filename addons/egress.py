"""Addon: egress filter. Denies by default: only the endpoint and the hosts of `rolltap_allow` can be reached."""

import fnmatch
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from mitmproxy import ctx, http
from mitmproxy.addonmanager import Loader
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from rolltap.addons.capture import CAPTURED
from rolltap.addons.dialects.routes import looks_like_model_call, not_served
from rolltap.addons.sessions import SESSION, writable
from rolltap.addons.store.records import Event

logger = logging.getLogger(__name__)

Decision = Literal["served", "allowed", "refused"]


def decide(host: str, *, served: bool, allow: Sequence[str]) -> Decision:
    """Return `served` when the target is the endpoint, `allowed` when `host` matches a pattern, else `refused`.

    `served` is True for the endpoint. `allow` are `fnmatch` patterns, matched without case. `host` must be the host
    that mitmproxy connects to: the harness can put anything into the Host header.
    """
    if served:
        return "served"
    return "allowed" if any(fnmatch.fnmatch(host.lower(), pattern.lower()) for pattern in allow) else "refused"


class Egress:
    """Refuses requests and connections that are neither for the endpoint nor for an allowed host.

    A refused request gets 404, with the error body of the model API that it seems to belong to, or `{}`. The tested
    harnesses accept a 404 to telemetry, settings and update checks; after a dropped connection some retry for 20 s. A
    request that looks like a model call is recorded as `uncaptured`, also when its host is allowed.

    `server_connect` checks the host again before a connection is opened. This stops requests that no addon answered
    because a hook raised.

    Must come after `Capture`, which marks the model calls. `record` writes an event; `is_endpoint` returns True for the
    endpoint's host and port.
    """

    def __init__(self, record: Callable[[Event], None], is_endpoint: Callable[[str, int], bool]) -> None:
        self._record = record
        self._is_endpoint = is_endpoint

    def load(self, loader: Loader) -> None:
        """Declare the option, and make mitmproxy answer CONNECT and TLS without connecting to the host first."""
        text = (
            "Host that sessions may reach: a name or a pattern, for instance `pypi.org` or `*.pythonhosted.org`. "
            "Repeat the option for more hosts. Model calls to any host are answered by the recorder and never reach "
            "their host. Other requests to other hosts get 404."
        )
        loader.add_option("rolltap_allow", Sequence[str], [], text)
        ctx.options.update(connection_strategy="lazy", upstream_cert=False, rawtcp=False)

    def request(self, flow: http.HTTPFlow) -> None:
        """Answer a refused request with 404, and record it."""
        host = flow.request.host
        decision = decide(host, served=bool(flow.metadata.get(CAPTURED)), allow=ctx.options.rolltap_allow)
        if flow.response is not None or decision == "served":
            return
        if decision == "refused":
            flow.response = http.Response.make(404, b"{}", {"content-type": "application/json"})
            flow.response.content = not_served(flow.request.method, flow.request.path, flow.request.headers)
        session_id = flow.metadata.get(SESSION)
        method, path = writable(flow.request.method), writable(flow.request.path.partition("?")[0])
        if looks_like_model_call(method, path):
            answer = "refused" if decision == "refused" else "let through"
            logger.warning("session %s: %s an unrecorded model call: %s %s", session_id, answer, host, path)
            self._record(
                Event(kind="uncaptured", session_id=session_id, host=host, method=method, path=path, detail=answer)
            )
        elif decision == "refused":
            logger.info("session %s: refused %s %s%s", session_id, method, host, path)
            self._record(Event(kind="refused", session_id=session_id, host=host, method=method, path=path))

    def server_connect(self, data: ServerConnectionHookData) -> None:
        """Refuse a connection that is not allowed. The refusal is set first, so that it stays when this hook raises."""
        error, data.server.error = data.server.error, "the recorder does not let sessions connect to this host"
        assert data.server.address is not None
        host, port, *_ = data.server.address
        if decide(host, served=self._is_endpoint(host, port), allow=ctx.options.rolltap_allow) != "refused":
            data.server.error = error
        else:
            logger.warning("refused to connect to %s:%d for a request that no addon answered", host, port)
            self._record(Event(kind="refused", host=host))
