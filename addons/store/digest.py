"""The digest of a row: what `rolltap verify` compares to find a changed bit.

It belongs to the row and not to its place, so that rows keep it when files are compacted, merged or split.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

DIGEST = "digest"
"""The column that holds it."""

_NUMBERS = {pa.int32(): "<i4", pa.float32(): "<f4"}


def row_digest(row: Mapping[str, Any], schema: pa.Schema) -> str:
    """Hexadecimal BLAKE2b-128 of a row of `schema`.

    The values enter in the schema's order, without the digest itself: lists of numbers as their length and their
    little-endian bytes in the column's type, so that a float counts as it is stored; all else as one JSON list at the
    end, times as ISO 8601 in UTC.
    """
    digest = blake2b(digest_size=16)
    values: list[Any] = []
    for name, numbers, is_float in _columns(schema):
        value = row[name]
        if value is None:
            values.append(None)
        elif numbers is not None:
            values.append(len(value))
            digest.update(np.ascontiguousarray(value, dtype=numbers).data)
        else:
            values.append(float(value) if is_float else value)
    digest.update(_encode(values).encode())
    return digest.hexdigest()


@cache
def _columns(schema: pa.Schema) -> list[tuple[str, str | None, bool]]:
    """Of each column: its name, the type of its numbers when it holds lists of them, whether it holds floats."""
    return [
        (
            field.name,
            _NUMBERS.get(field.type.value_type) if pa.types.is_list(field.type) else None,
            pa.types.is_floating(field.type),
        )
        for field in schema
        if field.name != DIGEST
    ]


def _time(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="microseconds")


_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True, default=_time).encode
