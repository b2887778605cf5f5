"""The vLLM servers of a run, which serve the same model: each session has one of them.

The completion of a call goes on across their failures: a retry sends the tokens so far, and
samples the rest.
"""

import asyncio
import hashlib
import logging
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Any

from rolltap.addons.engine.client import ROUTED, AdapterGone, Chunk, Engine, EnginePaused
from rolltap.addons.engine.own_model import OwnModel, Served, WrongModel
from rolltap.addons.engine.policy import UNPUBLISHED, Policy, SessionPolicy
from rolltap.addons.errors import EngineError
from rolltap.addons.store.records import Call, VersionSpan, find_violation, utc_now
from rolltap.addons.store.routing import first_routed
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
"""Bounds in seconds of the pauses between the retries of a call."""
DOWN_SECONDS = 10.0
"""Seconds between an engine's failure and the first question whether it is healthy, and between the
questions. An engine that is healthy and fails every call is logged at most twice in this time."""
START_SECONDS = 10.0
"""Time limit for an engine to answer at the start of the recorder."""


class Patience:
    """The pauses of one call between its retries, until `seconds` have passed since its first
    failure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        """Begin anew, because the call went on."""
        self._pause = FIRST_PAUSE_SECONDS
        self._failed_at: float | None = None

    async def wait(self) -> bool:
        """Pause. Returns False, without a pause, when the time would be used up at its end."""
        now = asyncio.get_running_loop().time()
        if self._failed_at is None:
            self._failed_at = now
        if now - self._failed_at + self._pause > self._seconds:
            return False
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return True


class EnginePool:
    """Assigns sessions to engines by rendezvous hashing.

    The calls of a session go to one engine, which has their prefix cached. After `failed`, the
    sessions of that engine move to others. They return when it is healthy again, `DOWN_SECONDS`
    later at the earliest. `key` is sent to every engine, and every engine must serve the model
    `own`, if it is given. `patience` is the time in seconds for which a call retries after all
    engines have failed. With `routing`, calls ask for the experts of their tokens. Create it inside
    the event loop that uses it.
    """

    def __init__(
        self,
        urls: Sequence[str],
        key: str | None = None,
        own: OwnModel | None = None,
        *,
        patience: float = 0.0,
        routing: bool = False,
    ) -> None:
        self.patience = patience
        self.routing = routing
        self.token_at: dict[str | None, float] = {}
        """URL of an engine -> time of its newest tokens, whatever call they are of, of the event
        loop's clock."""
        self._engines = [Engine(url, key, own) for url in urls]
        self._down: dict[Engine, asyncio.Task[None]] = {}
        """Engines that are not chosen, unless all are down, and the tasks that wait for their
        health."""
        self._failures: Counter[Engine] = Counter()

    def up(self, avoid: Collection[Engine] = ()) -> list[Engine]:
        """Return the engines that are up and not in `avoid`."""
        return [each for each in self._engines if each not in self._down and each not in avoid]

    def of(self, session_id: str, avoid: Collection[Engine] = ()) -> Engine:
        """Return the engine of a session: one that is up and not in `avoid`, any if none is."""

        def weight(engine: Engine) -> bytes:
            key = f"{engine.url} {session_id}".encode()
            return hashlib.blake2b(key, digest_size=8).digest()

        return max(self.up(avoid) or self.up() or self._engines, key=weight)

    async def ready(self, session_id: str) -> tuple[Engine, Served]:
        """Return the engine of a session and what it serves. Raises `EngineError`.

        An engine that fails is replaced by another one. If all have failed, they are asked again
        within `patience`.
        """
        patience = Patience(self.patience)
        while True:
            engine = self.of(session_id)
            try:
                return engine, await engine.served()
            except EngineError as error:
                if self.failed(engine, error):
                    continue
                if not error.retryable or not await patience.wait():
                    raise

    def failed(self, engine: Engine, error: EngineError, avoid: Collection[Engine] = ()) -> bool:
        """Exclude an engine until it is healthy again. Returns True if another one is up and not in
        `avoid`.

        An engine that answered with an error is not excluded: one session's request must not take
        it from the others.
        """
        if not error.answered:
            engine.forget()
            self._failures[engine] += 1
            if engine not in self._down:
                logger.warning("engine down: %s", error)
                self._down[engine] = asyncio.create_task(self._watch(engine))
        return bool(self.up(avoid))

    async def _watch(self, engine: Engine) -> None:
        """Wait until an engine is healthy, then let sessions use it again."""
        started = time.monotonic()
        healthy = False
        while not healthy:
            await asyncio.sleep(DOWN_SECONDS)
            healthy = await engine.healthy()
        del self._down[engine]
        logger.info(
            "engine back: %s after %.0f s, in which %d requests failed",
            engine.url,
            time.monotonic() - started,
            self._failures.pop(engine),
        )

    async def close(self) -> None:
        """Close the connections."""
        for watch in self._down.values():
            watch.cancel()
        await asyncio.gather(*self._down.values(), return_exceptions=True)
        for engine in self._engines:
            await engine.close()


async def require_model(urls: Sequence[str], key: str | None, own: OwnModel) -> list[str]:
    """Return the warnings of the comparison of the engines' models with `own`.

    Raises `WrongModel` if an engine serves a model with another tokenizer. One that does not answer
    within `START_SECONDS` is logged: it is compared at its first contact.
    """
    engines = [Engine(url, key, own) for url in urls]
    try:
        await asyncio.gather(*map(_compare, engines))
    finally:
        for engine in engines:
            await engine.close()
    return [engine.warning for engine in engines if engine.warning is not None]


async def _compare(engine: Engine) -> None:
    try:
        async with asyncio.timeout(START_SECONDS):
            await engine.served()
    except WrongModel:
        raise
    except (EngineError, TimeoutError) as error:
        logger.warning(
            "the engine at %s does not answer yet, its model will be compared then: %s",
            engine.url,
            str(error) or f"nothing in {START_SECONDS:g} s",
        )


async def sample(
    call: Call,
    sampling: dict[str, Any],
    engines: EnginePool,
    policies: SessionPolicy,
    writer: RunWriter,
    vocabulary: int,
) -> AsyncIterator[Chunk]:
    """Sample into `call` until it has a finish reason. Yields each chunk after its tokens were
    appended to `call`.

    After a retryable failure the rest is sampled at once by another engine of the pool or, if all
    have failed, after a pause, within the pool's patience since the last sampled token. `writer`
    records each retry as an event `continued`. Before a retry it yields a chunk with the failure.

    An engine that is paused is waited for, however long that takes: this is no failure, and its
    calls stay with it.

    An engine without the session's adapter is left out: another one that has it goes on. When none
    has it, the session goes on with the published policy, and `writer` records an event `switched`.
    When none has that either, it is a retryable failure: the trainer loads it again when it
    publishes next.

    If the engine answers 400 before the first token, `structured_outputs` is removed from
    `sampling` and the request is repeated. Raises `EngineError` when it is not retryable or the
    patience is used up, and after the first token that the engine should not have sent: one more
    than asked, or one that a vocabulary of `vocabulary` tokens does not have.
    """
    patience = Patience(engines.patience)
    num_sampled = 0
    failed: set[Engine] = set()
    without: set[Engine] = set()
    weights = _Weights(call)
    while call.finish_reason is None:
        policy = policies.choose()
        weights.begin(policy)
        engine = engines.of(call.session_id, failed)
        call.engine = engine.url
        request = {**sampling, "max_tokens": sampling["max_tokens"] - len(call.completion_ids)}
        if engines.routing:
            request[ROUTED] = first_routed(call)
        try:
            served = await engine.served()
            weights.expected = served.weight_version
            async for chunk in _sample_rest(call, request, engine, weights, vocabulary):
                if chunk.token_ids:
                    engines.token_at[engine.url] = asyncio.get_running_loop().time()
                yield chunk
        except EnginePaused:
            await engine.resumed()
        except EngineError as error:
            refused = error.status == 400 and not call.completion_ids
            if refused and sampling.pop("structured_outputs", None):
                continue
            if not error.retryable:
                raise
            failed.add(engine)
            if isinstance(error, AdapterGone):
                without.add(engine)
            other_engine = engines.failed(engine, error, failed)
            weights.fail(policies.published.read())
            _infer_finish_reason(call, sampling)
            if call.finish_reason is not None:
                return
            if len(call.completion_ids) > num_sampled:
                patience.reset()
                num_sampled = len(call.completion_ids)
            yield Chunk([], [], outage=str(error))
            if not other_engine:
                successor = None
                if without and not engines.up(without):
                    without.clear()
                    successor = policies.lost(policy)
                failed = set(without)
                if successor is not None:
                    why = f"no engine has the adapter {policy.model} any more"
                    goes_on = f"the session goes on with the weights {successor.version}"
                    writer.note(call.event("switched", f"{why}: {goes_on}"))
                    continue
                if not await patience.wait():
                    raise
            writer.note(call.event("continued", str(error)))


async def _sample_rest(
    call: Call,
    sampling: dict[str, Any],
    engine: Engine,
    weights: "_Weights",
    vocabulary: int,
) -> AsyncIterator[Chunk]:
    """Request the rest of the completion once. Raises `EngineError`."""
    start = len(call.completion_ids)
    most = start + sampling["max_tokens"]
    finish_reason = None
    prompt = array("i", call.prompt_ids)
    prompt.extend(call.completion_ids)
    async for chunk in engine.generate(prompt, sampling, weights.model):
        if chunk.token_ids and call.first_token_at is None:
            call.first_token_at = utc_now()
        if chunk.cached_tokens is not None and not start:
            call.cached_tokens = chunk.cached_tokens
        finish_reason = chunk.finish_reason or finish_reason
        sound = 0
        for token_id in chunk.token_ids[: most - len(call.completion_ids)]:
            if token_id >= vocabulary:
                break
            sound += 1
        call.completion_ids += chunk.token_ids[: sound + 1]
        call.logprobs += chunk.logprobs[: sound + 1]
        weights.add(chunk.weight_versions)
        if sound < len(chunk.token_ids):
            wrong = find_violation(call.completion_ids, call.logprobs, [], vocabulary, most)
            raise engine.error(f"sent tokens that are not the model's: {wrong}")
        yield chunk
    if finish_reason == "abort":
        raise engine.error("aborted the generation", status=503, retryable=True, answered=True)
    if finish_reason not in ("stop", "length"):
        raise engine.error("ended the generation with neither stop nor length", status=500)
    call.finish_reason = finish_reason


class _Weights:
    """Names the weights that sampled each token of a call, over its requests.

    An adapter's name stands for one version. vLLM names the versions of the base model at the end
    of a request, so a request that fails leaves tokens without a name. If the published policy is
    the same before and after, it names them. If nothing is published, they have the version that
    the engine named before the request (`expected`), provided that the next request names the same
    for its first token. Otherwise the spans keep a gap, which `find_violation` reports: the call is
    not trained on.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._lost: set[str | None] = set()
        """Expected versions of the tokens before `_start` that have no name."""

    def begin(self, policy: Policy) -> None:
        """Begin a request under `policy`."""
        self.model = policy.model
        self.expected: str | None = None
        self._policy = policy
        self._start = len(self._call.completion_ids)
        self._earlier = self._call.weight_versions

    def add(self, spans: Sequence[VersionSpan]) -> None:
        """Add the spans of an event, of the request's tokens. Its tokens are in the call."""
        if self.model is not None:
            self._name(self._policy.version)
            return
        if not spans:
            return
        versions = [*self._earlier]
        lost_from = _end(versions)
        if lost_from < self._start and self._lost == {spans[0].version}:
            lost = replace(spans[0], start=lost_from, end=self._start)
            versions.append(lost)
        for span in spans:
            moved = replace(span, start=self._start + span.start, end=self._start + span.end)
            versions.append(moved)
        self._call.weight_versions = versions

    def fail(self, published: Policy) -> None:
        """End a request that has failed. `published` is the policy now."""
        end = len(self._call.completion_ids)
        if end in (self._start, _end(self._call.weight_versions)):
            return
        if self._policy != published:
            self._lost.add(None)
        elif published == UNPUBLISHED:
            self._lost.add(self.expected)
        else:
            self._name(published.version)

    def _name(self, version: str) -> None:
        """Name the weights of all tokens of the request."""
        end = len(self._call.completion_ids)
        if end > self._start:
            span = VersionSpan(version=version, start=self._start, end=end)
            self._call.weight_versions = [*self._earlier, span]


def _end(spans: Sequence[VersionSpan]) -> int:
    return spans[-1].end if spans else 0


def _infer_finish_reason(call: Call, sampling: dict[str, Any]) -> None:
    """Infer what the last chunk of a failed request would have said: the reply may be complete."""
    if call.completion_ids and call.completion_ids[-1] in sampling["stop_token_ids"]:
        call.finish_reason = "stop"
    elif len(call.completion_ids) == sampling["max_tokens"]:
        call.finish_reason = "length"
