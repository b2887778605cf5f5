"""A row is written whatever its values are."""

import json
import logging
from datetime import UTC, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.store.records import CALL_SCHEMA, EVENT_SCHEMA, SESSION_SCHEMA, Event, Session
from rolltap.addons.store.rows import first_version, printable, row_digest, to_batch
from rolltap.addons.store.tables import checked_rows
from tests.deep import examples
from tests.factories import START, make_call

CALL = make_call(
    "c",
    [1, 2],
    [3, 4],
    messages=json.dumps([{"role": "user", "content": "café"}], ensure_ascii=False),
)
TABLES = {
    "calls": (CALL_SCHEMA, CALL.to_row()),
    "sessions": (SESSION_SCHEMA, Session(session_id="s", status="completed").to_row()),
    "events": (EVENT_SCHEMA, Event(kind="refused", session_id="s").to_row()),
}
COLUMNS = [(table, name) for table, (_, row) in TABLES.items() for name in row]
odd = st.one_of(
    st.none(),
    st.text(st.characters(), max_size=5),
    st.sampled_from(
        ["\ud800", "a\udfffb", "\ud83d\ude00", "\x00", b"bytes", object(), {}, [], True]
    ),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1]),
    st.floats(),
    st.lists(st.integers(-(2**40), 2**40) | st.none() | st.floats(), max_size=3),
    st.lists(
        st.fixed_dictionaries({"version": st.text(max_size=3) | st.none(), "start": st.integers()}),
        max_size=2,
    ),
    st.datetimes(timezones=st.just(UTC)),
)


def stored(table, row):
    """Return the row as it is read back. Its digest matches."""
    [(found, _)] = checked_rows(to_batch(row, TABLES[table][0]))
    assert found["digest"] == row_digest(found, TABLES[table][0])
    return found


@pytest.mark.parametrize(("table", "column"), COLUMNS)
@given(value=odd)
@examples(15)
def test_an_odd_value_of_one_column_leaves_all_others_as_they_are(table, column, value):
    row = TABLES[table][1]
    found = stored(table, {**row, column: value})
    notes = {"error", "detail", "violation", column}
    kept, stays = ({name: of[name] for name in row if name not in notes} for of in (found, row))
    assert kept == stays


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_seconds_that_no_phase_takes_are_a_fault_of_the_row(seconds):
    schema, row = TABLES["sessions"]
    [(_, faults)] = checked_rows(to_batch({**row, "running_seconds": seconds}, schema))
    assert faults == {"running_seconds": f"its running_seconds is '{seconds}'"}


@given(st.fixed_dictionaries(dict.fromkeys(TABLES["calls"][1], odd)))
@examples(50)
def test_a_row_of_odd_values_is_written(row):
    stored("calls", row)


TEXTS = ["host", "path", "role_evidence", "model", "error", "messages", "reply", "call_id"]
HALF, WHOLE = ([{"version": version, "start": 0, "end": 2}] for version in ("\ud800", "\ufffd"))


@pytest.mark.parametrize(
    ("column", "value", "kept"),
    [
        *((column, "a\ud800b\U0001f600", "a\ufffdb\U0001f600") for column in TEXTS),
        ("weight_versions", HALF, WHOLE),
    ],
)
def test_a_lone_surrogate_becomes_a_replacement_character(column, value, kept, caplog):
    found = stored("calls", {**TABLES["calls"][1], column: value})
    assert (found[column], found["violation"], caplog.records) == (kept, None, [])


def test_a_value_that_does_not_fit_is_named_in_the_row_and_in_the_log(caplog):
    found = stored("calls", {**TABLES["calls"][1], "cached_tokens": 2**31, "error": "before"})
    assert found["cached_tokens"] is None
    assert found["error"].startswith("before; not written: cached_tokens (")
    assert found["violation"] is None
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "call c, session s: not written: cached_tokens" in record.getMessage()


@pytest.mark.parametrize(
    ("column", "value"),
    [("completion_ids", [3, 2**40]), ("logprobs", ["x"]), ("kind", 5), ("prompt_length", 2**31)],
)
def test_a_call_whose_tokens_cannot_be_written_is_not_trained_on(column, value):
    found = stored("calls", {**TABLES["calls"][1], column: value})
    assert found["violation"].startswith(f"not written: {column} (")


@given(st.binary())
def test_any_bytes_become_text_that_can_be_stored_and_shown(data):
    text = printable(data.decode(errors="surrogateescape"), None)
    text.encode()
    assert text.isprintable()


@given(st.text(st.characters(exclude_categories=["C", "Z"]), max_size=500))
def test_printable_text_stays(text):
    assert printable(text) == text


def test_a_long_text_is_cut_and_says_so():
    assert printable("x" * 2000) == "x" * 500 + "... (2,000 characters)"


def at(seconds):
    return START + timedelta(seconds=seconds)


def call(start, first, *spans):
    """Return a call that started and sampled its first token at times in seconds; a span is a
    version and a length."""
    position, rows = 0, []
    for version, length in spans:
        rows.append({"version": version, "start": position, "end": position + length})
        position += length
    return at(first) if first is not None else None, at(start), rows


@pytest.mark.parametrize(
    ("calls", "version"),
    [
        ([], None),
        ([call(0, None)], None),
        ([call(0, 1, ("a", 2), ("b", 1))], "a"),
        ([call(0, 1, ("a", 0), ("b", 1))], "b"),  # adapter a answered nothing before it was lost
        ([call(0, 9, ("late", 1)), call(1, 2, ("early", 1))], "early"),
        ([call(0, None), call(1, 2, ("a", 1))], "a"),
        ([call(3, None, ("a", 1)), call(4, 5, ("b", 1))], "a"),
    ],
)
def test_the_version_of_a_session_is_that_of_its_first_sampled_token(calls, version):
    assert first_version(calls) == first_version(calls[::-1]) == version
