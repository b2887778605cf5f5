"""The client of vLLM: token ids in, token ids, log-probabilities and weight versions out.

The engine is not trusted: it may send any number of bytes, and quote the key.

Uses vLLM's streaming `POST /inference/v1/generate` (vLLM 0.32 and newer, started with
`--enable-scale-out`). A request is JSON, its response a stream of server-sent events.
"""

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson

from rolltap.addons.concurrency import Shared
from rolltap.addons.engine.key import authorization, key_refused
from rolltap.addons.engine.own_model import OwnModel, Served, WrongModel, look_up
from rolltap.addons.errors import EngineError
from rolltap.addons.store.records import VersionSpan

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 10.0
"""Seconds without a byte of a generation after which the engine is asked for its health, as often
as that passes. There is no limit on a generation: its prefill may be long, or it may queue behind a
weight update."""
HEALTH_SECONDS = 5.0
"""Time limit of one such question. It is asked twice, because the recorder itself may have stood
still meanwhile: an engine that says nothing is found out after 20 to 30 s."""
KEEP_ALIVE_SECONDS = 4.0
"""Seconds for which an idle connection is kept for the next request. vLLM closes it after 5."""
MOST_BYTES = 1 << 20
"""Maximum size of an event or an answer of an engine. A token takes 150 bytes: an event has 8 of
them, and more when vLLM joins those that nobody has read. Of JSON it is at most the number of
values that a request may have."""
GENERATE = "/inference/v1/generate"
ROUTED = "routed_experts_prompt_start"
"""Sampling parameter of the first token of the prompt whose experts are returned."""
STREAM_INTERVAL = 8
"""Tokens of an event of the engine, after the first token. An event costs the recorder as much as
its tokens do."""
AGAIN_SECONDS = 60.0
"""Seconds after which an engine that is in use is asked again what it serves: another one may have
its URL by then."""
PAUSED_SECONDS = 0.5
"""Seconds between the questions to a paused engine whether it is resumed."""
REFUSAL_SECONDS = 10.0
"""Time limit for the body of a refusal, whose headers have arrived."""
END_SECONDS = 1.0
"""Time limit for the end of a response whose last event has arrived. Only then its connection is
used again."""
MOST_ROUTED_BYTES = 1 << 30
"""Maximum size of an event with the experts of all tokens of a request: some 500 bytes for each."""
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError)
"""Errors of decoding an answer that is not vLLM's."""


class AdapterGone(EngineError):
    """The engine does not have the adapter that a request names."""


class EnginePaused(EngineError):
    """The engine refuses requests until it is resumed, because it gets new weights."""


@dataclass(slots=True)
class Chunk:
    """Newly sampled tokens. The chunk with the finish reason has the weight versions of the
    request's whole completion.

    A chunk may have no tokens: vLLM sends the usage in one of its own.
    """

    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probability of each of `token_ids`. Empty when the engine sent those of other
    tokens."""
    finish_reason: str | None = None
    stop: str | None = None
    """The stop text that ended the completion."""
    weight_versions: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int | None = None
    """Number of prompt tokens that came from the engine's prefix cache."""
    routed_experts: str | None = None
    """vLLM's, of the request's prompt and completion."""
    outage: str | None = None
    """A failure, after which the call waits for an engine."""


class Engine:
    """One vLLM server. Create it inside the event loop that uses it.

    With `own`, `served` raises `WrongModel` unless the engine serves that model. It is asked at
    first contact, after `forget`, and every `AGAIN_SECONDS` of use.
    """

    def __init__(self, url: str, key: str | None = None, own: OwnModel | None = None) -> None:
        self.url = url.rstrip("/")
        self.healthy = Shared(self._healthy)
        """Returns True when the engine answers `/health`, as vLLM does also while it is paused."""
        self.warning: str | None = None
        """Difference to `own` that the last answer showed and that refuses nothing."""
        self.resumed = Shared(self._resumed)
        """Returns when the engine is not paused, or does not say that it is: the next request finds
        out."""
        self._http = aiohttp.ClientSession(
            headers={"accept-encoding": "identity", **authorization(key)},
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, socket_factory=_socket_with_probes
            ),
        )
        self._key = key
        self._own = own
        self._look_up_once = Shared(self._look_up)
        self._served: Served | None = None
        self._asked_at = 0.0
        self._forgotten = False

    async def close(self) -> None:
        """Close the connections. Running requests raise `EngineError`."""
        await self.resumed.close()
        await self._look_up_once.close()
        await self.healthy.close()
        await self._http.close()

    async def served(self) -> Served:
        """Return what the engine serves.

        An engine that has answered before and now does not is taken to serve the same. Raises
        `WrongModel`, and `EngineError` when it does not answer and is not healthy, refuses the key,
        or its answer is not vLLM's.
        """
        now = asyncio.get_running_loop().time()
        if self._served is not None and now - self._asked_at <= AGAIN_SECONDS:
            return self._served
        try:
            return await self._look_up_once()
        except EngineError as error:
            if self._served is None or isinstance(error, WrongModel):
                raise
            self._asked_at = now  # a request finds out whether the engine is down
            return self._served

    def forget(self) -> None:
        """Ask again, because another server may answer from now on. An answer that is under way is
        not kept."""
        self._served = None
        self._forgotten = True

    async def describe(self) -> dict[str, Any]:
        """Return the served model, its context window in tokens, and vLLM's version and settings.

        The last two are None when they are not served: the settings need VLLM_SERVER_DEV_MODE=1.
        Raises `EngineError`.
        """
        served = await self.served()
        _, version = await self.ask("/version")
        _, information = await self.ask("/server_info")
        return {
            "model": served.model,
            "max_model_len": served.max_model_len,
            "vllm": version.get("version"),
            "configuration": information.get("vllm_config"),
        }

    async def ask(
        self,
        path: str,
        body: dict[str, Any] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Get a path, or post a body to it. Return a status and a JSON object, empty for any other
        answer. Raises `EngineError` without an answer, once the engine is not healthy."""
        method = "GET" if body is None else "POST"
        limit = aiohttp.ClientTimeout(SILENCE_SECONDS)
        while True:
            try:
                async with await self.request(method, path, json=body, timeout=limit) as response:
                    status = response.status
                    text = await self.read(response)
                break
            except (aiohttp.ClientError, TimeoutError) as error:
                # without an answer in time the request may be lost
                if not isinstance(error, TimeoutError) or not await self.healthy():
                    raise self.failed("cannot be reached", error) from error
        answer = None
        if status == 200:
            with suppress(ValueError):
                answer = orjson.loads(text)
        if not isinstance(answer, dict):
            answer = {}
        return status, answer

    async def request(self, method: str, path: str, **how: Any) -> aiohttp.ClientResponse:
        """Return a response, once its headers have arrived. Raises `EngineError` if it is
        compressed."""
        response = await self._http.request(method, self.url + path, allow_redirects=False, **how)
        if response.headers.get("content-encoding", "identity") != "identity":
            response.close()
            raise self.error("sent a compressed reply, which was not asked for")
        return response

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of a response. Raises `EngineError` for more than `MOST_BYTES`."""
        body = bytearray()
        async for received in response.content.iter_any():
            body += received
            self._require(len(body), MOST_BYTES)
        return bytes(body)

    async def events(
        self,
        response: aiohttp.ClientResponse,
        most: int,
        most_in_all: int,
    ) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event.

        Raises `EngineError` for a line of more than `most` bytes, and for more than `most_in_all`.
        """
        line = bytearray()
        total = 0
        async for received in response.content.iter_any():
            total += len(received)
            self._require(total, most_in_all)
            for part in received.splitlines(keepends=True):
                line += part
                self._require(len(line), most)
                if not line.endswith(b"\n"):
                    continue
                if line.startswith(b"data:"):
                    yield bytes(line[5:]).strip()
                line.clear()

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: dict[str, Any],
        model: str | None,
    ) -> AsyncIterator[Chunk]:
        """Sample a completion of `token_ids`. Yields chunks as they arrive.

        `model` names a LoRA adapter, or is None for the base model. Closing the iterator cancels
        the generation. Raises `AdapterGone`, `EnginePaused`, and `EngineError` when the engine
        cannot be reached, refuses the request, violates the protocol, ends the stream without a
        finish reason, or is silent and not healthy.
        """
        body: dict[str, Any] = {
            "token_ids": np.asarray(token_ids, np.int32),
            "stream": True,
            "stream_options": {"include_usage": True},
            "sampling_params": {**sampling, "logprobs": 0, "stream_interval": STREAM_INTERVAL},
        }
        if model is not None:
            body["model"] = model
        most = MOST_ROUTED_BYTES if ROUTED in sampling else MOST_BYTES
        most_in_all = most + 1024 * sampling["max_tokens"]
        finished = False
        try:
            async with await self._post(body) as response:
                watch = asyncio.create_task(self.watch(response.content))
                try:
                    async for data in self.events(response, most, most_in_all):
                        if data == b"[DONE]":
                            break
                        chunk = self._decode(data, body)
                        finished = finished or chunk.finish_reason is not None
                        yield chunk
                finally:
                    watch.cancel()
                async with asyncio.timeout(END_SECONDS):
                    await self.read(response)
        except (aiohttp.ClientError, TimeoutError, EngineError) as error:
            if finished:
                return  # all tokens have arrived: at most the usage is lost
            if isinstance(error, EngineError):
                raise
            raise self.failed("failed", error) from error
        if not finished:
            raise self.error("ended the generation without a finish reason", retryable=True)

    async def _post(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        """Return the response of a generation, once its headers have arrived."""
        how = {"data": encode(body), "headers": {"content-type": "application/json"}}
        async with asyncio.timeout(None) as limit:
            watch = asyncio.create_task(self.end_once_silent(limit))
            try:
                response = await self.request("POST", GENERATE, **how)
            except aiohttp.ServerDisconnectedError:
                # uvicorn closes a keep-alive connection after an internal error; no token has
                # arrived, so retry once
                response = await self.request("POST", GENERATE, **how)
            finally:
                watch.cancel()
        if response.status != 200:
            said = b""
            with suppress(TimeoutError):
                async with response, asyncio.timeout(REFUSAL_SECONDS):
                    said = await self.read(response)
            raise self._refusal(response.status, said, body)
        return response

    async def watch(self, content: aiohttp.StreamReader) -> None:
        """Make the reader of `content` raise `EngineError` once nothing arrives and the engine is
        not healthy."""
        while True:
            seen = content.total_bytes
            await asyncio.sleep(SILENCE_SECONDS)
            if seen != content.total_bytes or await self.healthy():
                continue
            if seen == content.total_bytes:
                return content.set_exception(self.silent())

    async def end_once_silent(self, limit: asyncio.Timeout) -> None:
        """End `limit` once the engine is not healthy."""
        while True:
            await asyncio.sleep(SILENCE_SECONDS)
            if not await self.healthy():
                return limit.reschedule(asyncio.get_running_loop().time())

    async def _healthy(self) -> bool:
        for _ in range(2):
            with suppress(aiohttp.ClientError, TimeoutError, EngineError):
                limit = aiohttp.ClientTimeout(HEALTH_SECONDS)
                async with await self.request("GET", "/health", timeout=limit) as response:
                    return response.status < 500
        return False

    async def _resumed(self) -> None:
        paused = True
        while paused:
            await asyncio.sleep(PAUSED_SECONDS)
            paused = False
            with suppress(EngineError):
                _, answer = await self.ask("/is_paused")
                paused = answer.get("is_paused") is True

    async def _look_up(self) -> Served:
        self._forgotten = False
        served, warning = await look_up(self.ask, self.url, self._key, self._own)
        if warning is not None and warning != self.warning:
            logger.warning("%s", warning)
        self.warning = warning
        if self._forgotten:
            return await self._look_up()
        self._served = served
        self._asked_at = asyncio.get_running_loop().time()
        return served

    def _decode(self, data: bytes, request: dict[str, Any]) -> Chunk:
        """Return the chunk of one event. Raises `EngineError` for an error and for an event that is
        not vLLM's."""
        try:
            event = orjson.loads(data)
            if "error" in event:
                status = event["error"].get("code")
                if type(status) is not int or not 400 <= status < 600:
                    status = 500
                raise self._refusal(status, data, request)
            return decode(event, request["sampling_params"].get("stop", ()))
        except _MALFORMED as error:
            raise self.error(f"sent an invalid event ({type(error).__name__})") from error

    def _refusal(self, status: int, said: bytes, request: dict[str, Any]) -> EngineError:
        """Return the error of a refused request. `said` may quote anything: only the names that we
        sent are kept."""
        model = request.get("model")
        if status == 404 and f"`{model}` does not exist".encode() in said:  # vLLM 0.32
            return AdapterGone(
                f"the engine at {self.url} has no adapter {model}",
                status=502,
                retryable=True,
                answered=True,
                for_harness=f"the engine at {self.url} does not have the weights of this session",
            )
        if status == 503 and b"Generation is paused" in said:
            # vLLM 0.33; in 0.32 the request waits
            message = f"the engine at {self.url} is paused"
            return EnginePaused(message, retryable=True, answered=True)
        advice = key_refused(self.url, status, self._key)
        if status == 401 and advice is not None:
            return EngineError(advice, status=502)
        words = {*re.findall(rb"\w+", said[:4096])}
        named = [name for name in request["sampling_params"] if name.encode() in words]
        message = f"answered {status}"
        if named:
            message += f" and named {', '.join(named)}"
        message += ": its log says why (--log-error-stack)"
        if status in (403, 404):
            message += f"; {GENERATE} needs vLLM 0.32 or newer with --enable-scale-out"
        shown = status if status in (400, 413, 503) else 502
        return self.error(message, status=shown, retryable=status >= 500, answered=True)

    def _require(self, num_bytes: int, most: int) -> None:
        if num_bytes > most:
            raise self.error(f"sent more than {most:,} bytes at once")

    def silent(self) -> EngineError:
        """Return the error of an engine that is not healthy."""
        words = "says nothing: neither a token nor an answer to /health"
        return self.error(words, status=503, retryable=True)

    def failed(self, why: str, error: Exception) -> EngineError:
        """Return the error of a failed connection. What aiohttp says of a reply quotes it, so it is
        left out. A time limit of ours ends an engine that is not healthy."""
        if type(error) is TimeoutError:
            return self.silent()
        words = str(error) if isinstance(error, OSError) else ""
        return self.error(f"{why}: {words or type(error).__name__}", status=503, retryable=True)

    def error(self, words: str, *, status: int = 502, **fields: Any) -> EngineError:
        """Return an `EngineError` of this engine, with these fields."""
        return EngineError(f"the engine at {self.url} {words}", status=status, **fields)


def encode(body: dict[str, Any]) -> bytes:
    """Return a request as JSON."""
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # a harness's schema may have integers over 64 bits
        return json.dumps(body, default=np.ndarray.tolist).encode()


def decode(event: dict[str, Any], stops: Sequence[str]) -> Chunk:
    """Return the chunk of one event, with a stop text of `stops` or none. Any error is that of an
    invalid event."""
    usage = event.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        _require_int32(cached)
    if not event["choices"]:
        return Chunk([], [], cached_tokens=cached)
    choice = event["choices"][0]
    token_ids = list(choice["token_ids"])
    _require_int32(*token_ids)
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    if [entry["token_id"] for entry in logprobs] != token_ids:
        logprobs = []  # of other tokens: `find_violation` marks the call for their number
    stop = choice.get("stop_reason")
    chunk = Chunk(
        token_ids=token_ids,
        logprobs=[float(entry["logprob"]) for entry in logprobs],
        finish_reason=choice["finish_reason"],
        stop=stop if stop in stops else None,
        cached_tokens=cached,
        routed_experts=choice.get("routed_experts"),
    )
    for each in choice.get("weight_versions") or ():
        _require_int32(each["start"], each["end"])
        span = VersionSpan(version=str(each["version"]), start=each["start"], end=each["end"])
        chunk.weight_versions.append(span)
    return chunk


def _require_int32(*values: Any) -> None:
    """Raise `ValueError` for a value that no column of the run takes as a token id or a count."""
    for value in values:
        if type(value) is not int or not 0 <= value < 2**31:
            raise ValueError("no int32")


def _socket_with_probes(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that notices within 40 s that the engine's machine is gone, though nothing is
    sent on it."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return opened
