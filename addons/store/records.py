"""The records of a run: calls, sessions and events, with their Arrow schemas and the invariants of a call.

The last column of each table, `digest`, is added by the store.

This module is the contract between the recorder, which writes these rows, and the trainer, which reads them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import pyarrow as pa

from rolltap.addons.store.digest import DIGEST

SCHEMA_VERSION = 4
"""Raised whenever a reader of the earlier version would misread a row."""

SENTINEL_LOGPROB = -9999.0
"""vLLM clamps log-probabilities here; such a value says "not known", never "very unlikely"."""

CallKind = Literal["root", "bridged", "rendered"]
CallRole = Literal["agent", "subagent", "compaction", "auxiliary"]
"""The purpose of a call: the harness's main line, a helper agent that it started, a summary of its own history, or a
side question (a title, a routing decision, a loop check, a commit message) that is not part of solving the task."""
CallStatus = Literal["completed", "aborted", "failed"]
SessionStatus = Literal["completed", "failed", "timeout", "error"]
EventKind = Literal[
    "call_started", "refused", "uncaptured", "unauthorised", "rejected", "joined", "replayed", "continued"
]

_TIME = pa.timestamp("us", tz="UTC")
_VERSIONS = pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))

CALL_SCHEMA = pa.schema(
    [
        ("session_id", pa.string()),
        ("call_id", pa.string()),
        ("parent_id", pa.string()),
        ("kind", pa.string()),
        ("kind_reason", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("violation", pa.string()),
        ("role", pa.string()),
        ("role_evidence", pa.string()),
        ("dialect", pa.string()),
        ("host", pa.string()),
        ("path", pa.string()),
        ("model", pa.string()),
        ("stream", pa.bool_()),
        ("prompt_length", pa.int32()),
        ("prompt_tail_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("weight_versions", _VERSIONS),
        ("finish_reason", pa.string()),
        ("sampling", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("reply", pa.string()),
        ("cached_tokens", pa.int32()),
        ("engine", pa.string()),
        ("started_at", _TIME),
        ("first_token_at", _TIME),
        ("finished_at", _TIME),
        (DIGEST, pa.string()),
    ]
)

SESSION_SCHEMA = pa.schema(
    [
        ("session_id", pa.string()),
        ("task_id", pa.string()),
        ("group_id", pa.string()),
        ("harness", pa.string()),
        ("status", pa.string()),
        ("exit_status", pa.int32()),
        ("reward", pa.float64()),
        ("error", pa.string()),
        ("policy_version", pa.string()),
        ("started_at", _TIME),
        ("finished_at", _TIME),
        (DIGEST, pa.string()),
    ]
)

EVENT_SCHEMA = pa.schema(
    [
        ("session_id", pa.string()),
        ("call_id", pa.string()),
        ("kind", pa.string()),
        ("host", pa.string()),
        ("method", pa.string()),
        ("path", pa.string()),
        ("detail", pa.string()),
        ("at", _TIME),
        (DIGEST, pa.string()),
    ]
)


def utc_now() -> datetime:
    """The current time as an aware datetime, as every timestamp column stores it."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """`completion_ids[start:end]` were sampled by the weights that the engine calls `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Call:
    """One model call of a session.

    `prompt_ids` is always the full prompt here; `to_row` stores only what follows the parent's prompt and
    completion (`prefix_length` tokens), so that T turns cost O(T) tokens on disk. The same goes for `messages`:
    the row holds those after the parent's conversation and reply.
    """

    session_id: str
    call_id: str
    prompt_ids: Sequence[int]
    """Token ids the engine was given, shape (P,)."""
    completion_ids: list[int] = field(default_factory=list)
    """Sampled token ids, the end-of-turn token included when it was sampled, shape (C,)."""
    logprobs: list[float] = field(default_factory=list)
    """Natural-log probability of each sampled token under the sampling policy, shape (C,)."""
    weight_versions: list[VersionSpan] = field(default_factory=list)
    parent_id: str | None = None
    prefix_length: int = 0
    kind: CallKind = "root"
    kind_reason: str | None = None
    """Why this call is not `bridged`; None when it is."""
    status: CallStatus = "completed"
    error: str | None = None
    violation: str | None = None
    """Which invariant the tokens break; such a call is kept and never trained on."""
    role: CallRole = "agent"
    role_evidence: str = ""
    """Which header, field or structure of the request says so; empty for the assumption."""
    dialect: str = ""
    host: str = ""
    path: str = ""
    model: str = ""
    """The model name the harness asked for."""
    stream: bool = False
    finish_reason: str | None = None
    sampling: str = "{}"
    """JSON of the sampling parameters the engine was sent, and under `asked` what else the harness wanted."""
    messages: str = "[]"
    tools: str | None = None
    """JSON of the tools shown to the model; None when they are the parent's."""
    reply: str | None = None
    """JSON of the assistant message as the harness saw it."""
    cached_tokens: int | None = None
    engine: str | None = None
    """URL of the engine that sampled the last of it."""
    started_at: datetime = field(default_factory=utc_now)
    first_token_at: datetime | None = None
    finished_at: datetime | None = None

    def to_row(self) -> dict[str, Any]:
        """The call as a row of `CALL_SCHEMA`, the digest left out."""
        row = {name: getattr(self, name) for name in CALL_SCHEMA.names if hasattr(self, name)}
        row["prompt_length"] = len(self.prompt_ids)
        row["prompt_tail_ids"] = self.prompt_ids[self.prefix_length :]
        row["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.end} for s in self.weight_versions]
        return row


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of one harness on one task; a row of `SESSION_SCHEMA`."""

    session_id: str
    task_id: str
    group_id: str
    harness: str
    status: SessionStatus
    exit_status: int | None = None
    reward: float | None = None
    error: str | None = None
    policy_version: str | None = None
    """The newest weights that had been published when the session started."""
    started_at: datetime = field(default_factory=utc_now)
    finished_at: datetime | None = None

    def to_row(self) -> dict[str, Any]:
        """The session as a row of `SESSION_SCHEMA`, the digest left out."""
        return {name: getattr(self, name) for name in SESSION_SCHEMA.names if name != DIGEST}


@dataclass(slots=True, kw_only=True)
class Event:
    """Something on the wire that is not a call but must not go unseen; a row of `EVENT_SCHEMA`.

    Kinds: `call_started` (the intent written before the engine is asked), `refused` (a
    host or path that is not served), `uncaptured` (refused or let through, and it looks like a model call),
    `unauthorised` (bad proxy credentials), `rejected` (a model call that was answered with an error before it reached
    the engine), `joined` (a retry of a call that was still running), `replayed` (a retry that got the finished reply
    again), `continued` (an engine failed in the middle of a call, which went on from the last sampled token).
    """

    kind: EventKind
    session_id: str | None = None
    host: str = ""
    method: str = ""
    path: str = ""
    detail: str = ""
    call_id: str | None = None
    """The call that it is about, if it is about one."""
    at: datetime = field(default_factory=utc_now)

    def to_row(self) -> dict[str, Any]:
        """The event as a row of `EVENT_SCHEMA`, the digest left out."""
        return {name: getattr(self, name) for name in EVENT_SCHEMA.names if name != DIGEST}


def find_violation(
    completion_ids: Sequence[int], logprobs: Sequence[float], weight_versions: Sequence[VersionSpan]
) -> str | None:
    """The first broken token invariant of a call, in words, or None.

    Ids and log-probabilities match one to one; every log-probability is finite, at most 0 and not vLLM's sentinel;
    the weight version spans cover the completion without gap or overlap.
    """
    if len(completion_ids) != len(logprobs):
        return f"{len(completion_ids)} token ids but {len(logprobs)} log-probabilities"
    for i, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            return f"log-probability {i} is {logprob}"
        if logprob > 0:
            return f"log-probability {i} is positive ({logprob})"
        if logprob <= SENTINEL_LOGPROB:
            return f"log-probability {i} is the sentinel {logprob}"
    position = 0
    for span in weight_versions:
        if span.start != position or span.end < span.start:
            return f"weight version spans leave token {position} out"
        position = span.end
    if position != len(completion_ids):
        return f"weight version spans cover {position} of {len(completion_ids)} tokens"
    return None
