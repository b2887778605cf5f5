"""The client of vLLM: token ids in, token ids, log-probabilities and weight versions out.

Uses vLLM's streaming `POST /inference/v1/generate` (vLLM 0.32 and newer, started with
`--enable-scale-out`). A request is JSON, its response a stream of server-sent events.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson

from rolltap.addons.engine import connections
from rolltap.addons.engine.connections import MOST_BYTES, Connections, Shared
from rolltap.addons.engine.key import key_refused
from rolltap.addons.engine.own_model import OwnModel, WrongModel
from rolltap.addons.errors import EngineError
from rolltap.addons.store.records import VersionSpan

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class Served:
    """The model and the weights of an engine."""

    model: str
    max_model_len: int
    """Context window in tokens."""
    weight_version: str | None
    """Name of the base weights (vLLM's `/weight_info`), None when the engine does not say."""


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


class Engine(Connections):
    """One vLLM server. Create it inside the event loop that uses it.

    With `own`, `served` raises `WrongModel` unless the engine serves that model. It is asked at
    first contact, after `forget`, and every `AGAIN_SECONDS` of use.
    """

    def __init__(self, url: str, key: str | None = None, own: OwnModel | None = None) -> None:
        super().__init__(url, key)
        self.warning: str | None = None
        """Difference to `own` that the last answer showed and that refuses nothing."""
        self.resumed = Shared(self._resumed)
        """Returns when the engine is not paused, or does not say that it is: the next request finds
        out."""
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
        await super().close()

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
        status, models = await self.ask("/v1/models")
        advice = key_refused(self.url, status, self._key)
        if advice is not None:
            raise EngineError(advice, status=502)
        try:
            bases = [model for model in models["data"] if not model.get("parent")]
            model = str(bases[0]["id"])
            root = str(bases[0].get("root") or model)
            max_model_len = int(bases[0]["max_model_len"])
        except _MALFORMED as error:
            why = f"a model with max_model_len ({type(error).__name__})"
            raise self._no_vllm("/v1/models", why, status) from error
        warning = await self._compare(root, model)
        if warning is not None and warning != self.warning:
            logger.warning("%s", warning)
        self.warning = warning
        served = Served(model, max_model_len, await self._weight_version())
        if self._forgotten:
            return await self._look_up()
        self._served = served
        self._asked_at = asyncio.get_running_loop().time()
        return served

    async def _compare(self, root: str, model: str) -> str | None:
        """Return a warning if the engine's model has another name or folder (`root`) than `own`, or
        cannot be compared. Raises `WrongModel`."""
        own = self._own
        if own is None:
            return None
        serves = f"the engine at {self.url} serves {root}"
        for path, body, key, expected in own.questions:
            status, answer = await self.ask(path, body)
            if status in (404, 501):
                why = f"it has no route {path} ({status})"
                return f"{serves} (as {model}), which was not compared with {own.name}: {why}"
            if key not in answer:
                why = f"the {key}, by which the engine's model is compared with rolltap_model"
                raise self._no_vllm(path, why, status)
            if answer[key] != expected:
                why = f"whose tokenizer is not that of {own.name}"
                advice = (
                    "give the model that the engine serves (--model, rolltap_model), or start the "
                    f"engine with {own.name}"
                )
                shown = f"the engine at {self.url} serves another model than the recorder's"
                raise WrongModel(f"{serves}, {why}: {advice}", status=502, for_harness=shown)
        if own.is_named(root, model):
            return None
        rest = "their tokenizers agree; weights and chat templates were not compared"
        return f"{serves} (as {model}), not {own.name}: {rest}"

    async def _weight_version(self) -> str | None:
        version = None
        # vLLM does not answer in time while it loads weights
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(connections.HEALTH_SECONDS):
                _, answer = await self.ask("/weight_info")
                version = answer.get("weight_version")
        return version if isinstance(version, str) else None

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

    def _no_vllm(self, path: str, what: str, status: int) -> EngineError:
        message = f"{self.url}{path} did not return {what} (status {status})"
        advice = "check that rolltap_engine is a vLLM server"
        return EngineError(f"{message}: {advice}", status=502, retryable=status >= 500)


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
