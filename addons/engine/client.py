"""vLLM client: sends token ids, receives token ids, log-probabilities and weight versions.

Uses vLLM's streaming `POST /inference/v1/generate` (vLLM 0.32 and newer, started with `--enable-scale-out`).
"""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp

from rolltap.addons.engine.events import Chunk, decode, encode, events
from rolltap.addons.engine.key import authorization, key_refused
from rolltap.addons.engine.served import TEXT, OwnModel
from rolltap.addons.engine.waiting import Shared
from rolltap.addons.errors import EngineError

logger = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
CONNECT_SECONDS = 10.0
LOOKUP_SECONDS = 10.0
"""Time limit of a question that vLLM's API server answers without the model. It answers during a weight update too."""
SILENCE_SECONDS = 10.0
"""Seconds without a byte of a generation after which the engine is asked for its health, as often as that passes. There
is no limit on a generation: its prefill may be long, or it may queue behind a weight update."""
HEALTH_SECONDS = 5.0
"""Time limit of one such question. It is asked twice, because the recorder itself may have stood still meanwhile: an
engine that says nothing is found out after 20 to 30 s."""
STREAM_INTERVAL = 8
"""Tokens of an event of the engine, after the first token. An event costs the recorder as much as its tokens do."""
KEEP_ALIVE_SECONDS = 4.0
"""Seconds for which an idle connection is kept for the next request. vLLM closes it after 5."""
END_SECONDS = 1.0
"""Time limit for the end of a response whose last event has arrived. Only then its connection is used again."""


class AdapterGone(EngineError):
    """The engine does not have the adapter that a request names."""


class Engine:
    """One vLLM server. Must be created inside the event loop that uses it.

    With `own`, it is asked at first contact, and again after `forget`, whether it serves that model. Until it has
    answered, and if it does not, every request raises `EngineError`.
    """

    def __init__(self, url: str, key: str | None = None, own: OwnModel | None = None) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._own = own
        self._session = aiohttp.ClientSession(
            headers=authorization(key),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, socket_factory=_socket_with_probes
            ),
        )
        self._max_model_len: int | None = None
        self._lookup = Shared(self._look_up)
        self._health = Shared(self._ask_health)
        self.model = ""

    async def close(self) -> None:
        """Close the connections. Running generations raise `EngineError`."""
        await asyncio.gather(self._lookup.close(), self._health.close())
        await self._session.close()

    async def max_model_len(self) -> int:
        """Return the engine's context window in tokens. Sets `model` to the served model's name. Cached.

        Raises `WrongModel` when it serves a model with another tokenizer, and `EngineError` when it does not answer in
        time, refuses the key, or its answer is not vLLM's.
        """
        if self._max_model_len is None:
            self._max_model_len = await self._lookup()
        return self._max_model_len

    def forget(self) -> None:
        """Ask for the context window and the model again, because another server may answer from now on."""
        self._max_model_len = None

    async def healthy(self) -> bool:
        """Return True when the engine answers `/health`, which vLLM does also while it is paused."""
        return await self._health()

    async def describe(self) -> dict[str, Any]:
        """Return the served model, the context window in tokens, and vLLM's version and configuration.

        The version and the configuration are None when the engine does not serve them. The configuration needs
        VLLM_SERVER_DEV_MODE=1. Raises `EngineError`.
        """
        max_model_len = await self.max_model_len()
        (_, version), (_, information) = await self._ask("/version"), await self._ask("/server_info")
        return {
            "model": self.model,
            "max_model_len": max_model_len,
            "vllm": version.get("version"),
            "configuration": information.get("vllm_config"),
        }

    async def _look_up(self) -> int:
        status, models = await self._ask("/v1/models")
        if advice := key_refused(self.url, status, self._key):
            raise EngineError(advice, status=502)
        try:
            base = next(m for m in models["data"] if not m.get("parent"))
            self.model, max_model_len = str(base["id"]), int(base["max_model_len"])
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            message = (
                f"{self.url}/v1/models did not return a model with max_model_len (status {status}, {error!r}): check "
                "that rolltap_engine is a vLLM server"
            )
            raise EngineError(message, status=502, retryable=status >= 500) from error
        if self._own is not None:
            await self._compare(self._own, str(base.get("root") or self.model))
        return max_model_len

    async def _compare(self, own: OwnModel, root: str) -> None:
        """Compare the engine's tokenizer with that of `own`. `root` is its folder or name as the engine has it."""
        status, answer = await self._ask("/tokenize", {"prompt": TEXT, "add_special_tokens": False})
        if "tokens" not in answer:
            message = (
                f"{self.url}/tokenize did not return the tokens of a text (status {status}), by which the engine's "
                "model is compared with rolltap_model: check that rolltap_engine is a vLLM server"
            )
            raise EngineError(message, status=502, retryable=status >= 500)
        own.require(self.url, root, answer["tokens"])
        if not own.is_named(root, self.model):
            logger.warning(
                "the engine at %s serves %s (as %s), not %s: their tokenizers agree; weights and chat templates were "
                "not compared",
                *(self.url, root, self.model, own.name),
            )

    async def _ask_health(self) -> bool:
        for _ in range(2):
            with suppress(aiohttp.ClientError, TimeoutError):
                timeout = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
                async with self._session.get(f"{self.url}/health", timeout=timeout, allow_redirects=False) as response:
                    return response.status < 500
        return False

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Get a path, or post a body to it. Return a status and a JSON object, empty for any other answer.

        Raises `EngineError` without an answer.
        """
        timeout, method = aiohttp.ClientTimeout(total=LOOKUP_SECONDS), "GET" if body is None else "POST"
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                status, text = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or f"no answer to {path} in {LOOKUP_SECONDS:g} s"
            raise EngineError(f"the engine at {self.url} cannot be reached: {why}", retryable=True) from error
        try:
            answer = json.loads(text) if status == 200 else {}
        except ValueError:
            answer = {}
        return status, answer if isinstance(answer, dict) else {}

    async def generate(self, token_ids: list[int], sampling: dict[str, Any], model: str | None) -> AsyncIterator[Chunk]:
        """Sample a completion of `token_ids`. Yields chunks as they arrive.

        `model` names a LoRA adapter, or is None for the base model. Closing the iterator cancels the generation. Raises
        `AdapterGone` when the engine does not have the adapter, and `EngineError` when the engine cannot be reached,
        refuses the request, violates the protocol, closes the stream without a finish reason, or is silent and not
        healthy.
        """
        body: dict[str, Any] = {"token_ids": token_ids, "stream": True, "stream_options": {"include_usage": True}}
        body["sampling_params"] = {**sampling, "logprobs": 0, "stream_interval": STREAM_INTERVAL}
        if model is not None:
            body["model"] = model
        finished = False
        if self._own is not None:
            await self.max_model_len()
        try:
            async with await self._headers(body) as response:
                if response.status != 200:
                    raise await self._refusal(response, model)
                watch = asyncio.create_task(self._watch(response.content))
                try:
                    async for data in events(response.content.iter_any()):
                        if data == b"[DONE]":
                            break
                        chunk = decode(self.url, data)
                        finished = finished or chunk.finish_reason is not None
                        yield chunk
                finally:
                    watch.cancel()
                async with asyncio.timeout(END_SECONDS):
                    await response.read()
        except (aiohttp.ClientError, TimeoutError, EngineError) as error:
            if finished:
                return  # all tokens have arrived: at most the usage is lost
            if isinstance(error, EngineError):
                raise
            message = f"the engine at {self.url} failed: {error or type(error).__name__}"
            raise EngineError(message, retryable=True) from error
        if not finished:
            message = f"the engine at {self.url} ended the generation without a finish reason"
            raise EngineError(message, status=502, retryable=True)

    async def _post(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        data, headers = encode(body), {"content-type": "application/json"}
        try:
            return await self._session.post(self.url + GENERATE, data=data, headers=headers, allow_redirects=False)
        except aiohttp.ServerDisconnectedError:
            # uvicorn closes a keep-alive connection after an internal error; no token has arrived, so retry once
            return await self._session.post(self.url + GENERATE, data=data, headers=headers, allow_redirects=False)

    async def _headers(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        """Send a generation. Return the response once its headers are there. Raises `EngineError` as `_watch` does."""
        try:
            async with asyncio.timeout(None) as limit:
                watch = asyncio.create_task(self._expire(limit))
                try:
                    return await self._post(body)
                finally:
                    watch.cancel()
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._silent() from None

    async def _expire(self, limit: asyncio.Timeout) -> None:
        """Let `limit` expire once the engine is not healthy."""
        while True:
            await asyncio.sleep(SILENCE_SECONDS)
            if not await self.healthy():
                return limit.reschedule(asyncio.get_running_loop().time())

    async def _watch(self, content: aiohttp.StreamReader) -> None:
        """Make the reader of `content` raise `EngineError` once nothing arrives and the engine is not healthy."""
        while True:
            seen = content.total_bytes
            await asyncio.sleep(SILENCE_SECONDS)
            if content.total_bytes == seen and not await self.healthy() and content.total_bytes == seen:
                return content.set_exception(self._silent())

    def _silent(self) -> EngineError:
        message = f"the engine at {self.url} says nothing: neither a token nor an answer to /health"
        return EngineError(message, retryable=True)

    async def _refusal(self, response: aiohttp.ClientResponse, model: str | None) -> EngineError:
        async with asyncio.timeout(LOOKUP_SECONDS):
            body = await response.read()
        text = body.decode("utf-8", "replace")[:500]
        if response.status == 404 and model is not None and _is_unknown(model, body):
            return AdapterGone(f"the engine at {self.url} answered 404: {text}", status=502, answered=True)
        if (status := response.status) == 401 and (advice := key_refused(self.url, status, self._key)):
            return EngineError(advice, status=502)
        hint = f"; {GENERATE} needs vLLM 0.32 or newer with --enable-scale-out" if status in (403, 404) else ""
        message = f"the engine at {self.url} answered {status}: {text}{hint}"
        return EngineError(
            message, status=status if status in (400, 413, 503) else 502, retryable=status >= 500, answered=True
        )


def _is_unknown(model: str, body: bytes) -> bool:
    """Return True for the answer to a name that the engine does not serve (vLLM 0.32, `_check_model`)."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(message, str) and f"`{model}` does not exist" in message


def _socket_with_probes(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that notices within 40 s that the engine's machine is gone, though nothing is sent on it."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        opened.setsockopt(socket.IPPROTO_TCP, option, value)
    return opened
