"""Facts of a session besides its calls: parts, evidence, suspicions, provenance and earlier rows."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from rolltap.addons.store.records import Session
from rolltap.trainer.views.outcomes import suspicion_rows

_MOST = 10
"""Most entries of a list in the evidence that are printed."""
_PROVENANCE = (
    *("task_id", "group_id", "task_digest", "harness_version", "program_digest", "preset_digest", "runtime"),
    "image_digest",
)


def parsed_session(session: Session) -> dict[str, Any]:
    """Return the row as a dict, the columns that hold JSON parsed."""
    row = session.to_row()
    return row | {name: json.loads(row[name]) for name in ("parts", "evidence", "suspicions")}


def fact_tables(
    session: Session | None, suspicions: Mapping[str, int], diff: str | None, revisions: Sequence[Session]
) -> Iterator[Table]:
    """Yield the tables that have rows. `diff` is the file with the agent's changes; None when there is none."""
    if session is not None:
        row = parsed_session(session)
        facts = [(name, str(row[name])) for name in _PROVENANCE if row[name]]
        facts += [(f"part {name}", f"{value:g}") for name, value in row["parts"].items()]
        if facts:
            yield _table("session", facts)
        if evidence := [*_evidence(row["evidence"]), *([("diff", diff)] if diff else [])]:
            yield _table("evidence", evidence)
    if suspected := suspicion_rows([suspicions]):
        table = Table("rule", "matches", "looks for", "cannot see", title="suspicions")
        for rule in suspected:
            cells = (rule.rule, str(rule.matches), rule.looks_for, rule.cannot_see)
            table.add_row(*(Text(cell, overflow="fold") for cell in cells))
        yield table
    if len(revisions) > 1:
        table = Table("revision", "status", "reward", "ended", title="rows of the session: the last counts")
        for each in revisions:
            ended = each.finished_at.isoformat(timespec="seconds") if each.finished_at else ""
            table.add_row(str(each.revision), each.status, "none" if each.reward is None else f"{each.reward:g}", ended)
        yield table


def _evidence(evidence: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and texts of the evidence. That of several judges follows, with their names before it."""
    for name, value in evidence.items():
        if name == "judges" and isinstance(value, dict):
            for judge, part in value.items():
                yield from _evidence(part, f"{prefix}{judge}: ")
        elif name == "tests" and isinstance(value, dict):
            counts = Counter(value.values())
            yield f"{prefix}tests", ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            if bad := [f"{test}: {outcome}" for test, outcome in value.items() if outcome != "passed"]:
                yield f"{prefix}tests not passed", _listed(bad)
        elif isinstance(value, list):
            if value:
                yield f"{prefix}{name}", _listed(value)
        elif value is not None and value != "" and value != {}:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _listed(values: Sequence[object]) -> str:
    more = f"\n… and {len(values) - _MOST} more" if len(values) > _MOST else ""
    return "\n".join(map(str, values[:_MOST])) + more


def _table(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table("", "", show_header=False, title=title)
    for name, text in rows:
        table.add_row(Text(name), Text(text, overflow="fold"))
    return table
