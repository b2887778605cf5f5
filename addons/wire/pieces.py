"""Bounds for the pieces in which a peer sends its bytes: what each piece costs is more than what its bytes cost."""

import re
import time

import h11
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer

BURST = 1_000
"""Number of frames that may come at once."""
PER_SECOND = 200.0
"""Number of frames that may come each second after that."""
FREE_BYTES = 1_024
"""Bytes of data for which one more frame is free: a long message in many frames is no flood."""
_MASK_LENGTH = 4
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


class Frames:
    """Counts the frames in what one side sends. mitmproxy spends some 60 µs on each, in one go for all of a read."""

    def __init__(self) -> None:
        self._room = Bucket(BURST, PER_SECOND)
        self._head = bytearray()
        self._skip = 0
        """Bytes of the current frame's payload that have not come yet."""

    def accept(self, data: bytes) -> bool:
        """Return True unless `data`, the next bytes of the connection, bring more frames than may come."""
        return self._room.take(max(0, self._count(data) - len(data) // FREE_BYTES))

    def _count(self, data: bytes) -> int:
        """Return the number of frames whose head is complete with `data` (RFC 6455, 5.2)."""
        number = position = 0
        while position < len(data):
            if self._skip:
                step = min(self._skip, len(data) - position)
                self._skip -= step
                position += step
                continue
            self._head.append(data[position])
            position += 1
            if len(self._head) < 2:
                continue
            masked, length = self._head[1] >> 7, self._head[1] & 127
            extended = {126: 2, 127: 8}.get(length, 0)
            if len(self._head) == 2 + extended:
                payload = int.from_bytes(self._head[2:]) if extended else length
                self._skip = payload + masked * _MASK_LENGTH
                self._head.clear()
                number += 1
        return number


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
