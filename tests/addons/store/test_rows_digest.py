import math
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pytest

from rolltap.addons.store.records import (
    CALL_SCHEMA,
    DIGEST,
    EVENT_SCHEMA,
    LATER_COLUMNS,
    SESSION_SCHEMA,
    Call,
    Event,
    VersionSpan,
)
from rolltap.addons.store.rows import row_digest
from tests.factories import make_session

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CALL = Call(
    session_id="session",
    call_id="call",
    prompt_ids=[1, 2, 3],
    completion_ids=[4, 5],
    logprobs=[-0.5, -0.1],
    weight_versions=[VersionSpan(version="1", start=0, end=2)],
    parent_id="parent",
    kind="bridged",
    messages='[{"role": "user", "content": "é"}]',
    cached_tokens=2,
    started_at=NOON,
    first_token_at=NOON + timedelta(microseconds=1),
)
SESSION = make_session(started_at=NOON)
CHANGED = {
    "string": "other",
    "bool": True,
    "int32": 77,
    "double": 0.25,
    "timestamp[us, tz=UTC]": NOON.replace(year=2027),
}


def digest(**changes):
    return row_digest({**CALL.to_row(), **changes}, CALL_SCHEMA)


def changed(field):
    """Return a value that differs from `value` and is in no row above."""
    if field.name == "weight_versions":
        return [{"version": "2", "start": 0, "end": 2}]
    return CHANGED.get(str(field.type), [7])


def test_a_later_column_changes_the_digest_of_rows_that_have_a_value_there():
    row = SESSION.to_row()
    earlier = pa.schema([column for column in SESSION_SCHEMA if column.name not in LATER_COLUMNS])
    assert row_digest(row, SESSION_SCHEMA) == row_digest(row, earlier)
    digests = {row_digest({**row, name: 2.0}, SESSION_SCHEMA) for name in LATER_COLUMNS}
    assert len(digests) == len(LATER_COLUMNS)
    assert row_digest(row, earlier) not in digests


def test_the_digest_of_a_row_is_part_of_the_format():
    assert digest() == "907628d67b9694eab6205016f162512d"


@pytest.mark.parametrize(
    ("row", "schema"),
    [
        (CALL.to_row(), CALL_SCHEMA),
        (SESSION.to_row(), SESSION_SCHEMA),
        (Event(kind="refused", at=NOON).to_row(), EVENT_SCHEMA),
    ],
    ids=["call", "session", "event"],
)
def test_the_digest_depends_on_every_column(row, schema):
    digests = [row_digest(row, schema)]
    for field in schema:
        if field.name != DIGEST:
            digests.append(row_digest({**row, field.name: changed(field)}, schema))
    assert len(set(digests)) == len(schema)


def test_null_and_empty_values_have_different_digests():
    assert len({digest(logprobs=value) for value in (None, [], [0.0])}) == 3
    assert len({digest(error=value) for value in (None, "", "null")}) == 3


def test_tokens_in_the_next_column_another_float_and_another_time_have_another_digest():
    next_float = float(np.nextafter(np.float32(-0.1), np.float32(0)))
    others = [
        digest(prompt_tail_ids=[1, 2], completion_ids=[3]),
        digest(prompt_tail_ids=[1], completion_ids=[2, 3]),
        digest(logprobs=[-0.5, next_float]),
        digest(started_at=NOON.replace(tzinfo=timezone(timedelta(hours=1)))),
    ]
    assert len({digest(), *others}) == 5


def test_a_whole_number_in_a_column_of_floats_is_a_float():
    rewards = [
        row_digest({**SESSION.to_row(), "reward": reward}, SESSION_SCHEMA)
        for reward in (1, 1.0, np.float64(1))
    ]
    assert len(set(rewards)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"completion_ids": np.array([4, 5], np.int64)},
        {"completion_ids": np.array([4, 5], np.int32)},
        {"completion_ids": np.array([4, 0, 5, 0])[::2]},
        {"started_at": NOON.astimezone(timezone(timedelta(hours=5, minutes=30)))},
        {"weight_versions": [{"end": 2, "start": 0, "version": "1"}]},
        {"logprobs": [-0.5, float(np.float32(-0.1))]},
        {"logprobs": [-0.5, math.nextafter(float(np.float32(-0.1)), 0)]},
    ],
    ids=[
        "int64",
        "int32",
        "stride",
        "time zone",
        "order of a span's columns",
        "a float as stored",
        "a near float",
    ],
)
def test_equal_values_have_the_same_digest(changes):
    assert digest(**changes) == digest()
