"""The doctor's scripted engine with what tests need: queued replies, failures, a key, adapters,
held tokens."""

import asyncio
import io
import json
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rolltap.trainer.doctor import scripted_engine


@dataclass
class Say(scripted_engine.Say):
    """A reply of tokens that can wait or break off."""

    hold_after: int | None = None
    """Number of tokens after which to wait for `release()`."""
    hold_end: bool = False
    """True to wait for `release()` between the last event and the end of the body."""
    break_after: int | None = None
    """Number of tokens after which to close the connection."""


@dataclass
class Answer:
    """A reply of a status and a body instead of tokens. With status 200 a text is an event of a
    stream."""

    status: int
    body: str | bytes
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> web.Response:
        """Return the status and the body as they are."""
        body = self.body.encode() if isinstance(self.body, str) else self.body
        return web.Response(status=self.status, body=io.BytesIO(body), headers=self.headers)


Reply = Say | Answer

PAUSED = {
    "message": "Generation is paused. Please retry after it resumes.",
    "type": "ServiceUnavailableError",
    "param": None,
    "code": 503,
}
"""The error of vLLM 0.33 for a request that arrives while it is paused."""


class ScriptedEngine(scripted_engine.ScriptedEngine):
    """It gives `replies` in order, then those of `otherwise`. With a `key`, every path but /health
    requires it."""

    def __init__(self, tokenizer, *, max_model_len=8192, key=None, port=0):
        super().__init__(tokenizer, max_model_len=max_model_len, port=port)
        self.key = key
        self.adapters: set[str] | None = None
        """Names of the loaded adapters. A generation for another name gets vLLM's 404. None: every
        name is one."""
        self.paused = False
        """True to refuse generations, as vLLM 0.33 does between `/pause?mode=wait` and `/resume`.
        """
        self.tokenize_status = 200
        self.weight_version: str | None = "default"
        """Name of the base weights as `/weight_info` tells it. None: the engine has no such route.
        """
        self.deaf = False
        """True to accept connections and requests from now on and say nothing, not even to /health.
        """
        self.answers: dict[str, Answer] = {}
        """Path -> what every request to it gets."""
        self.asked: list[str] = []
        """Path of each request."""
        self.peers: set[Any] = set()
        """Address of the client of each connection."""
        self.replies: deque[Reply] = deque()
        self.otherwise: Callable[[dict[str, Any]], Reply] | None = None
        self.disconnected = threading.Event()
        """Set when a client disconnects during a generation."""
        self.holding = threading.Event()
        """Set while a generation waits for `release()`."""
        self._held = 0

    def release(self):
        """Let held generations continue."""
        self.loop.call_soon_threadsafe(self._released.set)

    def ids(self, text) -> list[int]:
        """Return the token ids of `text`."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def application(self):
        self._released = asyncio.Event()
        app = super().application()
        app.router.add_get("/is_paused", self._is_paused)
        app.middlewares.append(self._admit)
        return app

    @web.middleware
    async def _admit(self, request, handler):
        self.asked.append(request.path)
        if request.transport is not None:
            self.peers.add(request.transport.get_extra_info("peername"))
        if self.deaf:
            await asyncio.Event().wait()  # until the client hangs up
        key = request.headers.get("authorization")
        if self.key is not None and request.path != "/health" and key != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if (answer := self.answers.get(request.path)) is not None:
            return answer.response()
        if request.path == "/tokenize" and self.tokenize_status != 200:
            return web.json_response({}, status=self.tokenize_status)
        return await handler(request)

    async def _is_paused(self, request):
        return web.json_response({"is_paused": self.paused})

    async def weight_info(self, request):
        status = 404 if self.weight_version is None else 200
        return web.json_response({"weight_version": self.weight_version}, status=status)

    async def generate(self, request):
        body = await request.json()
        if self.adapters is not None and (name := body.get("model")) and name not in self.adapters:
            message = f"The model `{name}` does not exist. Valid aliases: scripted."
            error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
            return web.json_response({"error": error}, status=404)
        if self.paused:
            reply = Answer(200, json.dumps({"error": PAUSED}))
        else:
            self.requests.append(body)
            reply = self._next(body)
        if isinstance(reply, Answer) and (reply.status != 200 or isinstance(reply.body, bytes)):
            return reply.response()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if isinstance(reply, Answer):
            with suppress(ConnectionError):  # it may be too long for the client
                await response.write(f"data: {reply.body}\n\ndata: [DONE]\n\n".encode())
            return response
        try:
            most = None if reply.break_after else body["sampling_params"]["max_tokens"]
            await self._say(request, response, reply, most)
        except asyncio.CancelledError:
            self.disconnected.set()
            raise
        return response

    def _next(self, body) -> Reply:
        if self.replies:
            return self.replies.popleft()
        reply = self.otherwise(body) if self.otherwise else None
        return reply or Answer(500, "the script is over")

    async def _say(self, request, response, reply, most):
        for i, event in enumerate(self.events(reply, most)):
            if i == reply.break_after:
                request.transport.close()  # already written data is still delivered
                return
            if i == reply.hold_after:
                await self._hold()
            await response.write(event)
        if reply.hold_end:
            await self._hold()

    async def _hold(self):
        self._held += 1
        self.holding.set()
        try:
            await self._released.wait()
        finally:  # of a client that hangs up, too
            self._held -= 1
            if not self._held:
                self.holding.clear()
