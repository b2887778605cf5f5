"""Experts of traces: the rows of its calls joined. A row has the tokens that the parent's lacks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolltap.addons.store.index import SessionIndex
from rolltap.addons.store.records import Call


class Experts(NamedTuple):
    """Experts of a call's tokens, or of those from one on."""

    first: int
    """Position of the first of these tokens, in prompt and completion."""
    chosen: NDArray[np.integer[Any]]
    """Numbers of experts, shape (tokens, layers, top_k)."""


class RecordedRouting(SessionIndex):
    """The experts of a run's tokens, read from the disk when they are asked for. Not thread-safe.

    Raises `RunError` when the folder cannot be read.
    """

    def __init__(self, run: Path) -> None:
        super().__init__(run, "routing")

    def of(self, session_id: str) -> dict[str, Experts]:
        """Return call id -> the experts of the call's tokens, for the calls that have them.

        Rows whose digest does not match are left out, as are those that say that the experts are
        missing.
        """
        found: dict[str, Experts] = {}
        for row in self.sound_rows(session_id):
            if row["missing"] is None:
                experts = np.frombuffer(row["experts"], f"<u{row['expert_bytes']}")
                chosen = experts.reshape(-1, row["layers"], row["top_k"])
                found[row["call_id"]] = Experts(row["first"], chosen)
        self.close()
        return found


def expert_pieces(
    call: Call, calls: Mapping[str, Call], experts: Mapping[str, Experts]
) -> list[NDArray[np.integer[Any]]]:
    """Return the experts of the T tokens of a call's prompt and completion but for the last.

    They are in pieces (tokens, layers, top_k), of T - 1 tokens together, or nothing if some are
    missing. `calls` are those of its session by their ids.
    """
    pieces: list[NDArray[np.integer[Any]]] = []
    end = len(call.prompt_ids) + len(call.completion_ids) - 1
    each: Call | None = call
    while each is not None and each.call_id in experts:
        first, chosen = experts[each.call_id]
        if not 0 <= first <= end <= first + len(chosen):
            break
        if pieces and chosen.shape[1:] != pieces[0].shape[1:]:
            break
        pieces.insert(0, chosen[: end - first])
        if first == 0:
            return pieces
        end = first
        each = calls.get(each.parent_id or "")
    return []
