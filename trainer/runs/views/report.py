"""A run in numbers: counts, rewards by policy version, one line a session, the ledger; and its
rewards as a picture.

`rich` prints a summary as tables.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from rolltap.addons.store.index import SessionIndex, TableScan
from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call, CallKind, Session
from rolltap.addons.store.rewards import make_session
from rolltap.addons.store.tables import batch_rows
from rolltap.trainer.console import IdTable
from rolltap.trainer.names import Version
from rolltap.trainer.runs.views.evaluation import PassRow, pass_rows, pass_table, rewards_of
from rolltap.trainer.runs.views.inspect import find_id, session_events, session_suspicions
from rolltap.trainer.runs.views.outcomes import (
    MixedGroup,
    OutcomeRow,
    PartRow,
    ProvenanceRow,
    SuspicionRow,
    TaskRow,
    make_table,
    mixed_groups,
    named_counts,
    number,
    outcome_rows,
    outcome_tables,
    part_rows,
    provenance_rows,
    suspicion_rows,
    task_rows,
)
from rolltap.trainer.runs.views.training import StepRow, step_rows, step_table
from rolltap.trainer.traces.ledger import CachedPrompts, Ledger, cached_prompts
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.traces.sessions import TracedSession, TraceOptions, iter_traces, session_reward
from rolltap.trainer.traces.trained import TrainedSession, read_trained


@dataclass(frozen=True, slots=True)
class CacheRow:
    """Prompt tokens that the engine took from its prefix cache, of the calls of one kind of one
    harness."""

    harness: str
    """Empty when it is not known."""
    kind: str
    prompts: CachedPrompts
    share: float | None
    """Cached tokens of a prompt token."""
    unused: bool
    """True when next to nothing of the parents' tokens came from the cache: see
    `CachedPrompts.unused`."""


def cache_table(rows: Sequence[CacheRow]) -> Table:
    """Return the table, with a caption when a cache is next to unused."""
    shares = ["" if row.share is None else f"{row.share:.1%}" for row in rows]
    cells = [
        (row.harness, row.kind, row.prompts.prompt_tokens, share)
        for row, share in zip(rows, shares, strict=True)
    ]
    table = make_table(
        "prompt tokens from the engine's prefix cache",
        ("harness", "prompts", "tokens", "cached"),
        cells,
    )
    unused = sorted({row.harness or "unknown" for row in rows if row.unused})
    if unused:
        table.caption = Text(
            f"Continued calls ({', '.join(unused)}) take next to nothing from the cache: each turn"
            " computes its whole prompt again. Check that the engine caches prefixes of this model"
            " (--enable-prefix-caching), has memory for them, and that sessions stay on one"
            " engine.",
            "red",
        )
    return table


MOST_SESSIONS = 50
"""Most rows that the printed table of sessions has."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """Counts of one session. What is of the session's row is None when only its calls were
    recorded.

    Attributes:
        ledger: As the newest optimizer step trained its tokens; as a training would, when no step
            took the session.
        suspicions: Rule -> count.
        step: The newest optimizer step that took the session, by the table `trained`; None when
            there is none.
        advantage, reason: Those of the session in that step.
    """

    session_id: str
    task_id: str | None
    group_id: str | None
    harness: str | None
    status: str | None
    reward: float | None
    calls: int
    bridged: int
    rendered: int
    ledger: Ledger
    suspicions: dict[str, int]
    step: int | None = None
    advantage: float | None = None
    reason: str | None = None


Sort = Literal["started", "reward", "tokens", "calls", "task"]
"""Orders of sessions: by their start, the highest reward, the most tokens or calls first, or by
task."""


_ORDERS: dict[Sort, Callable[[SessionRow], Any]] = {
    "started": lambda row: 0,
    "reward": lambda row: (row.reward is None, -(row.reward or 0.0)),
    "tokens": lambda row: -row.ledger.sampled,
    "calls": lambda row: -row.calls,
    "task": lambda row: row.task_id or "",
}


def session_table(rows: Sequence[SessionRow]) -> Table:
    """Return the table of the first `MOST_SESSIONS` sessions. The column of suspicions is there if
    one has any."""
    suspected = any(row.suspicions for row in rows)
    columns = ["session", "status", "reward", "calls", "tokens", "harness", "bridged/rendered"]
    columns += ["suspicions"] if suspected else []
    cut = (
        f"the first {MOST_SESSIONS} of {len(rows)}; --json has all"
        if len(rows) > MOST_SESSIONS
        else None
    )
    table = IdTable(
        *columns, title="sessions", caption=cut, box=box.SIMPLE, padding=0, pad_edge=False
    )
    for row in rows[:MOST_SESSIONS]:
        table.add_row(
            Text(row.session_id),
            row.status or "",
            number(row.reward),
            str(row.calls),
            str(row.ledger.sampled),
            Text(row.harness or ""),
            f"{row.bridged}/{row.rendered}",
            *([Text("/".join(row.suspicions), overflow="fold")] if suspected else []),
        )
    return table


@dataclass(frozen=True, slots=True)
class VersionRewards:
    """Rewards of the sessions of one policy version."""

    policy_version: str
    """As `weights_name` returns it."""
    sessions: int
    mean_reward: float | None
    best_reward: float | None


@dataclass(frozen=True, slots=True)
class Summary(JupyterMixin):
    """Counts over a run.

    Attributes:
        rendered: Reason why prompts were rendered in full, with ids and numbers replaced by an
            ellipsis -> number of calls.
        uncaptured_calls: Requests that look like model calls and were not answered by the recorder.
            Each is a gap in the record.
        retried: Requests that received the reply of an earlier call. That call is recorded once.
        continued: Failures of an engine during a call after which the call continued.
        switched: Calls of sessions whose adapter the engine no longer had, and which continued with
            other weights.
        rejected: Requests to a model API that were refused for what they asked, before a call
            began.
        hidden: Calls with images, audio or files, of which the model got a text instead.
        faults: Requests to a model API that failed because of the engine, the recorder or the
            machine.
        unauthorised: Requests with bad proxy credentials.
        interrupted: Calls that began and were not recorded: they run, or the recorder was killed.
        cache: By harness and kind of call; only calls whose engine says what it took from its
            cache.
        outcomes: Of the sessions that have a row, as all that follows here, with the exception of
            `suspicions`, which counts sessions without a row too, by their calls so far.
        mixed: Groups whose sessions ran other programs, tasks or places.
        session_rows: In the order in which the sessions started, or in that of `summarize`.
        trained: The optimizer steps that took these sessions, by the table `trained`. With it
            `ledger` has the tokens of a session as its newest step trained them.
    """

    sessions: dict[str, int]
    calls: dict[str, int]
    kinds: dict[str, int]
    rendered: dict[str, int] = field(repr=False)
    roles: dict[str, int]
    violations: dict[str, int]
    refused: dict[str, int]
    uncaptured_calls: int
    retried: int
    continued: int
    switched: int
    rejected: int
    hidden: int
    faults: int
    unauthorised: int
    interrupted: int
    ledger: Ledger
    steps: list[VersionRewards]
    cache: list[CacheRow] = field(repr=False)
    outcomes: list[OutcomeRow]
    tasks: list[TaskRow] = field(repr=False)
    passes: list[PassRow] = field(repr=False)
    parts: list[PartRow] = field(repr=False)
    suspicions: list[SuspicionRow] = field(repr=False)
    provenance: list[ProvenanceRow] = field(repr=False)
    mixed: list[MixedGroup] = field(repr=False)
    session_rows: list[SessionRow] = field(repr=False)
    trained: list[StepRow] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.steps:
            columns = ("policy version", "sessions", "mean reward", "best reward")
            steps = [
                (s.policy_version, s.sessions, number(s.mean_reward), number(s.best_reward))
                for s in self.steps
            ]
            yield make_table("reward", columns, steps)
        if self.session_rows:
            yield session_table(self.session_rows)
        if self.trained:
            yield step_table(self.trained)
        yield _count_table(self)
        yield from outcome_tables(
            self.outcomes, self.tasks, self.parts, self.suspicions, self.provenance, self.mixed
        )
        if self.passes:
            yield pass_table(self.passes, len(self.tasks))
        if self.cache:
            yield cache_table(self.cache)
        if self.rendered:
            yield make_table(
                "", ("why prompts were rendered", "calls"), Counter(self.rendered).most_common()
            )


@dataclass(frozen=True, slots=True)
class SessionDigest:
    """One session in counts, without its calls: the summary of a run is made of these.

    Attributes:
        session: The session's row; None when only its calls were recorded.
        counts: Name of a count of `Summary`, or `events` -> its values -> how often the session has
            them.
        cached: Kind of call -> its prompts.
        started_at: Start of the session; of its first call when it has no row.
    """

    row: SessionRow
    session: Session | None = field(repr=False)
    counts: dict[str, Counter[str]] = field(repr=False)
    cached: dict[CallKind, CachedPrompts] = field(repr=False)
    started_at: datetime


def digest_session(
    traced: TracedSession,
    events: Sequence[Mapping[str, Any]],
    trained: TrainedSession | None = None,
) -> SessionDigest:
    """Return the digest of a session and its `session_events`. `trained` is the session in its
    newest step."""
    session, calls = traced.recorded.session, traced.recorded.calls
    kinds = Counter[str](call.kind for call in calls)
    row = SessionRow(
        session_id=traced.recorded.session_id,
        **{
            name: getattr(session, name, None)
            for name in ("task_id", "group_id", "harness", "status")
        },
        reward=traced.reward,
        calls=len(calls),
        bridged=kinds["bridged"],
        rendered=kinds["rendered"],
        ledger=trained.ledger if trained else traced.rewarded().ledger,
        suspicions=session_suspicions(traced.recorded, events),
        **{name: getattr(trained, name, None) for name in ("step", "advantage", "reason")},
    )
    counts = {
        "calls": Counter[str](call.status for call in calls),
        "kinds": kinds,
        "rendered": Counter(
            _without_ids(call.kind_reason or "") for call in calls if call.kind == "rendered"
        ),
        "roles": Counter[str](call.role for call in calls),
        "violations": Counter(call.violation for call in calls if call.violation),
        **_count_events(events, calls),
    }
    return SessionDigest(
        row=row,
        session=session,
        counts=counts,
        cached=cached_prompts(calls),
        started_at=session.started_at if session else calls[0].started_at,
    )


def summarize(
    run: Path, *, task: str | None = None, group: str | None = None, sort: Sort = "started"
) -> Summary:
    """Return the summary of a run; with `task` or `group`, an id or a unique prefix, of the
    sessions that have it.

    Events without a session are then left out. Memory is that of one session.

    Raises `RunError` when the folder cannot be read, `InputError` for a task or group that it does
    not have, and `LedgerError`.
    """
    sessions = None if task is None and group is None else chosen_sessions(run, task, group)
    trained = read_trained(run)
    newest = {each.session_id: each for each in trained}
    with SessionIndex(run, "events") as index:
        digests = []
        for traced in iter_traces(run, TraceOptions(), sessions):
            session_id = traced.recorded.session_id
            digests.append(
                digest_session(traced, session_events(index, session_id), newest.get(session_id))
            )
        others = (
            set(index.session_ids) - {digest.row.session_id for digest in digests}
            if sessions is None
            else ()
        )
        further = [event for session_id in others for event in session_events(index, session_id)]
    summary = summarize_digests(digests, further, trained)
    return replace(summary, session_rows=sorted(summary.session_rows, key=_ORDERS[sort]))


def chosen_sessions(run: Path, task: str | None, group: str | None) -> set[str]:
    """Return the ids of the sessions of a task and a group, if given. Raises `InputError` for one
    without sessions."""
    chosen = list(load_sessions(run).values())
    for name, prefix in (("task", task), ("group", group)):
        if prefix is not None:
            values = {getattr(session, f"{name}_id") for session in chosen} - {""}
            value = find_id(prefix, values, name, str(run))
            chosen = [session for session in chosen if getattr(session, f"{name}_id") == value]
    return {session.session_id for session in chosen}


def follow_sessions(
    run: Path, task: str | None = None, group: str | None = None, *, wait: Callable[[], object]
) -> Iterator[Session]:
    """Yield the rows of the sessions, then each further one; `wait` is called when there is none.
    It does not end.

    `task` and `group` are whole ids: no session may have them yet. Raises `RunError` when the
    folder cannot be read.
    """
    read_metadata(run)
    scan, seen = TableScan(run, "sessions"), set[tuple[str, int]]()
    while True:
        for commits in scan.new():
            for row in (row for _, batch in commits.batches for row in batch_rows(batch)):
                session = make_session(row)
                key = session.session_id, session.revision  # a compacted file is read again
                if (
                    key not in seen
                    and task in (None, session.task_id)
                    and group in (None, session.group_id)
                ):
                    seen.add(key)
                    yield session
        wait()


def summarize_digests(
    digests: Iterable[SessionDigest],
    further: Sequence[Mapping[str, Any]] = (),
    trained: Sequence[TrainedSession] = (),
) -> Summary:
    """Return the summary of sessions, of `further` events, of no session among them, and of the
    steps that took them.

    `trained` are the sessions of the run's optimizer steps, by step; others may be among them.
    """
    digests = sorted(digests, key=lambda digest: (digest.started_at, digest.row.session_id))
    rows = [digest.row for digest in digests]
    sessions = [digest.session for digest in digests if digest.session is not None]
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for counted in [*(digest.counts for digest in digests), _count_events(further)]:
        for name, values in counted.items():
            counts[name].update(values)
    cached: defaultdict[tuple[str, str], CachedPrompts] = defaultdict(CachedPrompts)
    for digest in digests:
        for kind, prompts in digest.cached.items():
            cached[digest.row.harness or "", kind] += prompts
    kinds = counts["events"]
    return Summary(
        sessions=dict(Counter(session.status for session in sessions)),
        **{
            name: dict(counts[name])
            for name in ("calls", "kinds", "rendered", "roles", "violations", "refused")
        },
        uncaptured_calls=kinds["uncaptured"],
        retried=kinds["joined"] + kinds["replayed"],
        continued=kinds["continued"],
        switched=kinds["switched"],
        rejected=kinds["rejected"] + kinds["unreadable"],
        hidden=kinds["hidden"],
        faults=kinds["fault"],
        unauthorised=kinds["unauthorised"],
        interrupted=kinds["interrupted"],
        ledger=sum((row.ledger for row in rows), Ledger()),
        steps=reward_steps(sessions),
        cache=[
            CacheRow(*key, prompts, prompts.share, prompts.unused)
            for key, prompts in sorted(cached.items())
        ],
        outcomes=outcome_rows(sessions),
        tasks=task_rows(sessions),
        # a training has sessions of many policies
        passes=(
            pass_rows(rewards_of(sessions))
            if len({session.policy_version for session in sessions}) == 1
            else []
        ),
        parts=part_rows(sessions),
        suspicions=suspicion_rows(row.suspicions for row in rows),
        provenance=provenance_rows(sessions),
        mixed=mixed_groups(sessions),
        session_rows=rows,
        # a training from recorded runs has the steps, and no sessions of its own
        trained=step_rows(trained, {row.session_id for row in rows} or None),
    )


def _count_events(
    events: Sequence[Mapping[str, Any]], calls: Sequence[Call] = ()
) -> dict[str, Counter[str]]:
    """Count events by kind, and calls that began and are not among `calls` as `interrupted`."""
    kinds = Counter[str](event["kind"] for event in events)
    began = {event["call_id"] for event in events if event["kind"] == "call_started"}
    kinds["interrupted"] = len(began - {call.call_id for call in calls})
    return {
        "events": kinds,
        "refused": Counter(event["host"] for event in events if event["kind"] == "refused"),
    }


def reward_steps(sessions: Iterable[Session]) -> list[VersionRewards]:
    """Return one entry per policy version, in the order of first use. A fault has no reward."""
    versions: defaultdict[str, list[Session]] = defaultdict(list)
    for session in sorted(sessions, key=lambda session: session.started_at):
        versions[weights_name(session)].append(session)
    steps = []
    for version, group in versions.items():
        rewards = [reward for reward in map(session_reward, group) if reward is not None]
        mean, best = (fmean(rewards), max(rewards)) if rewards else (None, None)
        steps.append(VersionRewards(version, len(group), mean, best))
    return steps


def weights_name(session: Session) -> str:
    """Return the policy version of a session without its attempt: the attempts at a step have the
    same weights.

    A version of another form stays as it is. Without one the name is `default`, as in vLLM.
    """
    name = session.policy_version or "default"
    version = Version.parse(name)
    return f"{version.run}.{version.step}" if version else name


def _count_table(summary: Summary) -> Table:
    table = make_table(
        "recorded",
        ("", ""),
        [
            ("sessions", named_counts(summary.sessions)),
            ("calls", named_counts(summary.calls)),
            ("roles", named_counts(summary.roles)),
            ("prompts", named_counts(summary.kinds)),
            *_ledger_lines(summary),
        ],
    )
    for violation, count in summary.violations.items():
        table.add_row("violation", Text(f"{count} calls: {violation}"), style="red")
    if summary.uncaptured_calls:
        table.add_row("uncaptured model calls", str(summary.uncaptured_calls), style="red")
    notes = {
        "retried requests": summary.retried,
        "continued after an engine failure": summary.continued,
        "continued with other weights": summary.switched,
        "rejected requests": summary.rejected,
        "calls with hidden images or files": summary.hidden,
        "requests that failed by a fault": summary.faults,
        "unauthorised requests": summary.unauthorised,
        "interrupted calls": summary.interrupted,
        "refused hosts": named_counts(summary.refused) if summary.refused else "",
    }
    for note, count_or_names in notes.items():
        if count_or_names:
            table.add_row(note, Text(str(count_or_names)))
    return table


def _ledger_lines(summary: Summary) -> list[tuple[str, int]]:
    """Return the lines of the ledger. What steps have trained is told from what is still to
    train."""
    taken = [row for row in summary.session_rows if row.step is not None]
    lines = summary.ledger.lines()
    if taken:
        done = sum(row.ledger.trained for row in taken)
        what = f"  trained, in the newest step of {len(taken)} sessions"
        lines[1:2] = [(what, done), ("  to train, in no step yet", summary.ledger.trained - done)]
    return lines


def _without_ids(reason: str) -> str:
    """Replace hexadecimal ids and numbers by an ellipsis, so that equal reasons count together."""
    return re.sub(r"\b([0-9a-f]{16,}|[0-9]+)\b", "…", reason)
