"""The sessions of a run, one line each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from rolltap.trainer.rollouts.suspicions.session import EVENT_COLUMNS
from rolltap.trainer.traces.ledger import Ledger
from rolltap.trainer.traces.sessions import TracedSession
from rolltap.trainer.views.inspect import find_suspicions

MOST_SESSIONS = 50
"""Most rows that the printed table of sessions has."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """Counts of one session. `status` and `harness` are None when only its calls were recorded.

    `suspicions` are rule -> count.
    """

    session_id: str
    harness: str | None
    status: str | None
    reward: float | None
    calls: int
    bridged: int
    rendered: int
    ledger: Ledger
    suspicions: dict[str, int]


def session_row(traced: TracedSession, events: Sequence[Mapping[str, Any]]) -> SessionRow:
    """Return the row of a session. `events` have the columns of `EVENT_COLUMNS`."""
    session, calls = traced.recorded.session, traced.recorded.calls
    kinds = Counter(call.kind for call in calls)
    return SessionRow(
        session_id=traced.recorded.session_id,
        harness=session.harness if session else None,
        status=session.status if session else None,
        reward=traced.reward,
        calls=len(calls),
        bridged=kinds["bridged"],
        rendered=kinds["rendered"],
        ledger=traced.ledger,
        suspicions=find_suspicions(traced.recorded, [tuple(event[name] for name in EVENT_COLUMNS) for event in events]),
    )


def session_table(rows: Sequence[SessionRow]) -> Table:
    """Return the table of the first `MOST_SESSIONS` sessions. The column of suspicions is there if one has any."""
    suspected = any(row.suspicions for row in rows)
    columns = ["session", "harness", "status", "reward", "calls", "bridged/\nrendered", "tokens"]
    columns += ["suspicions"] if suspected else []
    cut = f"the first {MOST_SESSIONS} of {len(rows)}; --json has all" if len(rows) > MOST_SESSIONS else None
    # narrow, so that a row fits a terminal of 80 columns
    table = Table(*columns, title="sessions", caption=cut, box=box.SIMPLE, padding=0, pad_edge=False)
    for row in rows[:MOST_SESSIONS]:
        table.add_row(
            Text(row.session_id, overflow="fold"),
            Text(row.harness or ""),
            row.status or "",
            number(row.reward),
            str(row.calls),
            f"{row.bridged}/{row.rendered}",
            str(row.ledger.sampled),
            *([Text("/".join(row.suspicions), overflow="fold")] if suspected else []),
        )
    return table


def number(value: float | None) -> str:
    """Return a mean or a reward as text."""
    return "none" if value is None else f"{value:.3f}"
