"""A run in numbers: counts, rewards by policy version, one line a session, the ledger.

`rich` prints a summary as tables.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from rolltap.addons.store.index import SessionIndex
from rolltap.trainer.console import IdTable
from rolltap.trainer.runs.views.evaluation import PassRow, pass_rows, pass_table
from rolltap.trainer.runs.views.inspect import find_id
from rolltap.trainer.runs.views.outcomes import (
    MixedGroup,
    OutcomeRow,
    PartRow,
    ProvenanceRow,
    SuspicionRow,
    TaskRow,
    VersionRewards,
    mixed_groups,
    outcome_rows,
    part_rows,
    provenance_rows,
    reward_steps,
    suspicion_rows,
    task_rewards,
    task_rows,
)
from rolltap.trainer.runs.views.sessions import (
    Events,
    SessionDigest,
    SessionRow,
    Sort,
    count_rows,
    digest_session,
    session_events,
    session_table,
    sort_key,
)
from rolltap.trainer.runs.views.tables import (
    MOST_ROWS,
    add_rows,
    cut_note,
    make_table,
    named_counts,
    number,
)
from rolltap.trainer.runs.views.training import StepRow, step_rows, step_table
from rolltap.trainer.traces.ledger import CachedPrompts, Ledger
from rolltap.trainer.traces.reader import load_sessions
from rolltap.trainer.traces.sessions import TraceOptions, iter_traces
from rolltap.trainer.traces.trained import TrainedSession, read_trained

_MOST_NAMED = 3
"""Most groups that the warning of mixed groups names."""
_SHORT = 12
"""Characters of a digest that are shown."""


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
            yield _version_table(self.steps)
        if self.session_rows:
            yield session_table(self.session_rows)
        if self.trained:
            yield step_table(self.trained)
        yield _count_table(self)
        if self.outcomes:
            yield _reward_table("outcome", self.outcomes)
        if self.tasks:
            yield _reward_table("task", self.tasks)
        if self.parts:
            means = [(row.name, row.sessions, number(row.mean)) for row in self.parts]
            yield make_table("parts of the rewards", ("part", "sessions", "mean"), means)
        if self.suspicions:
            columns = ("rule", "sessions", "matches", "looks for")
            matched = [astuple(row)[:-1] for row in self.suspicions]
            yield make_table("suspicions: no proof, look at the sessions", columns, matched)
        if any(row.harness_version or row.runtime for row in self.provenance):
            yield _provenance_table(self.provenance, self.mixed)
        if self.passes:
            yield pass_table(self.passes, len(self.tasks))
        if self.cache:
            yield _cache_table(self.cache)
        if self.rendered:
            reasons = Counter(self.rendered).most_common()
            yield make_table("", ("why prompts were rendered", "calls"), reasons)


def _version_table(rows: Iterable[VersionRewards]) -> Table:
    table = make_table("reward", ("policy version", "sessions", "mean reward", "best reward"), ())
    for row in rows:
        rewards = (number(row.mean_reward), number(row.best_reward))
        add_rows(table, [(row.policy_version, row.sessions, *rewards)])
    return table


def _reward_table(what: str, rows: Sequence[OutcomeRow] | Sequence[TaskRow]) -> Table:
    title = f"{what}s{cut_note(rows, ': {}')}"
    table = IdTable(what, "sessions", "with a reward", "mean reward", title=title)
    for row in rows[:MOST_ROWS]:
        *counts, mean = astuple(row)
        add_rows(table, [(*counts, number(mean, ""))])
    return table


def _provenance_table(rows: Iterable[ProvenanceRow], mixed: Sequence[MixedGroup]) -> Table:
    columns = ("harness", "version", "program", "runtime", "image", "sessions")
    shown = [replace(row, program_digest=row.program_digest[:_SHORT]) for row in rows]
    table = make_table("provenance", columns, map(astuple, shown))
    if mixed:
        named = "; ".join(map(_named_values, mixed[:_MOST_NAMED]))
        if len(mixed) > _MOST_NAMED:
            named += " …"
        table.caption = Text(
            f"{len(mixed)} groups mix programs, tasks or places, so that their rewards compare"
            f" these and not the policy: {named}",
            "red",
        )
    return table


def _named_values(group: MixedGroup) -> str:
    values = [f"{name} {' and '.join(found)}" for name, found in group.values.items()]
    return f"{group.group_id}: {', '.join(values)}"


def _cache_table(rows: Sequence[CacheRow]) -> Table:
    """Return the table, with a caption when a cache is next to unused."""
    columns = ("harness", "prompts", "tokens", "cached")
    table = make_table("prompt tokens from the engine's prefix cache", columns, ())
    for row in rows:
        share = ""
        if row.share is not None:
            share = f"{row.share:.1%}"
        add_rows(table, [(row.harness, row.kind, row.prompts.prompt_tokens, share)])
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


def _count_table(summary: Summary) -> Table:
    counts = [
        ("sessions", named_counts(summary.sessions)),
        ("calls", named_counts(summary.calls)),
        ("roles", named_counts(summary.roles)),
        ("prompts", named_counts(summary.kinds)),
    ]
    table = make_table("recorded", ("", ""), counts)
    add_rows(table, _ledger_lines(summary))
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
    }
    add_rows(table, [(note, count) for note, count in notes.items() if count])
    if summary.refused:
        add_rows(table, [("refused hosts", named_counts(summary.refused))])
    return table


def _ledger_lines(summary: Summary) -> list[tuple[str, int]]:
    """Return the lines of the ledger. Tokens that steps have trained are told from those that are
    still to train."""
    taken = [row for row in summary.session_rows if row.step is not None]
    lines = summary.ledger.lines()
    if taken:
        done = sum(row.ledger.trained for row in taken)
        what = f"  trained, in the newest step of {len(taken)} sessions"
        lines[1:2] = [(what, done), ("  to train, in no step yet", summary.ledger.trained - done)]
    return lines


def summarize(
    run: Path,
    *,
    task: str | None = None,
    group: str | None = None,
    sort: Sort = "started",
) -> Summary:
    """Return the summary of a run; with `task` or `group`, an id or a unique prefix, of the
    sessions that have it.

    Events without a session are then left out. Memory is that of one session.

    Raises `RunError` when the folder cannot be read, `InputError` for a task or group that it does
    not have, and `LedgerError`.
    """
    chosen = None
    if task is not None or group is not None:
        chosen = _chosen_sessions(run, {"task": task, "group": group})
    trained = read_trained(run)
    newest = {each.session_id: each for each in trained}
    digests = []
    further = []
    with SessionIndex(run, "events") as index:
        for traced in iter_traces(run, TraceOptions(), chosen):
            session_id = traced.recorded.session_id
            events = session_events(index, session_id)
            digests.append(digest_session(traced, events, newest.get(session_id)))
        if chosen is None:
            known = {digest.row.session_id for digest in digests}
            for other in set(index.session_ids) - known:
                further += session_events(index, other)
    summary = summarize_digests(digests, further, trained)
    rows = sorted(summary.session_rows, key=partial(sort_key, sort=sort))
    return replace(summary, session_rows=rows)


def _chosen_sessions(run: Path, prefixes: Mapping[str, str | None]) -> set[str]:
    """Return the ids of the sessions of a task and a group. Raises `InputError` for one without
    sessions."""
    chosen = list(load_sessions(run).values())
    for name, prefix in prefixes.items():
        if prefix is not None:
            id_of = attrgetter(f"{name}_id")
            value = find_id(prefix, set(map(id_of, chosen)) - {""}, name, str(run))
            chosen = [session for session in chosen if id_of(session) == value]
    return {session.session_id for session in chosen}


def summarize_digests(
    digests: Iterable[SessionDigest], further: Events = (), trained: Sequence[TrainedSession] = ()
) -> Summary:
    """Return the summary of sessions, of `further` events, of no session among them, and of the
    steps that took them.

    `trained` are the sessions of the run's optimizer steps, by step; others may be among them.
    """
    digests = sorted(digests, key=attrgetter("started_at", "row.session_id"))
    rows = [digest.row for digest in digests]
    sessions = [digest.session for digest in digests if digest.session is not None]
    counts = count_rows([], further)
    cached: defaultdict[tuple[str, str], CachedPrompts] = defaultdict(CachedPrompts)
    for digest in digests:
        for name, values in digest.counts.items():
            counts[name].update(values)
        for kind, prompts in digest.cached.items():
            cached[digest.row.harness or "", kind] += prompts
    events = counts["events"]
    passes = []
    if len({session.policy_version for session in sessions}) == 1:
        passes = pass_rows(task_rewards(sessions))  # a training has sessions of many policies
    # a training from recorded runs has the steps, and no sessions of its own
    known = {row.session_id for row in rows} or None
    return Summary(
        sessions=dict(Counter(session.status for session in sessions)),
        calls=dict(counts["calls"]),
        kinds=dict(counts["kinds"]),
        rendered=dict(counts["rendered"]),
        roles=dict(counts["roles"]),
        violations=dict(counts["violations"]),
        refused=dict(counts["refused"]),
        uncaptured_calls=events["uncaptured"],
        retried=events["joined"] + events["replayed"],
        continued=events["continued"],
        switched=events["switched"],
        rejected=events["rejected"] + events["unreadable"],
        hidden=events["hidden"],
        faults=events["fault"],
        unauthorised=events["unauthorised"],
        interrupted=events["interrupted"],
        ledger=sum((row.ledger for row in rows), Ledger()),
        steps=reward_steps(sessions),
        cache=list(_cache_rows(cached)),
        outcomes=outcome_rows(sessions),
        tasks=task_rows(sessions),
        passes=passes,
        parts=part_rows(sessions),
        suspicions=suspicion_rows(row.suspicions for row in rows),
        provenance=provenance_rows(sessions),
        mixed=mixed_groups(sessions),
        session_rows=rows,
        trained=step_rows(trained, known),
    )


def _cache_rows(cached: Mapping[tuple[str, str], CachedPrompts]) -> Iterator[CacheRow]:
    for (harness, kind), prompts in sorted(cached.items()):
        yield CacheRow(harness, kind, prompts, prompts.share, prompts.unused)
