"""Addon: what may leave. Closed by default: a connection that nothing here permits is not opened."""

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
    """Whether `host` may be connected to. `served` says that it is the endpoint; `allow` are patterns of host names.

    The host is where the bytes go. The Host header is the harness's to choose and decides nothing.
    """
    if served:
        return "served"
    return "allowed" if any(fnmatch.fnmatch(host.lower(), pattern.lower()) for pattern in allow) else "refused"


class Egress:
    """Refuses every request and every connection that is neither for the endpoint nor for an allowed host.

    A request is answered with 404, in the words of the model API that it belongs to or else `{}`: every harness accepts
    that at once for its telemetry, settings and update checks, while a dropped connection costs some of them 20 s of
    retries. A request that looks like a model call is recorded as `uncaptured`, also when its host is allowed. Before a
    connection is opened its host is decided on again: a request that no addon answered, because one failed, ends there.

    Must come after `Capture`, which claims the model calls. `record` takes the events of refused requests;
    `is_endpoint` says whether a host and a port are the endpoint's.
    """

    def __init__(self, record: Callable[[Event], None], is_endpoint: Callable[[str, int], bool]) -> None:
        self._record = record
        self._is_endpoint = is_endpoint

    def load(self, loader: Loader) -> None:
        """Declare the option, and have mitmproxy answer a tunnel, and its TLS, without connecting to the host first."""
        text = (
            "Host that sessions may reach besides the model, for instance `pypi.org` or `*.pythonhosted.org`. "
            "May be given several times. All other hosts get 404."
        )
        loader.add_option("rolltap_allow", Sequence[str], [], text)
        ctx.options.update(connection_strategy="lazy", upstream_cert=False, rawtcp=False)

    def request(self, flow: http.HTTPFlow) -> None:
        """Refuse what is not allowed."""
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
            logger.warning("session %s: %s a model call that is not captured: %s %s", session_id, answer, host, path)
            self._record(
                Event(kind="uncaptured", session_id=session_id, host=host, method=method, path=path, detail=answer)
            )
        elif decision == "refused":
            logger.info("session %s: refused %s %s%s", session_id, method, host, path)
            self._record(Event(kind="refused", session_id=session_id, host=host, method=method, path=path))

    def server_connect(self, data: ServerConnectionHookData) -> None:
        """Refuse to open a connection that is not permitted, also when this hook fails."""
        error, data.server.error = data.server.error, "the recorder does not let sessions connect to this host"
        assert data.server.address is not None
        host, port, *_ = data.server.address
        if decide(host, served=self._is_endpoint(host, port), allow=ctx.options.rolltap_allow) != "refused":
            data.server.error = error
        else:
            logger.warning("refused to connect to %s:%d for a request that nothing answered", host, port)
            self._record(Event(kind="refused", host=host))
