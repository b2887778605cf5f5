"""The digest of a row: what `rolltap verify` compares to find a changed bit.

It belongs to the row and not to its place, so that rows keep it when files are compacted, merged or split.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
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
    values = []
    for field in schema:
        if field.name == DIGEST:
            continue
        value = row[field.name]
        numbers = _NUMBERS.get(field.type.value_type) if pa.types.is_list(field.type) else None
        if numbers is None or value is None:
            values.append(value)
        else:
            values.append(len(value))
            digest.update(np.asarray(value, dtype=numbers).tobytes())
    digest.update(json.dumps(values, separators=(",", ":"), sort_keys=True, default=_time).encode())
    return digest.hexdigest()


def _time(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="microseconds")
