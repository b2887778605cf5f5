"""Bounds for the pieces in which a peer sends its bytes: what each piece costs is more than what its bytes cost."""

import re
import time

import h11
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer

CHUNK_BURST = 50_000
"""Number of small chunks that may come at once. They take some 100 ms."""
CHUNKS_PER_SECOND = 10_000.0
"""Number of small chunks that may come each second after that."""
CHUNK_BYTES = 16
"""Bytes of data for which one more chunk is free: short events and lines are no flood."""
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,20})(?:;[^\n]*|[ \t]*)")
"""RFC 9112, 7.1: the line before the data of a chunk, as h11 reads it."""


class Bucket:
    """Holds at most `size` units, and gains `per_second` of them each second."""

    def __init__(self, size: float, per_second: float) -> None:
        self._size, self._per_second = size, per_second
        self._left, self._at = size, time.monotonic()

    def take(self, units: float = 1) -> bool:
        """Take so many units, and return True; return False and take nothing if there are fewer."""
        now = time.monotonic()
        self._left = min(self._size, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < units:
            return False
        self._left -= units
        return True


class Chunks(ChunkedReader):
    """Reads the chunks of a body, those of one read in one go, and drops its trailers.

    h11 spends 9 µs on each chunk, and this some 2 µs. On a line that it refuses, h11 spends quadratic time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusal = ""
        self._room = Bucket(CHUNK_BURST, CHUNKS_PER_SECOND)
        self._left: int | None = None
        """Bytes of the current chunk that have not come yet. None between chunks."""
        self._over = False
        """True after the last chunk."""

    def __call__(self, buf: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        """Return the data of all chunks in `buf`, or the end of the body; None when more must come."""
        data, position, parts, number = bytes(buf), 0, [], 0
        while not self._over:
            if self._left is None:
                line_end = data.find(b"\r\n", position)
                if line_end < 0:
                    break
                if not (line := _CHUNK.fullmatch(data, position, line_end)):
                    raise h11.RemoteProtocolError("a chunk without a size")
                self._left, position, number = int(line[1], 16), line_end + 2, number + 1
                if not self._left:
                    self._over = True
                    break
            parts.append(data[position : position + self._left])
            position += len(parts[-1])
            self._left -= len(parts[-1])
            if self._left or position + 2 > len(data):
                break
            if data[position : position + 2] != b"\r\n":
                raise h11.RemoteProtocolError("a chunk is longer than its size")
            self._left, position = None, position + 2
        buf.maybe_extract_at_most(position)
        joined = b"".join(parts)
        if not self._room.take(max(0, number - len(joined) // CHUNK_BYTES)):
            self.refusal = f"too many chunks of less than {CHUNK_BYTES} bytes"
            raise h11.RemoteProtocolError(self.refusal)
        if joined:
            return h11.Data(data=joined)
        return h11.EndOfMessage() if self._over and buf.maybe_extract_lines() is not None else None
