"""What lies behind the last commit of a segment, and whether it may be cut off.

A writer puts the bytes of a commit behind the first eight, and those last (see `rolltap.addons.segment`). Bytes that
begin with eight zeros were therefore never committed. Other bytes are cut off only if they are the beginning of one
commit whose end is missing, and no later commit can be found in them.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from rolltap.addons.digest import DIGEST, row_digest
from rolltap.addons.segment import SegmentReader
from rolltap.addons.store import batch_rows

TailKind = Literal["uncommitted", "cut", "headless", "unknown"]
"""`uncommitted`: never shown to a reader. `cut`: the beginning of a commit, or several, whose end the file has lost.
`headless`: the file ends within its schema, so that it has no commit. `unknown`: anything else; not to be touched."""

_MARKER = b"\xff\xff\xff\xff"
_END = _MARKER + bytes(4)
"""The proper end of a stream that is not appended to any more."""
_PREFIX = 8


@dataclass(frozen=True, slots=True)
class Tail:
    """Bytes of a segment from `start` to its end."""

    kind: TailKind
    start: int
    size: int
    commits: int = 0
    """Readable commits within an `unknown` tail."""


def find_tail(path: Path, schema: pa.Schema) -> Tail | None:
    """What follows the last commit that can be read in a segment of `schema`; None when it ends properly.

    Raises `OSError`.
    """
    with SegmentReader(path) as reader:
        for _ in reader:
            pass
        start = reader.end
    data = memoryview(path.read_bytes()) if path.stat().st_size == 0 else memoryview(pa.memory_map(str(path)).read_buffer())
    tail = data[start:]
    if not tail or tail == _END:
        return None
    return Tail("unknown", start, len(tail))
