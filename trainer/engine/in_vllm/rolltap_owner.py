"""ASGI middleware of vLLM (`--middleware rolltap_owner.OneOwner`): the register of the training
that owns the engine.

`/rolltap/owner` answers in JSON. `GET` returns the owner. `PUT` of `owner`, `about` and `steal`
takes the engine: 409 with the present owner when another one has it, unless `steal` is true.
`DELETE` of `owner` gives the engine back: 409 when another one has it. A `PUT` with `base` also
notes the folder as which an owner has verified the engine's own model; this note and `about` stay
when the engine is given back. The register is in memory, as the published weights are: both end
with the engine. Each of vLLM's API server processes has its own: with data parallelism, start it
with `--api-server-count 1`.

vLLM wraps later middleware around earlier one, so `rolltap_key.RequireKey` must come after this
one.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

PATH = "/rolltap/owner"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class OneOwner:
    """Keeps one owner, an identifier and a text about it for people, and the folder of the verified
    base model."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._owner: str | None = None
        self._about: str | None = None
        self._base: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for the register, and pass on everything else."""
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        status = self._answer(scope["method"], await _body(receive))
        text = json.dumps({"owner": self._owner, "about": self._about, "base": self._base}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(text)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    def _answer(self, method: str, body: bytes) -> int:
        """Change the register as a request asks, and return the status."""
        if method == "GET":
            return 200
        if method not in ("PUT", "DELETE"):
            return 405
        try:
            asked = json.loads(body)
            owner = asked["owner"]
            about = asked.get("about", "")
            steal = asked.get("steal", False)
            base = asked.get("base", self._base)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return 400
        are_texts = isinstance(owner, str) and isinstance(about, str)
        if not (owner and are_texts and isinstance(steal, bool) and isinstance(base, str | None)):
            return 400
        is_others = self._owner not in (None, owner)
        if method == "PUT":
            if is_others and not steal:
                return 409
            self._owner = owner
            self._about = about
            self._base = base
        else:
            if is_others:
                return 409
            self._owner = None
        return 200


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
