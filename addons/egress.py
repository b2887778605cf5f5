"""Addon: which other hosts a session may reach. Refusals are answered at once and recorded."""

import fnmatch
import logging
from collections.abc import Callable, Sequence

from mitmproxy import ctx, http
from mitmproxy.addonmanager import Loader

from rolltap.addons.capture import CAPTURED
from rolltap.addons.dialects.routes import looks_like_model_call, not_served
from rolltap.addons.sessions import SESSION, writable
from rolltap.addons.store.records import Event

logger = logging.getLogger(__name__)


class Egress:
    """Refuses every request that is neither a model call nor for an allowed host.

    The answer is 404, in the words of the model API that the request belongs to or else `{}`: every harness accepts
    that at once for its telemetry, settings and update checks, while a dropped connection costs some of them 20 s of
    retries. A request that looks like a model call is recorded as `uncaptured`, also when its host is allowed. Must
    come after `Capture`, which claims the model calls. `record` takes the events of refused requests.
    """

    def __init__(self, record: Callable[[Event], None]) -> None:
        self._record = record

    def load(self, loader: Loader) -> None:
        """Declare the option, and refuse tunnels that carry something else than HTTP."""
        loader.add_option(
            "rolltap_allow",
            Sequence[str],
            [],
            "Host that sessions may reach besides the model, for instance `pypi.org` or `*.pythonhosted.org`. "
            "May be given several times. All other hosts get 404.",
        )
        ctx.options.update(rawtcp=False)

    def request(self, flow: http.HTTPFlow) -> None:
        """Refuse what is not allowed."""
        if flow.response is not None or flow.metadata.get(CAPTURED):
            return
        # not pretty_host: the Host header is the harness's to choose and decides nothing about where the bytes go
        host = flow.request.host
        allowed = any(fnmatch.fnmatch(host.lower(), pattern.lower()) for pattern in ctx.options.rolltap_allow)
        if not allowed:
            # before anything that may fail: a request without a response goes to its host
            flow.response = http.Response.make(404, b"{}", {"content-type": "application/json"})
            flow.response.content = not_served(flow.request.method, flow.request.path, flow.request.headers)
        session_id = flow.metadata.get(SESSION)
        method, path = writable(flow.request.method), writable(flow.request.path.partition("?")[0])
        answer = "let through" if allowed else "refused"
        if looks_like_model_call(method, path):
            logger.warning("session %s: %s a model call that is not captured: %s %s", session_id, answer, host, path)
            self._record(Event("uncaptured", session_id, host, method, path, answer))
        elif not allowed:
            logger.info("session %s: refused %s %s%s", session_id, method, host, path)
            self._record(Event("refused", session_id, host, method, path))
