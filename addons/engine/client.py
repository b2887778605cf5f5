"""vLLM client: token ids in; token ids, log-probabilities and weight versions out.

Speaks vLLM's `POST /inference/v1/generate` (vLLM 0.32 and newer, started with `--enable-scale-out`), streaming.
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
    """Newly sampled tokens; the last chunk names the finish reason and the weights of the whole completion."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    stop: str | None = None
    """The stop text that ended the completion."""
    weight_versions: list[VersionSpan] | None = None
    cached_tokens: int | None = None


class Engine:
    """One vLLM server. Must be created inside the event loop that uses it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # no total timeout: a generation may take as long as it takes, and may queue behind a weight update
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        self._max_model_len: int | None = None
        self.model = ""

    async def close(self) -> None:
        """Close the connections; running generations end with `EngineError`."""
        await self._session.close()

    async def max_model_len(self) -> int:
        """The engine's context window in tokens. Asked once; also learns the served model's name.

        Raises `EngineError` when the engine cannot be reached or does not say.
        """
        if self._max_model_len is None:
            models = await self._get("/v1/models")
            try:
                base = next(m for m in models["data"] if not m.get("parent"))
                self.model, self._max_model_len = str(base["id"]), int(base["max_model_len"])
            except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
                raise EngineError(f"{self.url}/v1/models is not vLLM's: {error!r}", status=502) from error
        return self._max_model_len

    async def describe(self) -> dict[str, Any]:
        """The engine's own description: served model, context window in tokens, vLLM's version and configuration.

        The last two are None when it does not tell; the configuration needs VLLM_SERVER_DEV_MODE=1. Raises
        `EngineError`.
        """
        context = await self.max_model_len()
        version, information = await self._get("/version"), await self._get("/server_info")
        return {
            "model": self.model,
            "max_model_len": context,
            "vllm": version.get("version"),
            "configuration": information.get("vllm_config"),
        }

    async def _get(self, path: str) -> dict[str, Any]:
        """An object that the engine serves; an empty one when it does not. Raises `EngineError` when it is down."""
        try:
            async with self._session.get(self.url + path) as response:
                answer = json.loads(await response.read()) if response.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"the engine at {self.url} cannot be reached: {error}") from error
        except ValueError:
            answer = {}
        return answer if isinstance(answer, dict) else {}

    async def generate(self, token_ids: list[int], sampling: dict[str, Any], model: str | None) -> AsyncIterator[Chunk]:
        """Sample a completion of `token_ids`, as it comes.

        `model` names a LoRA adapter, or is None for the base model. Closing the iterator stops the generation. Raises
        `EngineError` when the engine is down, refuses, answers something else than the protocol, or ends before the
        completion does.
        """
        body: dict[str, Any] = {"token_ids": token_ids, "stream": True, "sampling_params": {**sampling, "logprobs": 0}}
        body["stream_options"] = {"include_usage": True}
        if model is not None:
            body["model"] = model
        finished = False
        try:
            async with await self._post(body) as response:
                if response.status != 200:
                    raise await _refusal(response)
                async for data in _events(response.content):
                    if data == b"[DONE]":
                        break
                    chunk = _chunk(data)
                    finished = finished or chunk.finish_reason is not None
                    yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            if finished:
                return  # only its last words were lost
            why = f"the engine at {self.url} failed: {error or type(error).__name__}"
            raise EngineError(why, retryable=True) from error
        if not finished:
            why = f"the engine at {self.url} ended the generation without a finish reason"
            raise EngineError(why, status=502, retryable=True)

    async def _post(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        data, headers = _encode(body), {"content-type": "application/json"}
        try:
            return await self._session.post(self.url + GENERATE, data=data, headers=headers)
        except aiohttp.ServerDisconnectedError:
            # uvicorn closes a kept connection after an internal error; nothing was sampled yet, so ask once more
            return await self._session.post(self.url + GENERATE, data=data, headers=headers)


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)  # a tenth of json's time for a long list of token ids
    except TypeError:
        return json.dumps(body).encode()  # a harness's schema may hold integers of more than 64 bits


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event. A line may be longer than aiohttp's own line reader allows."""
    buffer = b""
    async for piece in stream.iter_any():
        buffer += piece
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _chunk(data: bytes) -> Chunk:
    try:
        event = orjson.loads(data)
        if "error" in event:
            status = int(event["error"].get("code") or 500)
            why = f"the engine refused: {event['error'].get('message')}"
            raise EngineError(why, status=max(status, 400), retryable=status >= 500)
        usage = event.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not event["choices"]:
            return Chunk([], [], cached_tokens=cached)
        choice = event["choices"][0]
        token_ids = [int(i) for i in choice["token_ids"]]
        content = (choice.get("logprobs") or {}).get("content") or []
        # log-probabilities of other tokens are worse than none: the call is then marked for their number
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
        raise EngineError(f"the engine answered garbage ({error!r}): {data[:200]!r}", status=502) from error


async def _refusal(response: aiohttp.ClientResponse) -> EngineError:
    text = (await response.read()).decode("utf-8", "replace")[:500]
    hint = f"; {GENERATE} needs vLLM 0.32 or newer with --enable-scale-out" if response.status in (403, 404) else ""
    status = response.status if response.status in (400, 413, 503) else 502
    why = f"the engine answered {response.status}: {text}{hint}"
    return EngineError(why, status=status, retryable=response.status >= 500)
