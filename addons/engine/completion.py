"""The completion of one call, sampled across failures of the engines.

Each request to an engine samples a piece. The next piece goes on from the last token of the one before.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from rolltap.addons.engine.client import Chunk, Engine
from rolltap.addons.engine.policy import Policy, PolicyFile
from rolltap.addons.engine.pool import EnginePool
from rolltap.addons.errors import EngineError
from rolltap.addons.store.records import Call, Event, VersionSpan, utc_now
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
"""Between attempts to go on with an engine that failed; each pause is twice the last one."""


async def sample(
    call: Call, sampling: dict[str, Any], engines: EnginePool, policies: PolicyFile, writer: RunWriter, patience: float
) -> AsyncIterator[Chunk]:
    """Sample into `call` until it has a finish reason; yields each chunk when its tokens are in `call`.

    After a failure the completion goes on at another engine, or at the same one for up to `patience` seconds after the
    last sampled token, and `writer` records it. A schema that the engine does not support is taken out of `sampling`.
    Raises `EngineError`.
    """
    pause, waited, sampled = FIRST_PAUSE_SECONDS, 0.0, 0
    while call.finish_reason is None:
        policy, start, engine = policies.read(), len(call.completion_ids), engines.of(call.session_id)
        try:
            async for chunk in _sample_piece(call, sampling, engine, policy):
                yield chunk
        except EngineError as error:
            if error.status == 400 and not call.completion_ids and sampling.pop("structured_outputs", None):
                continue
            if not error.retryable:
                raise
            moves = engines.failed(engine)
            _restore_last_words(call, sampling, start, policy, policies)
            if call.finish_reason is not None:
                return
            if len(call.completion_ids) > sampled:
                pause, waited, sampled = FIRST_PAUSE_SECONDS, 0.0, len(call.completion_ids)
            if not moves and waited + pause > patience:
                raise
            logger.warning("call %s goes on after %d tokens: %s", call.call_id, sampled, error)
            writer.note(
                Event(
                    kind="continued",
                    session_id=call.session_id,
                    host=call.host,
                    method="POST",
                    path=call.path,
                    call_id=call.call_id,
                )
            )
            if not moves:
                await asyncio.sleep(pause)
                waited, pause = waited + pause, min(2 * pause, LONGEST_PAUSE_SECONDS)


async def _sample_piece(call: Call, sampling: dict[str, Any], engine: Engine, policy: Policy) -> AsyncIterator[Chunk]:
    """Ask an engine once for the rest of the completion. Raises `EngineError`."""
    call.engine = engine.url
    start = len(call.completion_ids)
    rest = {**sampling, "max_tokens": sampling["max_tokens"] - start}
    finish_reason = None
    async for chunk in engine.generate([*call.prompt_ids, *call.completion_ids], rest, policy.model):
        if chunk.token_ids and call.first_token_at is None:
            call.first_token_at = utc_now()
        call.completion_ids += chunk.token_ids
        call.logprobs += chunk.logprobs
        finish_reason = chunk.finish_reason or finish_reason
        if chunk.cached_tokens is not None and not start:
            call.cached_tokens = chunk.cached_tokens
        for span in chunk.weight_versions or []:
            call.weight_versions.append(
                VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
            )
        yield chunk
    if policy.model is not None:
        # vLLM counts weight versions of the base model only: an adapter's version is the name it was asked by
        call.weight_versions = [span for span in call.weight_versions if span.start < start]
        call.weight_versions.append(VersionSpan(version=policy.version, start=start, end=len(call.completion_ids)))
    if finish_reason == "abort":
        raise EngineError("the engine aborted the generation", retryable=True)
    if finish_reason not in ("stop", "length"):
        raise EngineError(f"the engine ended the generation with {finish_reason!r}", status=500)
    call.finish_reason = finish_reason


def _restore_last_words(call: Call, sampling: dict[str, Any], start: int, policy: Policy, policies: PolicyFile) -> None:
    """Fill in what the lost end of a piece would have said: its weights, if the policy was the same before and after
    it (the call keeps a gap otherwise, and is not trained on), and the finish reason, if nothing is left to sample."""
    covered = call.weight_versions[-1].end if call.weight_versions else 0
    end = len(call.completion_ids)
    if covered == start < end and policies.read() == policy:
        call.weight_versions.append(VersionSpan(version=policy.version, start=start, end=end))
    if call.completion_ids and call.completion_ids[-1] in sampling["stop_token_ids"]:
        call.finish_reason = "stop"
    elif end == sampling["max_tokens"]:
        call.finish_reason = "length"
