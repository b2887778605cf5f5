"""Experts of traces: the rows of a trace's calls joined, each of which has the tokens that its parent's has not."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolltap.addons.store.records import Call


class Experts(NamedTuple):
    """Experts of a call's tokens, or of those from one on."""

    first: int
    """Position of the first of these tokens, in prompt and completion."""
    chosen: NDArray[np.integer[Any]]
    """Numbers of experts, shape (tokens, layers, top_k)."""


def calls_with_experts(calls: Sequence[Call], experts: Mapping[str, Experts]) -> set[str]:
    """Return the ids of the calls of a session whose tokens all have experts, but for the last one."""
    by_id = {call.call_id: call for call in calls}
    return {call.call_id for call in calls if _rows(call, by_id, experts)}


def experts_of(call: Call, calls: Collection[Call], experts: Mapping[str, Experts]) -> NDArray[np.integer[Any]]:
    """Return the experts of the T tokens of a call's prompt and completion but for the last, (T - 1, layers, top_k).

    `calls` are those of its session, and it is one of `calls_with_experts`.
    """
    return np.concatenate(_rows(call, {each.call_id: each for each in calls}, experts))


def _rows(call: Call, calls: Mapping[str, Call], experts: Mapping[str, Experts]) -> list[NDArray[np.integer[Any]]]:
    """Return the experts of a call's tokens in pieces, or nothing if some are missing."""
    pieces: list[NDArray[np.integer[Any]]] = []
    end, above = len(call.prompt_ids) + len(call.completion_ids) - 1, call.parent_id
    known = experts.get(call.call_id)
    while known is not None and 0 <= known.first <= end <= known.first + len(known.chosen):
        if pieces and known.chosen.shape[1:] != pieces[0].shape[1:]:
            break
        pieces.insert(0, known.chosen[: end - known.first])
        if known.first == 0:
            return pieces
        parent = calls.get(above or "")
        if parent is None:
            break
        end, above, known = known.first, parent.parent_id, experts.get(parent.call_id)
    return []
