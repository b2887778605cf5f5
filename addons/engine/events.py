"""The bodies of `POST /inference/v1/generate`: a request, and the server-sent events of its response."""

import json
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from rolltap.addons.errors import EngineError
from rolltap.addons.store.records import VersionSpan


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


def encode(body: dict[str, Any]) -> bytes:
    """Return a request as JSON."""
    try:
        return orjson.dumps(body)  # ten times faster than json for a long list of token ids
    except TypeError:
        return json.dumps(body).encode()  # a harness's schema may have integers of more than 64 bits


async def events(stream: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event. Lines have no length limit, unlike with aiohttp's `readline`."""
    buffer = b""
    async for received in stream:
        buffer += received
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def decode(url: str, data: bytes) -> Chunk:
    """Return the chunk of one event. Raises `EngineError` for an error and for an event that is not vLLM's."""
    try:
        event = orjson.loads(data)
        if "error" in event:
            status = int(event["error"].get("code") or 500)
            message = f"the engine at {url} refused: {event['error'].get('message')}"
            raise EngineError(message, status=max(status, 400), retryable=status >= 500, answered=True)
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
