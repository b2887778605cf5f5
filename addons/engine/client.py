"""vLLM client: sends token ids, receives token ids, log-probabilities and weight versions.

Uses vLLM's streaming `POST /inference/v1/generate` (vLLM 0.32 and newer, started with `--enable-scale-out`). A request
is JSON, its response a stream of server-sent events.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import orjson

from rolltap.addons.engine import connections
from rolltap.addons.engine.connections import Connections
from rolltap.addons.engine.key import key_refused
from rolltap.addons.engine.lookup import Lookup, OwnModel
from rolltap.addons.errors import EngineError
from rolltap.addons.store.records import VersionSpan

GENERATE = "/inference/v1/generate"
ROUTED = "routed_experts_prompt_start"
"""Sampling parameter of the first token of the prompt whose experts are returned."""
REFUSAL_SECONDS = 10.0
"""Time limit for the body of a refusal, whose headers have arrived."""
STREAM_INTERVAL = 8
"""Tokens of an event of the engine, after the first token. An event costs the recorder as much as its tokens do."""
END_SECONDS = 1.0
"""Time limit for the end of a response whose last event has arrived. Only then its connection is used again."""


class AdapterGone(EngineError):
    """The engine does not have the adapter that a request names."""


class EnginePaused(EngineError):
    """The engine refuses requests until it is resumed, because it gets new weights."""


@dataclass(slots=True)
class Chunk:
    """Newly sampled tokens. The chunk with the finish reason has the weight versions of the request's whole completion.

    A chunk may have no tokens: vLLM sends the usage in one of its own.
    """

    token_ids: list[int]
    logprobs: list[float]
    """Natural-log probability of each of `token_ids`, or empty when the engine sent those of other tokens."""
    finish_reason: str | None = None
    stop: str | None = None
    """The stop text that ended the completion."""
    weight_versions: list[VersionSpan] | None = None
    cached_tokens: int | None = None
    """Number of prompt tokens that came from the engine's prefix cache."""
    routed_experts: str | None = None
    """vLLM's, of the request's prompt and completion."""
    outage: str | None = None
    """A failure, after which the call waits for an engine."""


class Engine:
    """One vLLM server. Must be created inside the event loop that uses it.

    With `own`, it is asked at first contact, after `forget`, and every `lookup.AGAIN_SECONDS` of use, whether it serves
    that model. Until it has answered, and if it does not, every request raises `EngineError`.
    """

    def __init__(self, url: str, key: str | None = None, own: OwnModel | None = None) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._compared = own is not None
        self._connections = Connections(self.url, key)
        self.lookup = Lookup(self._connections, key, own)
        self.healthy = self._connections.healthy
        self.resumed = self._connections.resumed
        self.forget = self.lookup.forget

    async def close(self) -> None:
        """Close the connections. Running generations raise `EngineError`."""
        await self.lookup.close()
        await self._connections.close()

    async def max_model_len(self) -> int:
        """Return the engine's context window in tokens. Raises as `Lookup.served`."""
        return (await self.lookup.served()).max_model_len

    async def weight_version(self) -> str | None:
        """Return the name that the base weights had at the last look-up, or None. Raises as `Lookup.served`."""
        return (await self.lookup.served()).weight_version

    async def describe(self) -> dict[str, Any]:
        """Return the served model, the context window in tokens, and vLLM's version and configuration.

        These are None when they are not served: the configuration needs VLLM_SERVER_DEV_MODE=1. Raises `EngineError`.
        """
        max_model_len = await self.max_model_len()
        _, version = await self._connections.ask("/version")
        _, information = await self._connections.ask("/server_info")
        return {
            "model": self.lookup.model,
            "max_model_len": max_model_len,
            "vllm": version.get("version"),
            "configuration": information.get("vllm_config"),
        }

    async def generate(self, token_ids: list[int], sampling: dict[str, Any], model: str | None) -> AsyncIterator[Chunk]:
        """Sample a completion of `token_ids`. Yields chunks as they arrive.

        `model` names a LoRA adapter, or is None for the base model. Closing the iterator cancels the generation. Raises
        `AdapterGone`, `EnginePaused`, and `EngineError` when the engine cannot be reached, refuses the request,
        violates the protocol, ends the stream without a finish reason, or is silent and not healthy.
        """
        body: dict[str, Any] = {"token_ids": token_ids, "stream": True, "stream_options": {"include_usage": True}}
        body["sampling_params"] = {**sampling, "logprobs": 0, "stream_interval": STREAM_INTERVAL}
        if model is not None:
            body["model"] = model
        finished = False
        if self._compared:
            await self.lookup.served()
        try:
            async with await self._headers(body) as response:
                if response.status != 200:
                    async with asyncio.timeout(REFUSAL_SECONDS):
                        said = await self._connections.read(response)
                    raise self._refusal(response.status, said, body)
                watch = asyncio.create_task(self._watch(response.content))
                try:
                    async for data in self._connections.events(
                        response, sampling["max_tokens"], routed=ROUTED in sampling
                    ):
                        if data == b"[DONE]":
                            break
                        chunk = self._decode(data, body)
                        finished = finished or chunk.finish_reason is not None
                        yield chunk
                finally:
                    watch.cancel()
                async with asyncio.timeout(END_SECONDS):
                    await self._connections.read(response)
        except (aiohttp.ClientError, TimeoutError, EngineError) as error:
            if finished:
                return  # all tokens have arrived: at most the usage is lost
            if isinstance(error, EngineError):
                raise
            raise self._connections.failed("failed", error) from error
        if not finished:
            message = f"the engine at {self.url} ended the generation without a finish reason"
            raise EngineError(message, status=502, retryable=True)

    async def _headers(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        headers = {"content-type": "application/json"}
        post = partial(self._connections.request, "POST", GENERATE, data=encode(body), headers=headers)
        async with self._connections.while_healthy():
            try:
                return await post()
            except aiohttp.ServerDisconnectedError:
                # uvicorn closes a keep-alive connection after an internal error; no token has arrived, so retry once
                return await post()

    async def _watch(self, content: aiohttp.StreamReader) -> None:
        """Make the reader of `content` raise `EngineError` once nothing arrives and the engine is not healthy."""
        while True:
            seen = content.total_bytes
            await asyncio.sleep(connections.SILENCE_SECONDS)
            if content.total_bytes == seen and not await self.healthy() and content.total_bytes == seen:
                return content.set_exception(self._connections.silent())

    def _refusal(self, status: int, said: bytes, request: dict[str, Any]) -> EngineError:
        """Return the error of a refused request. `said` may quote anything: only the names that we sent are kept."""
        model: str | None = request.get("model")
        if status == 404 and model is not None and f"`{model}` does not exist".encode() in said:  # vLLM 0.32
            shown = f"the engine at {self.url} does not have the weights of this session"
            message = f"the engine at {self.url} has no adapter {model}"
            return AdapterGone(message, status=502, retryable=True, answered=True, for_harness=shown)
        if status == 503 and b"Generation is paused" in said:  # vLLM 0.33; in 0.32 the request waits
            return EnginePaused(f"the engine at {self.url} is paused", retryable=True, answered=True)
        if status == 401 and (advice := key_refused(self.url, status, self._key)):
            return EngineError(advice, status=502)
        words = {*re.findall(rb"\w+", said[:4096])}
        named = ", ".join(name for name in request["sampling_params"] if name.encode() in words)
        about = f" and named {named}" if named else ""
        hint = f"; {GENERATE} needs vLLM 0.32 or newer with --enable-scale-out" if status in (403, 404) else ""
        message = f"the engine at {self.url} answered {status}{about}: its log says why (--log-error-stack){hint}"
        shown_status = status if status in (400, 413, 503) else 502
        return EngineError(message, status=shown_status, retryable=status >= 500, answered=True)

    def _decode(self, data: bytes, request: dict[str, Any]) -> Chunk:
        """Return the chunk of one event. Raises `EngineError` for an error and for an event that is not vLLM's."""
        try:
            event = orjson.loads(data)
            if "error" in event:
                code = event["error"].get("code")
                status = code if type(code) is int and 400 <= code < 600 else 500
                raise self._refusal(status, data, request)
            return decode(event, request["sampling_params"].get("stop", ()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            message = f"the engine at {self.url} sent an invalid event ({type(error).__name__})"
            raise EngineError(message, status=502) from error


def encode(body: dict[str, Any]) -> bytes:
    """Return a request as JSON."""
    try:
        return orjson.dumps(body)  # ten times faster than json for a long list of token ids
    except TypeError:
        return json.dumps(body).encode()  # a harness's schema may have integers of more than 64 bits


def decode(event: dict[str, Any], stops: Sequence[str]) -> Chunk:
    """Return the chunk of one event, with a stop text of `stops` or none. Any error is that of an invalid event."""
    usage = event.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    cached = None if cached is None else _int32(cached)
    if not event["choices"]:
        return Chunk([], [], cached_tokens=cached)
    choice = event["choices"][0]
    token_ids = [_int32(i) for i in choice["token_ids"]]
    content = (choice.get("logprobs") or {}).get("content") or []
    # drop log-probabilities of other tokens: `find_violation` then marks the call for their wrong number
    matching = [entry["token_id"] for entry in content] == token_ids
    versions = choice.get("weight_versions")
    return Chunk(
        token_ids=token_ids,
        logprobs=[float(entry["logprob"]) for entry in content] if matching else [],
        finish_reason=choice["finish_reason"],
        stop=stop if (stop := choice.get("stop_reason")) in stops else None,
        weight_versions=versions
        and [VersionSpan(version=str(v["version"]), start=_int32(v["start"]), end=_int32(v["end"])) for v in versions],
        cached_tokens=cached,
        routed_experts=choice.get("routed_experts"),
    )


def _int32(value: Any) -> int:
    """Return a number of a column of the run: a token id, a count."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError("no int32")
    return value
