"""The completion of one call, across failures of engines: a retry sends the tokens so far, and samples the rest."""

import asyncio
from collections.abc import AsyncIterator
from itertools import takewhile
from typing import Any

from rolltap.addons.engine.client import ROUTED, AdapterGone, Chunk, Engine, EnginePaused
from rolltap.addons.engine.connections import Patience
from rolltap.addons.engine.policy import LostVersions, Policy, SessionPolicy, covered_tokens
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.errors import EngineError
from rolltap.addons.store.records import Call, VersionSpan, find_violation, utc_now
from rolltap.addons.store.routing import first_routed
from rolltap.addons.store.tables import RunWriter


async def sample(
    call: Call,
    sampling: dict[str, Any],
    engines: EnginePool,
    policies: SessionPolicy,
    writer: RunWriter,
    vocabulary: int,
) -> AsyncIterator[Chunk]:
    """Sample into `call` until it has a finish reason. Yields each chunk after its tokens were appended to `call`.

    After a retryable failure the rest is sampled at once by another engine of the pool or, if all have failed, after a
    pause, within the pool's patience since the last sampled token. `writer` records each retry as an event `continued`.
    Before a retry it yields a chunk with the failure.

    An engine that is paused is waited for, however long that takes: this is no failure, and its calls stay with it.

    An engine without the session's adapter is left out: another one that has it goes on. When none has it, the session
    goes on with the published policy, and `writer` records an event `switched`. When none has that either, it is a
    retryable failure: the trainer loads it again when it publishes next.

    If the engine answers 400 before the first token, `structured_outputs` is removed from `sampling` and the request is
    repeated. Raises `EngineError` when it is not retryable or the patience is used up, and after the first token that
    the engine should not have sent: one more than asked, or one that a vocabulary of `vocabulary` tokens does not have.
    """
    pauses, num_sampled = Patience(engines.patience), 0
    failed: set[Engine] = set()
    without: set[Engine] = set()
    lost = LostVersions()
    routed = {ROUTED: first_routed(call)} if engines.routing else {}
    while call.finish_reason is None:
        policy, start, engine = policies.choose(), len(call.completion_ids), engines.of(call.session_id, failed)
        said: str | None = None
        try:
            said = await engine.weight_version() if policy.model is None else None
            async for chunk in _sample_rest(call, sampling | routed, engine, policy, lost, vocabulary):
                if chunk.token_ids:
                    engines.token_at[engine.url] = asyncio.get_running_loop().time()
                yield chunk
        except EnginePaused:
            await engine.resumed()
        except EngineError as error:
            if error.status == 400 and not call.completion_ids and sampling.pop("structured_outputs", None):
                continue
            if not error.retryable:
                raise
            failed.add(engine)
            if isinstance(error, AdapterGone):
                without.add(engine)
            other_engine = engines.failed(engine, error, failed)
            lost.add(call, start, policy, policies.published.read(), said)
            _infer_finish_reason(call, sampling)
            if call.finish_reason is not None:
                return
            if len(call.completion_ids) > num_sampled:
                pauses.reset()
                num_sampled = len(call.completion_ids)
            yield Chunk([], [], outage=str(error))
            if not other_engine:
                if nobody_has_it := bool(without) and not engines.any_up(without):
                    without.clear()
                failed = {*without}
                if nobody_has_it and (successor := policies.lost(policy)) is not None:
                    why = f"no engine has the adapter {policy.model} any more: the session goes on with the weights "
                    writer.note(call.event("switched", why + successor.version))
                    continue
                if not await pauses.wait():
                    raise
            writer.note(call.event("continued", str(error)))


async def _sample_rest(
    call: Call, sampling: dict[str, Any], engine: Engine, policy: Policy, lost: LostVersions, vocabulary: int
) -> AsyncIterator[Chunk]:
    """Request the rest of the completion once. Raises `EngineError`."""
    call.engine = engine.url
    start, earlier, covered = len(call.completion_ids), call.weight_versions, covered_tokens(call)
    request_sampling = {**sampling, "max_tokens": sampling["max_tokens"] - start}
    finish_reason = None
    async for chunk in engine.generate([*call.prompt_ids, *call.completion_ids], request_sampling, policy.model):
        if chunk.token_ids and call.first_token_at is None:
            call.first_token_at = utc_now()
        room = sampling["max_tokens"] - len(call.completion_ids)
        sound = sum(1 for _ in takewhile(lambda i: i < vocabulary, chunk.token_ids[:room]))
        call.completion_ids += chunk.token_ids[: sound + 1]
        call.logprobs += chunk.logprobs[: sound + 1]
        finish_reason = chunk.finish_reason or finish_reason
        if chunk.cached_tokens is not None and not start:
            call.cached_tokens = chunk.cached_tokens
        # vLLM reports the versions of the base model only; an adapter's name stands for one version
        spans = (chunk.weight_versions or []) if policy.model is None else []
        if policy.model is not None and len(call.completion_ids) > start:
            spans = [VersionSpan(version=policy.version, start=0, end=len(call.completion_ids) - start)]
        if spans:
            moved = [VersionSpan(version=s.version, start=start + s.start, end=start + s.end) for s in spans]
            call.weight_versions = earlier + lost.settle(moved, covered, start)
        if sound < len(chunk.token_ids):
            wrong = find_violation(call.completion_ids, call.logprobs, [], vocabulary, sampling["max_tokens"])
            raise EngineError(f"the engine at {engine.url} sent tokens that are not the model's: {wrong}", status=502)
        yield chunk
    if finish_reason == "abort":
        raise EngineError(f"the engine at {engine.url} aborted the generation", retryable=True, answered=True)
    if finish_reason not in ("stop", "length"):
        raise EngineError(f"the engine at {engine.url} ended the generation with neither stop nor length", status=500)
    call.finish_reason = finish_reason


def _infer_finish_reason(call: Call, sampling: dict[str, Any]) -> None:
    """Infer what the last chunk of a failed request would have said: the reply may be complete."""
    if call.completion_ids and call.completion_ids[-1] in sampling["stop_token_ids"]:
        call.finish_reason = "stop"
    elif len(call.completion_ids) == sampling["max_tokens"]:
        call.finish_reason = "length"
