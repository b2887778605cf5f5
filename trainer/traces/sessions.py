"""Recorded sessions as labelled traces and their ledgers.

A session's label is the reward that trains it, or the reason why it has none. Both follow from its
outcome and its suspicions, by the rules of a recipe.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rolltap.addons.errors import InputError, LedgerError
from rolltap.addons.store.records import UNREWARDED, Session
from rolltap.trainer.traces.build import (
    GroupReward,
    Selection,
    Trace,
    TraceBatch,
    Unrewarded,
    classify_calls,
    require_collection,
    trace_calls,
)
from rolltap.trainer.traces.ledger import (
    CachedPrompts,
    Ledger,
    LeftOut,
    SessionAccount,
    cached_prompts,
)
from rolltap.trainer.traces.reader import CHANGED, RecordedSession, SessionReader
from rolltap.trainer.traces.routing import RecordedRouting
from rolltap.trainer.traces.scores import RecordedScores

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Choice = Literal["judge", "exclude"] | Number


class Outcomes(BaseModel):
    """Rewards of sessions that were not completed, by status: keys of a recipe's table [outcomes].

    `"judge"` keeps the judge's reward, `"exclude"` leaves the sessions out of training and of their
    groups, a number is their reward in place of the judge's. Sessions with the status
    `infrastructure` or `cancelled` never have a reward, and neither have those that were not judged
    because no call of theirs was completed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    failed: Choice = "judge"
    """The harness ended with another status than 0."""
    timeout: Choice = "judge"
    """The harness was stopped at its time limit."""
    budget: Choice = "judge"
    """A budget of the session was used up."""
    unjudged: Literal["exclude"] | Number = "exclude"
    """The judge could not judge."""


Penalty = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Suspicious = Literal["keep", "exclude"] | Penalty
"""Treatment of sessions with evidence of cheating: kept, left out of training and of their groups,
or kept with this number subtracted from their reward."""


@dataclass(frozen=True, slots=True)
class RewardRules:
    """Choices of a recipe that turn outcomes into rewards."""

    outcomes: Outcomes = field(default_factory=Outcomes)
    suspicious: Suspicious = "keep"
    unrewarded: float | None = None
    """The reward of sessions without one of their own, where rewards do not decide.

    By default they are left out.
    """


@dataclass(frozen=True, slots=True)
class Label:
    """The reward that trains a session, or why it has none: one of the two is None."""

    reward: float | None
    reason: LeftOut | None


def session_reward(session: Session | None) -> float | None:
    """Return the recorded reward. A status of `UNREWARDED` has none, whoever recorded one."""
    if session is None or session.status in UNREWARDED:
        return None
    return session.reward


def label_session(session: Session | None, rules: RewardRules) -> Label:
    """Return the label of a session by the rules. A session without a row has no reward."""
    if session is None:
        return Label(None, "no_reward")
    if session.status == "infrastructure" or session.status == "cancelled":
        return Label(None, session.status)
    choice: Choice = getattr(rules.outcomes, session.status, "judge")
    if choice == "exclude":
        if session.status == "unjudged":
            return Label(None, "unjudged")
        return Label(None, "excluded")
    reward = session_reward(session)
    if choice != "judge" and (reward is not None or session.status == "unjudged"):
        reward = choice  # without either the judge was not asked: the policy did nothing
    is_suspected = bool(suspected(session))
    if is_suspected and rules.suspicious == "exclude":
        return Label(None, "suspicious")
    if reward is None and session.error != CHANGED:
        reward = rules.unrewarded
    if reward is None:
        return Label(None, "no_reward")
    if is_suspected and not isinstance(rules.suspicious, str):
        reward -= rules.suspicious
    return Label(reward, None)


def suspected(session: Session | None) -> dict[str, int]:
    """Return rule -> count of the suspicions in a session's row; empty without a row."""
    if session is None:
        return {}
    return {name: count for name, count in session.suspicions.items() if count}


def classify_session(recorded: RecordedSession) -> tuple[list[int | None], list[LeftOut | None]]:
    """Return the parents and reasons of `classify_calls`.

    Without a reason of its own, a call has that of a session without a reward.
    """
    parents, reasons = classify_calls(recorded.calls)
    unrewarded = label_session(recorded.session, RewardRules()).reason
    return parents, [reason or unrewarded for reason in reasons]


@dataclass(frozen=True, slots=True)
class TraceOptions(Selection):
    """Arguments of `build_traces`, and the rules by which sessions get their rewards."""

    rewards: RewardRules = field(default_factory=RewardRules)
    routing: bool = False
    scores: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSession:
    """A session, its labelled traces, the account of its sampled tokens, and its label."""

    recorded: RecordedSession
    traces: list[Trace] = field(repr=False)
    account: SessionAccount = field(repr=False)
    label: Label

    @property
    def ledger(self) -> Ledger:
        """The ledger of its sampled tokens."""
        return self.account.ledger

    @property
    def reward(self) -> float | None:
        """Reward of the session by the rules of its options; None when it has none."""
        return self.label.reward

    @property
    def group_id(self) -> str:
        """Group of the session; its own id when it has none."""
        session = self.recorded.session
        if session is None:
            return self.recorded.session_id
        return session.group_id or session.session_id

    @property
    def suspicions(self) -> dict[str, int]:
        """Rule -> count, of the session's row."""
        return suspected(self.recorded.session)

    def rewarded(self) -> "TracedSession":
        """Return the session as a trainer needs it.

        Without a reward it has no traces, and its tokens are left out for the reason in `label`.
        """
        if self.label.reason is None:
            return self
        account = self.account.leave_out(self.label.reason)
        return replace(self, traces=[], account=account)


@dataclass(slots=True)
class Totals:
    """Counts over sessions: their calls, traces, rewards and sampled tokens.

    Attributes:
        statuses, harnesses, runtimes: Sessions of each.
        suspicious: Sessions with a suspicion.
        traces: Those of sessions without a reward included.
        ledger: As a trainer sees the tokens: those of sessions without a reward are left out for
            the reason of `TracedSession.label`.
    """

    sessions: int = 0
    rewarded: int = 0
    reward_sum: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    harnesses: Counter[str] = field(default_factory=Counter)
    runtimes: Counter[str] = field(default_factory=Counter)
    suspicious: int = 0
    tasks: set[str] = field(default_factory=set)
    calls: int = 0
    traces: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    def add(self, traced: TracedSession) -> None:
        """Add a session."""
        self.sessions += 1
        self.calls += len(traced.recorded.calls)
        self.traces += len(traced.traces)
        self.ledger += traced.rewarded().ledger
        self.suspicious += bool(traced.suspicions)
        session = traced.recorded.session
        if session is not None:
            self.statuses[session.status] += 1
            self.runtimes.update(filter(None, [session.runtime]))
            self.harnesses.update(filter(None, [session.harness]))
            self.tasks.update(filter(None, [session.task_id]))
        if traced.reward is not None:
            self.rewarded += 1
            self.reward_sum += traced.reward


def trace_session(recorded: RecordedSession, options: TraceOptions) -> TracedSession:
    """Build the traces of a session. Traces of a session without a row have no labels.

    Raises `LedgerError` when the ledger does not account for every sampled token of the session.
    """
    routing = None
    scores = None
    if recorded.routing is not None:
        routing = recorded.routing.of(recorded.session_id)
    if recorded.scores is not None:
        scores = recorded.scores.of(recorded.session_id)
    sampled = sum(len(call.completion_ids) for call in recorded.calls)
    try:
        traces, account = trace_calls(recorded.calls, options, routing, scores)
        counted = account.ledger.sampled
        if counted != sampled:
            raise LedgerError(f"the calls hold {sampled} sampled tokens, the ledger says {counted}")
    except LedgerError as error:
        bug = f"session {recorded.session_id}: {error}; this is a bug of rolltap"
        raise LedgerError(bug) from error
    label = label_session(recorded.session, options.rewards)
    traced = TracedSession(
        recorded=recorded,
        traces=traces,
        account=account,
        label=label,
    )
    session = recorded.session
    if session is not None:
        for trace in traces:
            trace.task_id = session.task_id
            trace.group_id = traced.group_id
            trace.harness = session.harness
            trace.reward = label.reward
    return traced


def iter_traces(
    run: Path,
    options: TraceOptions,
    sessions: Collection[str] | None = None,
) -> Iterator[TracedSession]:
    """Yield every session of a run, or those of the ids `sessions`, with its traces.

    Raises `RunError` when the folder cannot be read, and `LedgerError`.
    """
    for recorded in open_sessions(run, options).sessions(sessions):
        yield trace_session(recorded, options)


def open_sessions(run: Path, options: TraceOptions, *, scored: bool = True) -> SessionReader:
    """Return a reader of a run's sessions, with the experts and scores that the options ask for.

    Without `scored`, the scores may still be to come. Raises `RunError`, and as `RecordedScores`.
    """
    routing = None
    scores = None
    if options.routing:
        routing = RecordedRouting(run)
    if options.scores:
        scores = RecordedScores(run, options.scores, some=scored)
    return SessionReader(run, routing=routing, scores=scores)


def load_batch(run: Path, sessions: Collection[str] | None, options: TraceOptions) -> TraceBatch:
    """Return the batch of a run, or of the ids `sessions`.

    Raises as `read_batch` and `open_sessions`.
    """
    if sessions is not None:
        require_collection(sessions)
    return read_batch(open_sessions(run, options), sessions, options)


def read_batch(
    reader: SessionReader,
    sessions: Collection[str] | None,
    options: TraceOptions,
    rows: Mapping[str, Session] = MappingProxyType({}),
) -> TraceBatch:
    """Return the batch of all sessions of a reader, or of those with the ids `sessions`.

    `rows` are session id -> the row that counts, where it is not the one of the highest revision.

    Raises `InputError` when the run does not have one of them; also raises as `trace_session`.
    """
    missing = set(sessions or ()) - set(reader.session_ids)
    if missing:
        raise InputError(f"{reader.run} has no session {min(missing)!r}")

    def traced() -> Iterator[TracedSession]:
        for recorded in reader.sessions(sessions):
            recorded.session = rows.get(recorded.session_id, recorded.session)
            yield trace_session(recorded, options)

    return make_batch(traced())


def make_batch(sessions: Iterable[TracedSession]) -> TraceBatch:
    """Return the batch of sessions. Those without a reward have no traces in it."""
    batch = TraceBatch()
    for traced in sessions:
        traced = traced.rewarded()
        session_id = traced.recorded.session_id
        session = traced.recorded.session or Session(session_id=session_id, status="unknown")
        account = replace(traced.account, group_id=traced.group_id, reward=traced.reward)
        batch.accounts[session_id] = account
        batch.ledger += account.ledger
        batch.traces += traced.traces
        prompts = cached_prompts(traced.recorded.calls).get("bridged")
        if prompts is not None:
            known = batch.continued.get(session.harness, CachedPrompts())
            batch.continued[session.harness] = known + prompts
        labels: dict[str, Any] = {
            "group_id": traced.group_id,
            "status": session.status,
            "suspicions": tuple(traced.suspicions),
        }
        if traced.label.reason is not None:
            batch.unrewarded[session_id] = Unrewarded(reason=traced.label.reason, **labels)
        if traced.reward is not None:
            batch.rewards[session_id] = GroupReward(
                reward=traced.reward,
                task_id=session.task_id,
                harness=session.harness,
                **labels,
            )
    return batch
