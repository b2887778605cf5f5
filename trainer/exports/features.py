"""The columns of the data sets that leave a run, and the rows that fill them."""

from dataclasses import asdict
from typing import Any

import pyarrow as pa
from datasets import Features, List, Value

from rolltap.addons.store.records import CALL_SCHEMA, EVENT_SCHEMA, SESSION_SCHEMA
from rolltap.trainer.traces.build import Trace

_INTERNAL = ("digest", "engine")
"""Columns that mean nothing outside of the run: the row's checksum, the engine's address in the recorder's network."""

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
        "shared_trace_id": Value("string"),
        "shared_tokens": Value("int32"),
    }
)

TRACE_COLUMNS = {
    "session_id": "the run of the agent program that sampled it",
    "trace_id": "unique in the data set",
    "group_id": "sessions of the same task under the same policy, which GRPO compares",
    "task_id, harness": "what was asked of which program",
    "role": "what the last call was for: `agent`, `subagent`, `compaction` or `auxiliary`",
    "reward": "of the session; null when it has none",
    "call_ids": "the model calls on the path, in their order",
    "prompt_ids": "the first call's prompt, P token ids",
    "completion_ids": "everything after it, sampled or not, C token ids",
    "completion_mask": "C values, 1 where the policy sampled the token and this trace trains it",
    "logprobs": "C natural-log probabilities under the sampling policy, 0 where the mask is 0",
    "weight_versions": "which weights sampled `completion_ids[start:end]`",
    "shared_trace_id, shared_tokens": "strategy `tree`: an earlier trace, and how many tokens both begin with",
}
"""The columns of `TRACE_FEATURES` in the words of the card."""


def _features(schema: pa.Schema) -> Features:
    return Features.from_arrow_schema(pa.schema([column for column in schema if column.name not in _INTERNAL]))


CALL_FEATURES = _features(CALL_SCHEMA)
SESSION_FEATURES = _features(SESSION_SCHEMA)
EVENT_FEATURES = _features(EVENT_SCHEMA)


def trace_row(trace: Trace) -> dict[str, Any]:
    """A trace as a row of `TRACE_FEATURES`."""
    row = {name: getattr(trace, name) for name in TRACE_FEATURES}
    row["weight_versions"] = [asdict(span) for span in trace.weight_versions]
    return row
