"""The records of a run: calls, sessions and events, the schemas of their tables, and invariants.

The recorder writes these rows and the trainer reads them. A field of a record is a column of its
table, in this order; the store adds the last column, `digest`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, get_args

import pyarrow as pa

SCHEMA_VERSION = 5
"""Incremented when a reader of the earlier version would misread a row."""
DIGEST = "digest"
"""Name of the digest column."""
WEBSOCKET = "a WebSocket, which is not served"
"""`Event.detail` of a refused request to open one. Programs ask again over HTTP."""

SENTINEL_LOGPROB = -9999.0
"""The value to which vLLM clamps log-probabilities: "unknown", not "very unlikely"."""

CallKind = Literal["root", "bridged", "rendered"]
CallRole = Literal["agent", "subagent", "compaction", "auxiliary"]
"""Purpose of a call.

`agent`: the harness's main conversation. `subagent`: a helper agent that it started. `compaction`:
a summary of its own history. `auxiliary`: a side question (a title, a routing decision, a loop
check, a commit message) that is not part of solving the task.
"""
CallStatus = Literal["completed", "aborted", "failed"]
SessionStatus = Literal[
    "completed",
    "failed",
    "timeout",
    "budget",
    "infrastructure",
    "unjudged",
    "diverged",
    "cancelled",
    "unknown",
]
"""Outcome of a session.

| status | meaning | reward |
| --- | --- | --- |
| `completed` | the harness exited with status 0 | the judge's |
| `failed` | the harness exited with another status | the judge's |
| `timeout` | the harness was stopped at the session's time limit | the judge's |
| `budget` | a budget of the session was used up, and no later call was completed | the judge's |
| `infrastructure` | it failed because of the engine, the recorder or the machine | none |
| `unjudged` | the judge could not judge | none |
| `diverged` | a fork that differs from its record before the call at which it forks | none |
| `cancelled` | the rollout was stopped while it ran | none |
| `unknown` | only calls were recorded | none |
"""
PHASES = ("queued", "preparing", "running", "judging", "retried")
"""Phases of a session, whose seconds are columns `PHASE_seconds` of its row."""
LATER_COLUMNS = frozenset(f"{phase}_seconds" for phase in PHASES)
"""Columns that tables got later without a new `SCHEMA_VERSION`: so far only `sessions` did, for its
`PHASES`. Files from before lack them; their rows are read as rows without a value there, and keep
their digests.

A new column of `sessions` is a field of `Session`, a name here, its type in `untrusted.py` (which
checks all of these as seconds), a line in recipes/site/pages/dataset.md, and a value from
`rollouts/session.py`; `STARTED_FIELDS` of `rollouts/recorder.py` has it if it is known at the
session's start."""
SESSION_JSON = ("parts", "evidence", "suspicions")
"""Columns of `sessions` that hold a JSON object."""
UNREWARDED: frozenset[SessionStatus] = frozenset(
    {
        "infrastructure",
        "unjudged",
        "diverged",
        "cancelled",
        "unknown",
    }
)
"""Outcomes without a reward, whoever gave one."""
EventKind = Literal[
    "session_started",
    "call_started",
    "refused",
    "uncaptured",
    "unauthorised",
    "rejected",
    "unreadable",
    "hidden",
    "controls",
    "budget",
    "fault",
    "joined",
    "replayed",
    "rerun",
    "diverged",
    "continued",
    "switched",
    "stored",
    "ended",
]
"""Kind of an event: the table of `Event` and recipes/site/pages/dataset.md say what each means."""


def json_text(value: Any) -> str:
    """Return `value` as the JSON of a column. Times are in ISO 8601.

    NaN and the infinities, which JSON lacks, become texts: `"-Infinity"`.
    """
    encode = partial(json.dumps, ensure_ascii=False, default=datetime.isoformat)
    try:
        return encode(value, allow_nan=False)
    except ValueError:
        return encode(json.loads(encode(value), parse_constant=str))


def values_of(record: Any) -> dict[str, Any]:
    """Return field -> value of a record."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def utc_now() -> datetime:
    """Return the current time as an aware datetime in UTC, the zone of all timestamp columns."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """The weights that sampled `completion_ids[start:end]`, by the engine's name for them."""

    version: str
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Call:
    """One model call of a session.

    `prompt_ids` is the full prompt. `to_row` stores only the tokens after the parent's prompt and
    completion (`prefix_length` tokens), so that a conversation of T turns takes O(T) tokens on
    disk. `messages` holds only the messages after the parent's conversation and reply. The
    `parsed_` properties parse the columns that hold JSON.

    Attributes:
        prompt_ids: Token ids that the engine was given, shape (P,).
        completion_ids: Sampled token ids, the end-of-turn token included when it was sampled, shape
            (C,).
        logprobs: Natural-log probability of each sampled token under the sampling policy, shape
            (C,).
        weight_versions: Spans that cover `completion_ids` without gap or overlap.
        parent_id: The earlier call whose prompt and completion are a prefix of this prompt; None
            for a root or a rendered call.
        prefix_length: Length of that prefix in tokens.
        kind: Origin of the prompt. `bridged`: the parent's tokens and the tokens of the new
            messages. `root`: rendered, as the conversation has no earlier reply. `rendered`:
            rendered, although it has one.
        kind_reason: Reason why this call is not `bridged`. Of a `bridged` one: that the request
            leaves out the text of the parent's reply, which is in the prompt as it was sampled;
            else None. Of the first call of a fork, a `root`: the recorded call whose tokens its
            prompt continues.
        violation: The invariant that the tokens break (`find_violation`). Such a call is kept and
            left out of traces.
        role_evidence: Header, field or structure of the request that determined `role`; empty for
            the default.
        dialect: Name of the API: `openai-chat`, `openai-responses`, `anthropic-messages` or
            `google-generate-content`; empty for an imported call.
        model: Model name in the harness's request.
        sampling: JSON of the sampling parameters sent to the engine. Key `asked`: options as the
            harness sent them. The engine got those that are also a key beside `asked` (a JSON
            schema: `structured_outputs`) and no others. A few shape the reply once it is sampled
            (`tool_choice` "none": no tool calls). `max_tokens` and `structured_outputs` are in
            `asked` if a budget or an engine changed them, as they were before.
        messages: JSON list of the new messages.
        tools: JSON list of the tools shown to the model; None when they equal the parent's.
        reply: JSON of the assistant message as the harness received it; None when there is none.
        cached_tokens: Prompt tokens that the engine took from its prefix cache; None when it does
            not say.
        engine: URL of the engine that sampled the last token.
    """

    session_id: str
    call_id: str
    parent_id: str | None = None
    kind: CallKind = "root"
    kind_reason: str | None = None
    status: CallStatus = "completed"
    error: str | None = None
    violation: str | None = None
    role: CallRole = "agent"
    role_evidence: str = ""
    dialect: str = ""
    host: str = ""
    path: str = ""
    model: str = ""
    stream: bool = False
    prompt_ids: Sequence[int] = field(repr=False)
    prefix_length: int = 0
    completion_ids: list[int] = field(default_factory=list, repr=False)
    logprobs: list[float] = field(default_factory=list, repr=False)
    weight_versions: list[VersionSpan] = field(default_factory=list, repr=False)
    finish_reason: str | None = None
    sampling: str = field(default="{}", repr=False)
    messages: str = field(default="[]", repr=False)
    tools: str | None = field(default=None, repr=False)
    reply: str | None = field(default=None, repr=False)
    cached_tokens: int | None = None
    engine: str | None = None
    started_at: datetime = field(default_factory=utc_now)
    first_token_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def parsed_messages(self) -> list[dict[str, Any]]:
        """`messages`, parsed: Chat Completions messages.

        A tool call's arguments are an object, or text if not JSON.
        """
        messages: list[dict[str, Any]] = json.loads(self.messages)
        return messages

    @property
    def parsed_reply(self) -> dict[str, Any] | None:
        """`reply`, parsed: one Chat Completions message, arguments of tool calls as JSON text."""
        reply: dict[str, Any] | None = None if self.reply is None else json.loads(self.reply)
        return reply

    @property
    def parsed_tools(self) -> list[dict[str, Any]] | None:
        """`tools`, parsed: Chat Completions tool definitions."""
        tools: list[dict[str, Any]] | None = None if self.tools is None else json.loads(self.tools)
        return tools

    @property
    def parsed_sampling(self) -> dict[str, Any]:
        """`sampling`, parsed."""
        sampling: dict[str, Any] = json.loads(self.sampling)
        return sampling

    @property
    def under_grammar(self) -> bool:
        """True when the engine held the reply to a JSON schema.

        Its log-probabilities are not the policy's.
        """
        name = "structured_outputs"
        # most calls need no parsing
        return name in self.sampling and name in self.parsed_sampling

    def event(self, kind: EventKind, detail: str = "") -> "Event":
        """Return an event about the call."""
        return Event(
            kind=kind,
            session_id=self.session_id,
            host=self.host,
            method="POST",
            path=self.path,
            detail=detail,
            call_id=self.call_id,
        )

    def to_row(self) -> dict[str, Any]:
        """Return the call as a row of `CALL_SCHEMA` without its digest."""
        row = values_of(self)
        del row["prompt_ids"], row["prefix_length"]
        row["prompt_length"] = len(self.prompt_ids)
        row["prompt_tail_ids"] = self.prompt_ids[self.prefix_length :]
        row["weight_versions"] = [asdict(span) for span in self.weight_versions]
        return row


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of one harness on one task; a row of `SESSION_SCHEMA`.

    Attributes:
        group_id: Sessions with the same `group_id` are compared with each other. An empty one makes
            a group of its own.
        exit_status: Exit status of the harness; None when it was stopped or not started.
        reward: None when there is none. Such a session is not trained on. There is none with a
            status of `UNREWARDED`.
        parts: The reward's parts: name -> finite number.
        evidence: JSON values of what the judge saw: tests and their results, the digest of the
            changes, why there is no reward.
        suspicions: Name of a rule -> how often the session matched it.
        error: Why the session is not `completed`.
        revision: Of several rows of a session the one with the highest revision counts; the others
            stay.
        policy_version: The weights that sampled the first token of the session's calls. Without a
            token, those that were expected to.
        harness_version: Version that the program itself reports; empty when it does not.
        program_digest: SHA-256 of the harness's program, and of the files that its preset names.
        preset_digest: SHA-256 of the harness's description.
        task_digest: SHA-256 of the task: its fields, and the files that it names.
        runtime: Where the session ran: `process`, `sandbox`, `container`, `apptainer`, `ssh` or
            `harbor`; empty for a program that rolltap did not start.
        image_digest: Digest of the container image; empty without one.
        queued_seconds: Seconds for which the session waited for its turns, before it was prepared,
            run and judged. It is None, as each of the next three, if the session did not get there.
        preparing_seconds: Seconds in which its workspace and its box were made.
        running_seconds: Seconds of its program.
        judging_seconds: Seconds of its judge.
        retried_seconds: Seconds from the begin of the first attempt to the begin of this one.
    """

    session_id: str
    task_id: str = ""
    group_id: str = ""
    harness: str = ""
    status: SessionStatus
    exit_status: int | None = None
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict, repr=False)
    suspicions: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    revision: int = 0
    policy_version: str | None = None
    harness_version: str = ""
    program_digest: str = field(default="", repr=False)
    preset_digest: str = field(default="", repr=False)
    task_digest: str = field(default="", repr=False)
    runtime: str = ""
    image_digest: str = field(default="", repr=False)
    started_at: datetime = field(default_factory=utc_now)
    finished_at: datetime | None = None
    queued_seconds: float | None = None
    preparing_seconds: float | None = None
    running_seconds: float | None = None
    judging_seconds: float | None = None
    retried_seconds: float | None = None

    def to_row(self) -> dict[str, Any]:
        """Return the session as a row of `SESSION_SCHEMA` without its digest.

        `SESSION_JSON` are JSON texts there.
        """
        row = values_of(self)
        for name in SESSION_JSON:
            row[name] = json_text(row[name])
        return row


@dataclass(slots=True, kw_only=True)
class Event:
    """A fact about the wire that is not a call; a row of `EVENT_SCHEMA`.

    | kind | meaning |
    | --- | --- |
    | `session_started` | a rollout started it; `detail`: a JSON object of task, group and runtime |
    | `call_started` | intent, committed before the engine is asked |
    | `refused` | request to a host or path that is not served |
    | `uncaptured` | request that looks like a model call and was not answered by the recorder |
    | `unauthorised` | bad proxy credentials |
    | `rejected` | model call that was refused for what it asked, before it reached the engine |
    | `unreadable` | model call with tools, refused: the model's tool calls cannot be read |
    | `hidden` | model call with media, of which the model gets a text; `detail`: their number |
    | `controls` | model call with control tokens of the chat format in its texts; `detail`: how \
many, and why the model gets the tokens where a renderer keeps no texts |
    | `budget` | model call that was refused, or reply that was cut: a budget is used up |
    | `fault` | model call that failed because of engine, recorder or machine; without a \
`call_id` it failed before it began |
    | `joined` | retry of a call that was still running |
    | `replayed` | retry that received the finished reply again |
    | `rerun` | request that a recorded call of another session answered: `call_id`; \
`detail`: a JSON object of its run and session |
    | `diverged` | request of a rerun that no recorded call answers; `detail`: the difference |
    | `continued` | engine failure during a call, which went on from the last sampled token |
    | `switched` | the engine lost the session's adapter: it went on with the published policy |
    | `stored` | an entry of a conversation of the Conversations API, before; `detail`: its JSON |
    | `ended` | the session takes no more calls |

    Attributes:
        session_id: None when the credentials did not name one.
        call_id: The call that the event is about; None when it is about none.
    """

    session_id: str | None = None
    call_id: str | None = None
    kind: EventKind
    host: str = ""
    method: str = ""
    path: str = ""
    detail: str = ""
    at: datetime = field(default_factory=utc_now)

    def to_row(self) -> dict[str, Any]:
        """Return the event as a row of `EVENT_SCHEMA` without its digest."""
        return values_of(self)


_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int32(),
    float: pa.float64(),
    bytes: pa.binary(),
    datetime: pa.timestamp("us", tz="UTC"),
    list[int]: pa.list_(pa.int32()),
    list[float]: pa.list_(pa.float32()),
    list[VersionSpan]: pa.list_(
        pa.struct(
            [
                ("version", pa.string()),
                ("start", pa.int32()),
                ("end", pa.int32()),
            ]
        )
    ),
}
"""Type of a field -> type of its column. Any column may have no value. A `Literal` is a string."""


def schema_of(record: type) -> pa.Schema:
    """Return the columns of a record, and the digest."""
    columns: list[tuple[str, pa.DataType]] = []
    for each in fields(record):
        if each.name == "prompt_ids":
            columns.append(("prompt_length", _TYPES[int]))
            columns.append(("prompt_tail_ids", _TYPES[list[int]]))
        elif each.name != "prefix_length":
            kinds = [_TYPES[kind] for kind in (each.type, *get_args(each.type)) if kind in _TYPES]
            columns.append((each.name, kinds[0] if kinds else pa.string()))
    return pa.schema([*columns, (DIGEST, pa.string())])


CALL_SCHEMA = schema_of(Call)
SESSION_SCHEMA = schema_of(Session)
EVENT_SCHEMA = schema_of(Event)


def find_violation(
    completion_ids: Sequence[int],
    logprobs: Sequence[float],
    weight_versions: Sequence[VersionSpan],
    vocabulary: int = 2**31,
    asked: int | None = None,
) -> str | None:
    """Return the first token invariant that a call breaks, in words, or None.

    Invariants: at most `asked` token ids, each one of the vocabulary's; one log-probability per
    token id; every log-probability is finite, at most 0 and not vLLM's sentinel; the weight version
    spans cover the completion without gap or overlap.
    """
    if asked is not None and len(completion_ids) > asked:
        return f"{len(completion_ids)} token ids where at most {asked} were asked"
    for i, token_id in enumerate(completion_ids):
        if not 0 <= token_id < vocabulary:
            return f"token {i} is {token_id}, which is not in the vocabulary"
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
