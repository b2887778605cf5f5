"""ASGI middleware of vLLM (`--middleware rolltap_key.RequireKey`) that asks for the engine's key on
every route.

vLLM's own `--api-key` guards only paths that begin with /v1, /v2, /inference and /cohere (vLLM
0.32), and not those that pause the engine, load weights or run methods of its workers.
"""

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

DIGEST = "ROLLTAP_ENGINE_KEY_SHA256"
"""Environment variable with the SHA-256 digest of the key, in hexadecimal. Processes of the same
user can read it, and cannot derive the key from it."""
HEALTH = "/health"
"""The path that needs no key."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequireKey:
    """Answers 401 to requests, and closes WebSockets, whose `Authorization` is not `Bearer KEY`."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._digest = os.environ[DIGEST].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request with the key, and what is no request."""
        if scope["type"] == "lifespan" or scope["path"] == HEALTH or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send(
                {"type": "http.response.body", "body": b'{"error": "this engine requires its key"}'}
            )

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or given[0][:7].lower() != b"bearer ":
            return False
        return hmac.compare_digest(hashlib.sha256(given[0][7:]).hexdigest().encode(), self._digest)
