"""The verdict of a soak: every row of the run and every reply of a client, compared with what the
engine sent."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rolltap.addons.store.records import Call
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.traces.reader import iter_sessions
from tests.bench.load import Received
from tests.bench.model import Model


@dataclass
class Verdict:
    """Counts of one part of a soak: before chaos, and from then on."""

    calls: int = 0
    tokens: int = 0
    mismatches: int = 0
    """Tokens or log-probabilities that differ from the engine's, and tokens that a completed call
    lacks."""
    received: int = 0
    missing: int = 0
    """Replies that a client received whole and that no row holds."""
    differing: int = 0
    """Replies whose text or tool calls are not those of their row, or whose row is another
    session's."""
    doubles: int = 0
    """Replies that are in two rows, or that a client received for two requests."""
    unheard: int = 0
    """Completed calls that no client received whole."""
    excluded: int = 0
    """Calls that break an invariant, and are not trained on."""
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Why calls were rendered."""

    @property
    def wrong(self) -> int:
        """Number of findings that no recorder may have."""
        return self.mismatches + self.missing + self.differing + self.doubles

    def add(self, call: Call, model: Model, replies: list[Received]) -> None:
        """Compare a row with the tokens that the engine sent, and with the replies of clients."""
        length = len(call.completion_ids)
        self.calls += 1
        self.tokens += length
        self.kinds[call.kind] += 1
        self.statuses[call.status] += 1
        self.excluded += call.violation is not None
        if call.kind == "rendered":
            self.reasons[first_words(call)] += 1
        expected = model.complete(call.prompt_ids, call.completion_ids)
        self.mismatches += _differences(call.completion_ids, expected.token_ids[:length])
        self.mismatches += _differences(call.logprobs, expected.logprobs[:length])
        if call.status == "completed":
            self.mismatches += max(0, len(expected.token_ids) - length)
            self.unheard += not replies
        self.received += len(replies)
        self.doubles += max(0, len(replies) - 1)
        for reply in replies:
            self.differing += _said(call) != (reply.session_id, reply.text, reply.calls)


def judge(run: Path, model: Model, replies: list[Received], chaos: float) -> list[Verdict]:
    """Return the verdict on the calls before `chaos`, a `time.time`, and on those from then on.

    A received reply counts with its call; one without a row counts by its end.
    """
    parts = [Verdict(), Verdict()]
    rows = Counter(row["call_id"] for row in read_rows(run, "calls"))
    by_call: dict[str, list[Received]] = {}
    for reply in replies:
        by_call.setdefault(reply.call_id, []).append(reply)
    if not rows or max(rows.values()) == 1:  # the reader refuses a run with a call in two rows
        for session in iter_sessions(run):
            for call in session.calls:
                part = parts[call.started_at.timestamp() >= chaos]
                part.add(call, model, by_call.pop(call.call_id, []))
    for call_id, left in by_call.items():
        part = parts[left[0].at >= chaos]
        part.received += len(left)
        part.doubles += rows[call_id] > 1
        part.missing += rows[call_id] == 0
    return parts


def _differences(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    both = min(len(ours), len(theirs))
    unequal = np.asarray(ours[:both]) != np.asarray(theirs[:both])
    return int(unequal.sum()) + max(len(ours), len(theirs)) - both


def _said(call: Call) -> tuple[str, str | None, list[tuple[str, Any]]]:
    message = json.loads(call.reply or "{}")
    functions = [tool_call["function"] for tool_call in message.get("tool_calls", [])]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return call.session_id, message.get("content"), calls


def first_words(call: Call) -> str:
    """Return a reason without the numbers and names of its session."""
    return re.sub(r"call \S+|\d+", "…", (call.kind_reason or "").split(": ")[0])
