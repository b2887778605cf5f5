"""Outcomes, rewards, evidence, suspicions and provenance as tables: of the sessions of a run, and
of one session."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import fmean
from typing import Any, get_args

from rich.table import Table
from rich.text import Text

from rolltap.addons.store.records import PHASES, Session, SessionStatus
from rolltap.trainer.console import IdTable
from rolltap.trainer.runs.suspicions.rules import RULES
from rolltap.trainer.traces.sessions import session_reward

_COMPARED = (
    "harness",
    "harness_version",
    "program_digest",
    "task_digest",
    "runtime",
    "image_digest",
)
"""Fields that are the same in all sessions of a group whose rewards can be compared."""
_MOST_NAMED = 3
_MOST_ROWS = 50
_MOST = 10
"""Most entries of a list in the evidence that are printed."""
_FACTS = ("task_id", "group_id", "preset_digest", *_COMPARED[1:])
"""Columns of a session's row that are shown of one session."""
_SHORT = 12
"""Characters of a digest that are shown."""


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """Sessions of one status. The mean is over those with a reward."""

    status: str
    sessions: int
    rewarded: int
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class TaskRow:
    """Sessions of one task, in all its groups. The mean is over those with a reward."""

    task_id: str
    sessions: int
    rewarded: int
    mean_reward: float | None


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part of the rewards: the number of sessions with a reward that have it, and its mean over
    them."""

    name: str
    sessions: int
    mean: float


@dataclass(frozen=True, slots=True)
class SuspicionRow:
    """A rule that sessions matched: their number, and that of all matches."""

    rule: str
    sessions: int
    matches: int
    looks_for: str
    cannot_see: str


@dataclass(frozen=True, slots=True)
class ProvenanceRow:
    """Sessions that ran the same program in the same place. Empty texts are not known."""

    harness: str
    harness_version: str
    program_digest: str
    runtime: str
    image_digest: str
    sessions: int


@dataclass(frozen=True, slots=True)
class MixedGroup:
    """A group whose sessions differ in more than the agent's choices: field -> its values."""

    group_id: str
    values: dict[str, list[str]]


def outcome_rows(sessions: Sequence[Session]) -> list[OutcomeRow]:
    """Return a row for each status that occurs, in the order of `SessionStatus`."""
    means = _means((session.status, session) for session in sessions)
    return [
        OutcomeRow(status, *means[status]) for status in get_args(SessionStatus) if status in means
    ]


def task_rows(sessions: Iterable[Session]) -> list[TaskRow]:
    """Return a row for each task, by its id."""
    means = _means((session.task_id, session) for session in sessions if session.task_id)
    return [TaskRow(task_id, *means[task_id]) for task_id in sorted(means)]


def _means(named: Iterable[tuple[str, Session]]) -> dict[str, tuple[int, int, float | None]]:
    """Return for each name the number of its sessions, of those with a reward, and the mean of the
    rewards."""
    rewards: defaultdict[str, list[float | None]] = defaultdict(list)
    for name, session in named:
        rewards[name].append(session_reward(session))
    known = {
        name: [reward for reward in given if reward is not None] for name, given in rewards.items()
    }
    return {
        name: (len(rewards[name]), len(given), fmean(given) if given else None)
        for name, given in known.items()
    }


def part_rows(sessions: Iterable[Session]) -> list[PartRow]:
    """Return a row for each part of the rewards, by name."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for session in sessions:
        if (
            session_reward(session) is not None
        ):  # several judges leave the parts of those that could judge
            for name, value in session.parts.items():
                parts[name].append(value)
    return [PartRow(name, len(values), fmean(values)) for name, values in sorted(parts.items())]


def suspicion_rows(suspicions: Iterable[Mapping[str, int]]) -> list[SuspicionRow]:
    """Return a row for each rule that a session matched, in the order of the rules; unknown ones
    last.

    `suspicions` are rule -> count of each session.
    """
    sessions: Counter[str] = Counter()
    matches: Counter[str] = Counter()
    for counts in suspicions:
        sessions.update(name for name, count in counts.items() if count)
        matches.update(counts)
    texts = {rule.name: (rule.looks_for, rule.cannot_see) for rule in RULES}
    order = [name for name in [*texts, *sorted(sessions.keys() - texts.keys())] if sessions[name]]
    return [
        SuspicionRow(name, sessions[name], matches[name], *texts.get(name, ("", "")))
        for name in order
    ]


def provenance_rows(sessions: Iterable[Session]) -> list[ProvenanceRow]:
    """Return a row for each program and place, by their names."""
    counts = Counter(
        (each.harness, each.harness_version, each.program_digest, each.runtime, each.image_digest)
        for each in sessions
    )
    return [ProvenanceRow(*key, count) for key, count in sorted(counts.items())]


def mixed_groups(sessions: Iterable[Session]) -> list[MixedGroup]:
    """Return the groups whose sessions with a reward ran other programs, tasks or places, by id.

    A field that is empty in a session is not known, and is left out.
    """
    groups: defaultdict[str, list[Session]] = defaultdict(list)
    for session in sessions:
        if session.group_id and session_reward(session) is not None:
            groups[session.group_id].append(session)
    mixed = []
    for group_id, members in sorted(groups.items()):
        values = {
            name: sorted({getattr(session, name) for session in members} - {""})
            for name in _COMPARED
        }
        if different := {name: found for name, found in values.items() if len(found) > 1}:
            mixed.append(MixedGroup(group_id, different))
    return mixed


def outcome_tables(
    outcomes: Sequence[OutcomeRow],
    tasks: Sequence[TaskRow],
    parts: Sequence[PartRow],
    suspicions: Sequence[SuspicionRow],
    provenance: Sequence[ProvenanceRow],
    mixed: Sequence[MixedGroup],
) -> Iterator[Table]:
    """Yield the tables of a run that have rows."""
    for what, rows in (("outcome", outcomes), ("task", tasks)):
        if rows:
            cells = [
                (*astuple(each)[:3], number(each.mean_reward, "")) for each in rows[:_MOST_ROWS]
            ]
            cut = f": the first {_MOST_ROWS} of {len(rows)}" if len(rows) > _MOST_ROWS else ""
            counts = IdTable(
                what, "sessions", "with a reward", "mean reward", title=f"{what}s{cut}"
            )
            for row in cells:
                counts.add_row(*(Text(str(cell)) for cell in row))
            yield counts
    if parts:
        means = [(row.name, row.sessions, f"{row.mean:.3f}") for row in parts]
        yield make_table("parts of the rewards", ("part", "sessions", "mean"), means)
    if suspicions:
        columns = ("rule", "sessions", "matches", "looks for")
        matched = [(row.rule, row.sessions, row.matches, row.looks_for) for row in suspicions]
        yield make_table("suspicions: no proof, look at the sessions", columns, matched)
    if any(row.harness_version or row.runtime for row in provenance):
        programs = [
            {**asdict(row), "program_digest": row.program_digest[:_SHORT]}.values()
            for row in provenance
        ]
        table = make_table(
            "provenance",
            ("harness", "version", "program", "runtime", "image", "sessions"),
            programs,
        )
        if mixed:
            table.caption = Text(_warning(mixed), "red")
        yield table


def fact_tables(
    session: Session | None,
    suspicions: Mapping[str, int],
    diff: str | None,
    revisions: Sequence[Session],
) -> Iterator[Table]:
    """Yield the tables of a session that have rows. `diff` is the file with the agent's changes, if
    there is one."""
    if session is not None:
        row = asdict(session)
        facts = [(name, row[name]) for name in _FACTS if row[name]]
        if phases := phase_seconds(session):
            shown = [f"{name} {value:.1f} s" for name, value in phases.items()]
            facts.append(("phases", ", ".join(shown)))
        facts += [(f"part {name}", f"{value:g}") for name, value in row["parts"].items()]
        if facts:
            yield make_table("session", ("", ""), facts)
        if evidence := [*_evidence_rows(row["evidence"]), *([("diff", diff)] if diff else [])]:
            yield make_table("evidence", ("", ""), evidence)
    if matched := [
        (r.rule, r.matches, r.looks_for, r.cannot_see) for r in suspicion_rows([suspicions])
    ]:
        yield make_table("suspicions", ("rule", "matches", "looks for", "cannot see"), matched)
    if len(revisions) > 1:
        ends = [
            each.finished_at.isoformat(timespec="seconds") if each.finished_at else ""
            for each in revisions
        ]
        rewards = ["none" if each.reward is None else f"{each.reward:g}" for each in revisions]
        rows = [
            (each.revision, each.status, reward, end)
            for each, reward, end in zip(revisions, rewards, ends, strict=True)
        ]
        yield make_table(
            "rows of the session: the last counts", ("revision", "status", "reward", "ended"), rows
        )


def phase_seconds(session: Session) -> dict[str, float]:
    """Return phase -> seconds, for the phases that a session reached."""
    seconds = {phase: getattr(session, f"{phase}_seconds") for phase in PHASES}
    return {phase: value for phase, value in seconds.items() if value is not None}


def number(value: float | None, unknown: str = "none") -> str:
    """Return a mean or a reward as text."""
    return unknown if value is None else f"{value:.3f}"


def named_counts(numbers: Mapping[str, int]) -> str:
    """Return numbers by name as text."""
    return ", ".join(f"{count} {name}" for name, count in sorted(numbers.items())) or "none"


def _evidence_rows(evidence: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and texts of the evidence. That of several judges follows, with their names
    before it."""
    for name, value in evidence.items():
        if name == "judges" and isinstance(value, dict):
            for judge, part in value.items():
                yield from _evidence_rows(part, f"{prefix}{judge}: ")
        elif name == "tests" and isinstance(value, dict):
            counts = Counter(value.values())
            yield (
                f"{prefix}tests",
                ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())),
            )
            if bad := [
                f"{test}: {outcome}" for test, outcome in value.items() if outcome != "passed"
            ]:
                yield f"{prefix}tests not passed", _listed(bad)
        elif isinstance(value, list):
            if value:
                yield f"{prefix}{name}", _listed(value)
        elif value is not None and value != "" and value != {}:
            yield (
                f"{prefix}{name}",
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
            )


def _listed(values: Sequence[object]) -> str:
    more = f"\n… and {len(values) - _MOST} more" if len(values) > _MOST else ""
    return "\n".join(map(str, values[:_MOST])) + more


def _warning(mixed: Sequence[MixedGroup]) -> str:
    named = "; ".join(
        f"{group.group_id}: "
        + ", ".join(f"{name} {' and '.join(found)}" for name, found in group.values.items())
        for group in mixed[:_MOST_NAMED]
    )
    return (
        f"{len(mixed)} groups mix programs, tasks or places, so that their rewards compare these"
        f" and not the policy: {named}{' …' if len(mixed) > _MOST_NAMED else ''}"
    )


def make_table(title: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return a table of text, which is not markup. Without names of columns it has no header."""
    table = Table(*columns, title=title, show_header=any(columns))
    for row in rows:
        table.add_row(*(Text(str(cell), overflow="fold") for cell in row))
    return table
