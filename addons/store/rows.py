"""Rows of a run: their batches and digests, and texts from the wire that a terminal can show."""

import json
import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rolltap.addons.dialects.json_values import well_formed
from rolltap.addons.store.records import (
    CALL_SCHEMA,
    DIGEST,
    EVENT_SCHEMA,
    LATER_COLUMNS,
    SESSION_SCHEMA,
    Call,
    Event,
    Session,
)
from rolltap.addons.store.routing import ROUTING_SCHEMA, Routing

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_TYPES: dict[pa.DataType, tuple[type, ...]] = {
    pa.string(): (str,),
    pa.bool_(): (bool,),
    pa.int32(): (int,),
    pa.float64(): (float, int),
    pa.binary(): (bytes,),
    pa.timestamp("us", tz="UTC"): (datetime,),
}
_LITTLE_ENDIAN: dict[pa.DataType, str] = {
    pa.list_(pa.int32()): "<i4",
    pa.list_(pa.float16()): "<f2",
    pa.list_(pa.float32()): "<f4",
}
_NOTES = {
    CALL_SCHEMA: "error",
    SESSION_SCHEMA: "error",
    EVENT_SCHEMA: "detail",
    ROUTING_SCHEMA: "missing",
}
"""The column that says which others could not be written."""
_TRAINED = {
    "prompt_length",
    "prompt_tail_ids",
    "completion_ids",
    "logprobs",
    "weight_versions",
    "parent_id",
    "kind",
}
"""Columns of a call without which it is not trained on."""


def to_batch(row: Mapping[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    """Return a row of `schema`, without a digest, as a batch with one.

    Lone surrogates become U+FFFD: a harness chooses the text of many columns, and Arrow strings are
    UTF-8. A value that does not fit its column is replaced by that of an empty record and named in
    a note, with an error in the log: in the column `error` or `detail`, and in `violation` when the
    call cannot be trained on without it.
    """
    try:
        columns = _columns(schema)
        return _batch({each.name: _writable(row[each.name], each.kind) for each in columns}, schema)
    except Exception as error:  # whatever NumPy, pyarrow or JSON raise: the call must not be lost
        return _batch(_salvaged(row, schema, error), schema)


def _batch(row: Row, schema: pa.Schema) -> pa.RecordBatch:
    row[DIGEST] = row_digest(row, schema)
    # one struct takes pyarrow half the time of a list of columns
    return pa.RecordBatch.from_struct_array(pa.array([row], _struct(schema)))


def _writable(value: Any, kind: pa.DataType) -> Any:
    """Return a value as it can be written to a column. Raises for a value of another type."""
    if value is None:
        return None
    types = _TYPES.get(kind)
    if types is not None:
        if not isinstance(value, types):
            raise TypeError(f"{type(value).__name__} instead of {kind}")
        if isinstance(value, str) and not value.isascii():
            return well_formed(value)
        return value
    if kind in _LITTLE_ENDIAN:  # pyarrow and the digest take an array faster than a list
        return np.array(value, dtype=_LITTLE_ENDIAN[kind])
    spans = []
    for span in value:
        spans.append({part.name: _writable(span[part.name], part.type) for part in kind.value_type})
    return spans


def _salvaged(row: Mapping[str, Any], schema: pa.Schema, error: Exception) -> Row:
    """Return the row as it can be written: each value as it is read back, or an empty record's."""
    salvaged = empty_row(schema)
    lost: list[str] = []
    for name, kind, *_ in _columns(schema):
        try:
            (salvaged[name],) = pa.array([_writable(row[name], kind)], kind).to_pylist()
        except Exception as fault:
            lost.append(f"{name} ({fault!r})")
    note = well_formed(f"not written: {', '.join(lost) or repr(error)}")[:1000]
    session = f"call {salvaged.get('call_id')}, session {salvaged['session_id']}"
    logger.error("a row of %s: %s", session, note)
    notes = [_NOTES[schema]]
    if schema is CALL_SCHEMA and any(column.split()[0] in _TRAINED for column in lost):
        notes.append("violation")
    for name in notes:
        salvaged[name] = f"{salvaged[name]}; {note}" if salvaged[name] else note
    return salvaged


def empty_row(schema: pa.Schema) -> Row:
    """Return the row of an empty record."""
    if schema is CALL_SCHEMA:
        return Call(
            session_id="",
            call_id="",
            prompt_ids=[],
            status="failed",
        ).to_row()
    if schema is SESSION_SCHEMA:
        return Session(session_id="", status="unknown").to_row()
    if schema is ROUTING_SCHEMA:
        return Routing(session_id="", call_id="").to_row()
    return Event(kind="rejected").to_row()


@cache
def _struct(schema: pa.Schema) -> pa.DataType:
    return pa.struct(list(schema))


class _Column(NamedTuple):
    name: str
    kind: pa.DataType
    numbers: str | None
    """The type in NumPy of the numbers of a list, as they are digested; None for other columns."""
    is_float: bool


@cache
def _columns(schema: pa.Schema) -> list[_Column]:
    """Return the columns without the digest."""
    columns = []
    for field in schema:
        if field.name != DIGEST:
            numbers = _LITTLE_ENDIAN.get(field.type)
            is_float = pa.types.is_floating(field.type)
            columns.append(_Column(field.name, field.type, numbers, is_float))
    return columns


def row_digest(row: Mapping[str, Any], schema: pa.Schema) -> str:
    """Return the hexadecimal BLAKE2b-128 digest of a row of `schema`.

    `rolltap verify` recomputes it. It depends on the row's values alone, so that rows keep it when
    files are compacted, merged or split.

    The input is, without the digest column:

    1. The values of each list of numbers, in column order, as little-endian bytes of the column's
       type; and binary values. A float is therefore digested as it is stored.
    2. A JSON list with an entry for each column: the length of a list of numbers or of a binary
       value, or the value itself. Times are ISO 8601 in UTC. A column of `LATER_COLUMNS` has an
       entry if it has a value: a list of its name and the value.
    """
    digest = blake2b(digest_size=16)
    values: list[Any] = []
    for name, _, numbers, is_float in _columns(schema):
        value = row[name]
        if name in LATER_COLUMNS:
            if value is not None:
                values.append([name, float(value) if is_float else value])
        elif value is None:
            values.append(None)
        elif isinstance(value, bytes):
            values.append(len(value))
            digest.update(value)
        elif numbers is not None:
            values.append(len(value))
            digest.update(np.ascontiguousarray(value, dtype=numbers).data)
        else:
            values.append(float(value) if is_float else value)
    digest.update(_encode(values).encode())
    return digest.hexdigest()


def _time(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="microseconds")


_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=_time).encode


LONGEST = 500
"""Maximum number of characters of a text in an event or a log line."""


def printable(text: str, longest: int | None = LONGEST) -> str:
    r"""Return `text` with escapes such as `\x1b` for all that is not printable, cut to `longest`.

    Not printable are control characters, line ends, directions of writing, and the surrogates that
    mitmproxy decodes bytes to which are not UTF-8. With `longest` None the text is not cut.
    """
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}... ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


FIRST_VERSION_COLUMNS = ("first_token_at", "started_at", "weight_versions")
"""The columns of a call that `first_version` takes."""


def first_version(calls: Iterable[tuple[Any, ...]]) -> str | None:
    """Return the weights that sampled the first token of calls, or None without a sampled token.

    Each call is a tuple of `first_token_at`, `started_at` and `weight_versions`, a list of dicts.
    Calls without a time of their first token count from their start.
    """
    for _, _, spans in sorted(calls, key=lambda call: call[0] or call[1]):
        for span in spans or ():
            if span["end"] > span["start"]:
                version: str = span["version"]
                return version
    return None
