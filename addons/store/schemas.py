"""The Arrow schemas of a run's tables. The store adds the last column of each, `digest`."""

import pyarrow as pa

from rolltap.addons.store.digest import DIGEST

SCHEMA_VERSION = 5
"""Incremented when a reader of the earlier version would misread a row."""

_TIME = pa.timestamp("us", tz="UTC")
_VERSIONS = pa.list_(pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))

CALL_SCHEMA = pa.schema(
    [
        ("session_id", pa.string()),
        ("call_id", pa.string()),
        ("parent_id", pa.string()),
        ("kind", pa.string()),
        ("kind_reason", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("violation", pa.string()),
        ("role", pa.string()),
        ("role_evidence", pa.string()),
        ("dialect", pa.string()),
        ("host", pa.string()),
        ("path", pa.string()),
        ("model", pa.string()),
        ("stream", pa.bool_()),
        ("prompt_length", pa.int32()),
        ("prompt_tail_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("weight_versions", _VERSIONS),
        ("finish_reason", pa.string()),
        ("sampling", pa.string()),
        ("messages", pa.string()),
        ("tools", pa.string()),
        ("reply", pa.string()),
        ("cached_tokens", pa.int32()),
        ("engine", pa.string()),
        ("started_at", _TIME),
        ("first_token_at", _TIME),
        ("finished_at", _TIME),
        (DIGEST, pa.string()),
    ]
)

SESSION_SCHEMA = pa.schema(
    [
        ("session_id", pa.string()),
        ("task_id", pa.string()),
        ("group_id", pa.string()),
        ("harness", pa.string()),
        ("status", pa.string()),
        ("exit_status", pa.int32()),
        ("reward", pa.float64()),
        ("parts", pa.string()),
        ("evidence", pa.string()),
        ("suspicions", pa.string()),
        ("error", pa.string()),
        ("revision", pa.int32()),
        ("policy_version", pa.string()),
        ("harness_version", pa.string()),
        ("program_digest", pa.string()),
        ("preset_digest", pa.string()),
        ("task_digest", pa.string()),
        ("runtime", pa.string()),
        ("image_digest", pa.string()),
        ("started_at", _TIME),
        ("finished_at", _TIME),
        (DIGEST, pa.string()),
    ]
)

EVENT_SCHEMA = pa.schema(
    [
        ("session_id", pa.string()),
        ("call_id", pa.string()),
        ("kind", pa.string()),
        ("host", pa.string()),
        ("method", pa.string()),
        ("path", pa.string()),
        ("detail", pa.string()),
        ("at", _TIME),
        (DIGEST, pa.string()),
    ]
)
