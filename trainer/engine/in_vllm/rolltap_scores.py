"""ASGI middleware of vLLM (`--middleware rolltap_scores.ScoresAlone`): scores are computed beside
no other call.

vLLM 0.32 and 0.33 with `--enable-lora` end, or write outside of a buffer, when they compute the
log-probabilities of a prompt (`prompt_logprobs`) in one batch with other calls. A request with the
header `HEADER` begins when the calls before it have ended, and calls that come after it wait for
its end. Each of vLLM's API server processes has a queue of its own: with data parallelism, start it
with `--api-server-count 1`.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

HEADER = "x-rolltap-alone"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_CALLS = ("/v1/", "/inference/")
"""Beginnings of the paths whose POST requests the engine computes."""
_OPERATION = "_lora_adapter"
"""End of the paths below `_CALLS` that load and unload adapters."""


class ScoresAlone:
    """Lets a request with the header run alone, and other calls beside each other, in the order of
    their arrival."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._turn = asyncio.Lock()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request: a call in its turn, and everything else at once."""
        if not _is_call(scope):
            await self._app(scope, receive, send)
            return
        async with self._turn:
            if any(name == HEADER.encode() for name, _ in scope["headers"]):
                await self._idle.wait()
                await self._app(scope, receive, send)
                return
            self._running += 1
            self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()


def _is_call(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path.startswith(_CALLS) and not path.endswith(_OPERATION)
