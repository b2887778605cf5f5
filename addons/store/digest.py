"""Digest of a row. `rolltap verify` recomputes it to find changed bits.

It depends on the row's values alone, so that rows keep it when files are compacted, merged or split.
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
"""Name of the digest column."""

_NUMBERS = {pa.int32(): "<i4", pa.float32(): "<f4"}


def row_digest(row: Mapping[str, Any], schema: pa.Schema) -> str:
    """Return the hexadecimal BLAKE2b-128 digest of a row of `schema`.

    The input is, without the digest column:

    1. The values of each list of numbers, in column order, as little-endian bytes of the column's type. A float is
       therefore digested as it is stored.
    2. A JSON list with an entry for each column: the length of a list of numbers, or the value itself. Times are ISO
       8601 in UTC.
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
    """Return for each column: its name, the NumPy type of its lists' numbers or None, True for a float column."""
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
