"""Traces as the model sees them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rolltap.addons.errors import InputError
from rolltap.trainer.traces.build import Trace


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of one trace, and which of them are scored.

    Attributes:
        ids: Prompt and completion, shape (T,).
        scored: Ascending positions of the n trained tokens, each at least 1, shape (n,). The token `ids[p]` is
            scored given `ids[:p]`.
    """

    ids: NDArray[np.int32]
    scored: NDArray[np.int64]


def trace_row(trace: Trace) -> Row:
    """Return a trace's row. Raises `InputError` for a trace whose completion ids, mask and log-probabilities differ in
    length, and for one that trains its first token, which has no probability."""
    if not len(trace.completion_ids) == len(trace.completion_mask) == len(trace.logprobs):
        raise InputError(
            f"trace {trace.trace_id} has {len(trace.completion_ids)} completion ids, {len(trace.completion_mask)} mask "
            f"values and {len(trace.logprobs)} log-probabilities"
        )
    ids = np.array([*trace.prompt_ids, *trace.completion_ids], np.int32)
    scored = len(trace.prompt_ids) + np.flatnonzero(np.array(trace.completion_mask))
    if len(scored) and scored[0] == 0:
        raise InputError(f"trace {trace.trace_id} trains its first token, which nothing precedes")
    return Row(ids, scored)
