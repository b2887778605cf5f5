"""Columns and rows of exported datasets."""

from dataclasses import asdict
from typing import Any

import pyarrow as pa
from datasets import Features, List, Value

from rolltap.addons.store.schemas import CALL_SCHEMA, EVENT_SCHEMA, SESSION_SCHEMA
from rolltap.trainer.traces.build import Trace

_INTERNAL = ("digest", "engine")
"""Columns that have no meaning outside of the run: the row's digest, the engine's address in the recorder's network."""

TRACE_FEATURES = Features(
    {
        "session_id": Value("string"),
        "trace_id": Value("string"),
        "group_id": Value("string"),
        "task_id": Value("string"),
        "harness": Value("string"),
        "role": Value("string"),
        "reward": Value("float64"),
        "call_ids": List(Value("string")),
        "prompt_ids": List(Value("int32")),
        "completion_ids": List(Value("int32")),
        "completion_mask": List(Value("int8")),
        "logprobs": List(Value("float32")),
        "weight_versions": List({"version": Value("string"), "start": Value("int32"), "end": Value("int32")}),
        "continuity": List({"kind": Value("string"), "start": Value("int32"), "end": Value("int32")}),
        "shared_trace_id": Value("string"),
        "shared_tokens": Value("int32"),
    }
)

TRACE_COLUMNS = {
    "session_id": "one run of one agent program on one task",
    "trace_id": "unique in the data set",
    "group_id": "sessions of the same task under the same policy, which GRPO compares",
    "task_id, harness": "the task and the agent program",
    "role": "the last call's purpose: `agent`, `subagent`, `compaction` or `auxiliary`",
    "reward": "the session's reward; null when it has none",
    "call_ids": "the model calls of the trace, in order",
    "prompt_ids": "the first call's prompt, P token ids",
    "completion_ids": "all tokens after it, sampled or not, C token ids",
    "completion_mask": "C values, 1 where the policy sampled the token and this trace trains it",
    "logprobs": "C natural-log probabilities under the sampling policy, 0 where the mask is 0",
    "weight_versions": "the version of the weights that sampled `completion_ids[start:end]`",
    "continuity": "how the prompt of the call that sampled `completion_ids[start:end]` was made: `root`, `rendered` or "
    "`bridged` (the recorded tokens continued)",
    "shared_trace_id, shared_tokens": "strategy `tree`: the earlier trace with the longest shared prefix, its length",
}
"""Descriptions of the columns of `TRACE_FEATURES`, for the card. A key may name several columns."""


def _features(schema: pa.Schema) -> Features:
    return Features.from_arrow_schema(pa.schema([column for column in schema if column.name not in _INTERNAL]))


CALL_FEATURES = _features(CALL_SCHEMA)
SESSION_FEATURES = _features(SESSION_SCHEMA)
EVENT_FEATURES = _features(EVENT_SCHEMA)


def trace_row(trace: Trace) -> dict[str, Any]:
    """Return a trace as a row of `TRACE_FEATURES`."""
    row = {name: getattr(trace, name) for name in TRACE_FEATURES}
    for name in ("weight_versions", "continuity"):
        row[name] = [asdict(span) for span in row[name]]
    return row
