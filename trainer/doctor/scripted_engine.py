"""An engine without a model: vLLM's token-in/token-out protocol, with scripted replies.

It leads a program through a given conversation. Contract tests compare its protocol with that of a
real vLLM.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web


@dataclass
class Say:
    """A reply of the tokens of `text`, and of the model's end-of-turn token if the finish reason is
    "stop"."""

    text: str
    finish_reason: str = "stop"
    weight_version: str = "default"


class ScriptedEngine:
    """A context manager of an HTTP server in its own thread, on a free port unless `port` names
    one.

    `otherwise` makes the reply to the body of a generation, and `requests` has all bodies. `root`
    is the served model. Entering raises `OSError` for a port that is taken.
    """

    def __init__(self, tokenizer: Any, *, max_model_len: int = 8192, port: int = 0) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.port = port
        self.root = str(tokenizer.name_or_path)
        self.otherwise: Callable[[dict[str, Any]], Say] | None = None
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    def __enter__(self) -> Self:
        self._listening: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._listening.result()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def application(self) -> web.Application:
        """Return the routes. Called in the server's thread."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_post("/inference/v1/generate", self.generate)
        return app

    async def weight_info(self, request: web.Request) -> web.Response:
        """Name the version of the base weights."""
        return web.json_response({"weight_version": "default"})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream the tokens of the reply."""
        body = await request.json()
        self.requests.append(body)
        if self.otherwise is None:
            return web.Response(status=500, text="the script is over")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events(self.otherwise(body), body["sampling_params"]["max_tokens"]):
            await response.write(event)
        return response

    def events(self, reply: Say, max_tokens: int | None = None) -> Iterator[bytes]:
        """Yield an event for each token of a reply, which ends at `max_tokens`, and `[DONE]`."""
        ids = self.tokenizer.encode(reply.text, add_special_tokens=False)
        if reply.finish_reason == "stop":
            ids.append(self.tokenizer.eos_token_id)
        finish_reason = reply.finish_reason
        if max_tokens and len(ids) > max_tokens:
            finish_reason = "length"
        ids = ids[:max_tokens]
        span = {"version": reply.weight_version, "start": 0, "end": len(ids)}
        for i, token_id in enumerate(ids):
            logprob = -0.125 * (1 + i % 5)  # exact in float32
            scored = {
                "token_id": token_id,
                "logprob": logprob,
                "rank": 1,
                "top_logprobs": [],
            }
            choice: dict[str, Any] = {
                "index": 0,
                "finish_reason": None,
                "token_ids": [token_id],
                "weight_versions": None,
                "logprobs": {"content": [scored]},
                "stop_reason": None,
                "routed_experts": None,
                "sampling_mask": None,
            }
            if i == len(ids) - 1:
                choice["finish_reason"] = finish_reason
                choice["weight_versions"] = [span]
            event = {
                "request_id": "scripted",
                "usage": None,
                "output_mode": "tokens",
                "choices": [choice],
            }
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        runner = web.AppRunner(self.application(), handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        try:
            await site.start()
            self.port = runner.addresses[0][1]
            self.url = f"http://127.0.0.1:{self.port}"
            self._listening.set_result(None)
            await self._stop.wait()
        except OSError as error:
            self._listening.set_exception(error)
        finally:
            server = runner.server
            assert server is not None
            await runner.cleanup()
            for _ in range(
                3,
            ):  # a connection may have been accepted, and come after the others were closed
                await asyncio.sleep(0)
            await server.shutdown(0)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": "scripted",
            "object": "model",
            "root": self.root,
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        answer = {
            "count": len(ids),
            "max_model_len": self.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        return web.json_response(answer)

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"prompt": self.tokenizer.decode(body["tokens"])})
