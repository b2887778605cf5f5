"""An engine without a model: vLLM's token-in/token-out protocol, with scripted replies.

It leads a program through a given conversation, and can fail on request. Contract tests compare its protocol with that
of a real vLLM (`tests/addons/engine/test_client.py`).
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web
from aiohttp.typedefs import Handler


@dataclass
class Say:
    """A reply of the tokens of `text`, and of the model's end-of-turn token if the finish reason is "stop"."""

    text: str
    finish_reason: str = "stop"
    hold_after: int | None = None
    """Number of tokens after which to wait for `release()`."""
    hold_end: bool = False
    """True to wait for `release()` between the last event and the end of the body."""
    break_after: int | None = None
    """Number of tokens after which to close the connection."""
    weight_version: str = "default"


@dataclass
class Answer:
    """A reply of a status and a body instead of tokens. With status 200 the body is an event of a stream."""

    status: int
    body: str


Reply = Say | Answer


class ScriptedEngine:
    """A context manager of an HTTP server in its own thread. It gives `replies` in order, then those of `otherwise`."""

    def __init__(self, tokenizer: Any, *, max_model_len: int = 8192, key: str | None = None, port: int = 0) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.port = port
        """Port to listen on. 0: a free one, which it has from then on."""
        self.key = key
        """If set, every path but /health requires it."""
        self.adapters: set[str] | None = None
        """Names of the loaded adapters. A generation for another name gets vLLM's 404. None: every name is one."""
        self.root = str(tokenizer.name_or_path)
        """Folder or name of the served model."""
        self.tokenize_status = 200
        self.weight_version: str | None = "default"
        """Name of the base weights as `/weight_info` tells it. None: the engine has no such route."""
        self.deaf = False
        """True to accept connections and requests from now on and say nothing, not even to /health."""
        self.asked: list[str] = []
        """Path of each request."""
        self.peers: set[Any] = set()
        """Address of the client of each connection."""
        self.replies: deque[Reply] = deque()
        self.otherwise: Callable[[dict[str, Any]], Reply] | None = None
        self.requests: list[dict[str, Any]] = []
        self.disconnected = threading.Event()
        """Set when a client disconnects during a generation."""
        self.holding = threading.Event()
        """Set while a generation waits for `release()`."""
        self.url = ""

    def __enter__(self) -> Self:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def release(self) -> None:
        """Let held generations continue."""
        self._loop.call_soon_threadsafe(self._released.set)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    async def _serve(self) -> None:
        self._loop, self._stop, self._released = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30, middlewares=[self._admit])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/inference/v1/generate", self._generate)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.transport is not None:
            self.peers.add(request.transport.get_extra_info("peername"))
        if self.deaf:
            await asyncio.Event().wait()  # until the client hangs up
        key = request.headers.get("authorization")
        if self.key is not None and request.path != "/health" and key != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "scripted", "object": "model", "root": self.root, "parent": None}
        return web.json_response({"object": "list", "data": [{**model, "max_model_len": self.max_model_len}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        answer = {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None}
        return web.json_response(answer if self.tokenize_status == 200 else {}, status=self.tokenize_status)

    async def _weight_info(self, request: web.Request) -> web.Response:
        status = 404 if self.weight_version is None else 200
        return web.json_response({"weight_version": self.weight_version}, status=status)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.adapters is not None and (name := body.get("model")) and name not in self.adapters:
            message = f"The model `{name}` does not exist. Valid aliases: scripted."
            error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
            return web.json_response({"error": error}, status=404)
        self.requests.append(body)
        reply = self.replies.popleft() if self.replies else self.otherwise(body) if self.otherwise else None
        if reply is None:
            reply = Answer(500, "the script is over")
        if isinstance(reply, Answer) and reply.status != 200:
            return web.Response(status=reply.status, text=reply.body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if isinstance(reply, Answer):
            await response.write(f"data: {reply.body}\n\ndata: [DONE]\n\n".encode())
            return response
        try:
            await self._say(request, response, reply)
        except asyncio.CancelledError:
            self.disconnected.set()
            raise
        return response

    async def _say(self, request: web.Request, response: web.StreamResponse, reply: Say) -> None:
        ids = self.ids(reply.text)
        if reply.finish_reason == "stop":
            ids.append(self.tokenizer.eos_token_id)
        for i, token_id in enumerate(ids):
            if i == reply.break_after:
                assert request.transport is not None
                request.transport.close()  # already written data is still delivered
                return
            if i == reply.hold_after:
                await self._hold()
            await response.write(_event(token_id, i, reply, len(ids)))
        await response.write(b"data: [DONE]\n\n")
        if reply.hold_end:
            await self._hold()

    async def _hold(self) -> None:
        self.holding.set()
        await self._released.wait()
        self.holding.clear()


def _event(token_id: int, index: int, reply: Say, length: int) -> bytes:
    last = index == length - 1
    logprob = -0.125 * (1 + index % 5)  # exact in float32
    choice = {
        "index": 0,
        "finish_reason": reply.finish_reason if last else None,
        "token_ids": [token_id],
        "weight_versions": [{"version": reply.weight_version, "start": 0, "end": length}] if last else None,
        "logprobs": {"content": [{"token_id": token_id, "logprob": logprob, "rank": 1, "top_logprobs": []}]},
        **dict.fromkeys(("stop_reason", "routed_experts", "sampling_mask")),
    }
    event = {"request_id": "scripted", "usage": None, "output_mode": "tokens", "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"
