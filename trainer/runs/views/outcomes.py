"""Outcomes, parts of rewards, suspicions and provenance of a run's sessions, as tables."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import get_args

from rich.table import Table
from rich.text import Text

from rolltap.addons.store.records import Session, SessionStatus
from rolltap.trainer.runs.suspicions.rules import RULES
from rolltap.trainer.traces.sessions import session_reward

_COMPARED = ("harness", "harness_version", "program_digest", "task_digest", "runtime", "image_digest")
"""Fields that are the same in all sessions of a group whose rewards can be compared."""
_MOST_NAMED = 3
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
class PartRow:
    """A part of the rewards: the number of sessions that have it, and its mean over them."""

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
    rows = []
    for status in get_args(SessionStatus):
        of_status = [session for session in sessions if session.status == status]
        rewards = [reward for reward in map(session_reward, of_status) if reward is not None]
        if of_status:
            rows.append(OutcomeRow(status, len(of_status), len(rewards), fmean(rewards) if rewards else None))
    return rows


def part_rows(sessions: Iterable[Session]) -> list[PartRow]:
    """Return a row for each part of the rewards, by name."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for session in sessions:
        for name, value in json.loads(session.parts).items():
            parts[name].append(value)
    return [PartRow(name, len(values), fmean(values)) for name, values in sorted(parts.items())]


def suspicion_rows(suspicions: Iterable[Mapping[str, int]]) -> list[SuspicionRow]:
    """Return a row for each rule that a session matched, in the order of the rules; unknown ones last.

    `suspicions` are rule -> count of each session.
    """
    sessions: Counter[str] = Counter()
    matches: Counter[str] = Counter()
    for counts in suspicions:
        sessions.update(name for name, count in counts.items() if count)
        matches.update(counts)
    texts = {rule.name: (rule.looks_for, rule.cannot_see) for rule in RULES}
    order = [name for name in [*texts, *sorted(sessions.keys() - texts.keys())] if sessions[name]]
    return [SuspicionRow(name, sessions[name], matches[name], *texts.get(name, ("", ""))) for name in order]


def provenance_rows(sessions: Iterable[Session]) -> list[ProvenanceRow]:
    """Return a row for each program and place, by their names."""
    counts = Counter(
        (each.harness, each.harness_version, each.program_digest, each.runtime, each.image_digest) for each in sessions
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
        values = {name: sorted({getattr(session, name) for session in members} - {""}) for name in _COMPARED}
        if different := {name: found for name, found in values.items() if len(found) > 1}:
            mixed.append(MixedGroup(group_id, different))
    return mixed


def outcome_tables(
    outcomes: Sequence[OutcomeRow],
    parts: Sequence[PartRow],
    suspicions: Sequence[SuspicionRow],
    provenance: Sequence[ProvenanceRow],
    mixed: Sequence[MixedGroup],
) -> Iterator[Table]:
    """Yield the tables that have rows."""
    if outcomes:
        yield _table(
            "outcomes",
            ("outcome", "sessions", "with a reward", "mean reward"),
            [
                (row.status, row.sessions, row.rewarded, "" if row.mean_reward is None else f"{row.mean_reward:.3f}")
                for row in outcomes
            ],
        )
    if parts:
        means = [(row.name, row.sessions, f"{row.mean:.3f}") for row in parts]
        yield _table("parts of the rewards", ("part", "sessions", "mean"), means)
    if suspicions:
        rows = [(row.rule, row.sessions, row.matches, row.looks_for) for row in suspicions]
        yield _table("suspicions: no proof, look at the sessions", ("rule", "sessions", "matches", "looks for"), rows)
    if any(row.harness_version or row.runtime for row in provenance):
        columns = ("harness", "version", "program", "runtime", "image", "sessions")
        table = _table(
            "provenance",
            columns,
            [
                (
                    row.harness,
                    row.harness_version,
                    row.program_digest[:_SHORT],
                    row.runtime,
                    row.image_digest,
                    row.sessions,
                )
                for row in provenance
            ],
        )
        if mixed:
            table.caption = Text(_warning(mixed), "red")
        yield table


def _warning(mixed: Sequence[MixedGroup]) -> str:
    named = "; ".join(
        f"{group.group_id}: " + ", ".join(f"{name} {' and '.join(found)}" for name, found in group.values.items())
        for group in mixed[:_MOST_NAMED]
    )
    return (
        f"{len(mixed)} groups mix programs, tasks or places, so that their rewards compare these and not the policy: "
        f"{named}{' …' if len(mixed) > _MOST_NAMED else ''}"
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(Text(str(cell), overflow="fold") for cell in row))
    return table
