"""vLLM client: sends token ids, receives token ids, log-probabilities and weight versions.

Uses vLLM's streaming `POST /inference/v1/generate` (vLLM 0.32 and newer, started with `--enable-scale-out`).
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from rolltap.addons.errors import EngineError
from rolltap.addons.store.records import VersionSpan

GENERATE = "/inference/v1/generate"


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


class Engine:
    """One vLLM server. Must be created inside the event loop that uses it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # no total timeout: a generation may be long, or queue behind a weight update
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        self._max_model_len: int | None = None
        self.model = ""

    async def close(self) -> None:
        """Close the connections. Running generations raise `EngineError`."""
        await self._session.close()

    async def max_model_len(self) -> int:
        """Return the engine's context window in tokens. Sets `model` to the served model's name. Cached.

        Raises `EngineError` when the engine cannot be reached or its answer is not vLLM's.
        """
        if self._max_model_len is None:
            models = await self._get("/v1/models")
            try:
                base = next(m for m in models["data"] if not m.get("parent"))
                self.model, self._max_model_len = str(base["id"]), int(base["max_model_len"])
            except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
                message = (
                    f"{self.url}/v1/models did not return a model with max_model_len ({error!r}): check that "
                    "rolltap_engine is a vLLM server"
                )
                raise EngineError(message, status=502) from error
        return self._max_model_len

    async def describe(self) -> dict[str, Any]:
        """Return the served model, the context window in tokens, and vLLM's version and configuration.

        The version and the configuration are None when the engine does not serve them. The configuration needs
        VLLM_SERVER_DEV_MODE=1. Raises `EngineError`.
        """
        max_model_len = await self.max_model_len()
        version, information = await self._get("/version"), await self._get("/server_info")
        return {
            "model": self.model,
            "max_model_len": max_model_len,
            "vllm": version.get("version"),
            "configuration": information.get("vllm_config"),
        }

    async def _get(self, path: str) -> dict[str, Any]:
        """Return a JSON object of the engine, or an empty one for any other answer. Raises `EngineError` when it cannot
        be reached."""
        try:
            async with self._session.get(self.url + path) as response:
                answer = json.loads(await response.read()) if response.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"the engine at {self.url} cannot be reached: {error}") from error
        except ValueError:
            answer = {}
        return answer if isinstance(answer, dict) else {}

    async def generate(self, token_ids: list[int], sampling: dict[str, Any], model: str | None) -> AsyncIterator[Chunk]:
        """Sample a completion of `token_ids`. Yields chunks as they arrive.

        `model` names a LoRA adapter, or is None for the base model. Closing the iterator cancels the generation. Raises
        `EngineError` when the engine cannot be reached, refuses the request, violates the protocol, or closes the
        stream without a finish reason.
        """
        body: dict[str, Any] = {"token_ids": token_ids, "stream": True, "sampling_params": {**sampling, "logprobs": 0}}
        body["stream_options"] = {"include_usage": True}
        if model is not None:
            body["model"] = model
        finished = False
        try:
            async with await self._post(body) as response:
                if response.status != 200:
                    raise await _refusal(self.url, response)
                async for data in _events(response.content):
                    if data == b"[DONE]":
                        break
                    chunk = _chunk(self.url, data)
                    finished = finished or chunk.finish_reason is not None
                    yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            if finished:
                return  # all tokens have arrived: at most the usage is lost
            message = f"the engine at {self.url} failed: {error or type(error).__name__}"
            raise EngineError(message, retryable=True) from error
        if not finished:
            message = f"the engine at {self.url} ended the generation without a finish reason"
            raise EngineError(message, status=502, retryable=True)

    async def _post(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        data, headers = _encode(body), {"content-type": "application/json"}
        try:
            return await self._session.post(self.url + GENERATE, data=data, headers=headers)
        except aiohttp.ServerDisconnectedError:
            # uvicorn closes a keep-alive connection after an internal error; no token has arrived, so retry once
            return await self._session.post(self.url + GENERATE, data=data, headers=headers)


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)  # ten times faster than json for a long list of token ids
    except TypeError:
        return json.dumps(body).encode()  # a harness's schema may have integers of more than 64 bits


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event. Lines have no length limit, unlike with aiohttp's `readline`."""
    buffer = b""
    async for received in stream.iter_any():
        buffer += received
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _chunk(url: str, data: bytes) -> Chunk:
    try:
        event = orjson.loads(data)
        if "error" in event:
            status = int(event["error"].get("code") or 500)
            message = f"the engine at {url} refused: {event['error'].get('message')}"
            raise EngineError(message, status=max(status, 400), retryable=status >= 500)
        usage = event.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not event["choices"]:
            return Chunk([], [], cached_tokens=cached)
        choice = event["choices"][0]
        token_ids = [int(i) for i in choice["token_ids"]]
        content = (choice.get("logprobs") or {}).get("content") or []
        # drop log-probabilities of other tokens: `find_violation` then marks the call for their wrong number
        matching = [entry["token_id"] for entry in content] == token_ids
        versions = choice.get("weight_versions")
        return Chunk(
            token_ids=token_ids,
            logprobs=[float(entry["logprob"]) for entry in content] if matching else [],
            finish_reason=choice["finish_reason"],
            stop=stop if isinstance(stop := choice.get("stop_reason"), str) else None,
            weight_versions=versions
            and [VersionSpan(version=str(v["version"]), start=v["start"], end=v["end"]) for v in versions],
            cached_tokens=cached,
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        message = f"the engine at {url} sent an invalid event ({error!r}): {data[:200]!r}"
        raise EngineError(message, status=502) from error


async def _refusal(url: str, response: aiohttp.ClientResponse) -> EngineError:
    text = (await response.read()).decode("utf-8", "replace")[:500]
    hint = f"; {GENERATE} needs vLLM 0.32 or newer with --enable-scale-out" if response.status in (403, 404) else ""
    status = response.status if response.status in (400, 413, 503) else 502
    message = f"the engine at {url} answered {response.status}: {text}{hint}"
    return EngineError(message, status=status, retryable=response.status >= 500)
