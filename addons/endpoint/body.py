"""Reads the bodies of requests: bounded on the wire, in time, in memory and after decompression."""

import asyncio
import io
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import brotli  # type: ignore[import-untyped]
import zstandard
from aiohttp import web

from rolltap.addons.concurrency import finished_in
from rolltap.addons.dialects.call import DialectError

BODY_LIMIT = 32 * 1024 * 1024
"""Maximum bytes of a body, as it is sent and after decompression. The limit of Anthropic's
Messages API."""
SESSION_QUOTA, TOTAL_QUOTA = 2 * BODY_LIMIT, 16 * BODY_LIMIT
"""Bytes of the bodies that are read or worked on at the same time: of one session, and of all."""
BODY_SECONDS = 120.0
"""Maximum time in which a body arrives."""
_RETRY_SECONDS = 5
_PIECE = 64 * 1024
_BROTLI_INPUT = 8
"""Bytes that the Brotli decompressor gets at a time. Brotli 1.1 has no bound of what it returns.
A meta-block of 16 MiB has at least 77 bits before its first command, so 8 bytes do not become
more than one of them."""
_MOST_MEMBERS = 16
"""Maximum number of members of a gzip file. Each costs a copy of what follows."""


class Bodies:
    """The bodies of all sessions, of which each decompresses one at a time.

    They take at most `of_session` bytes of each session, and `of_all` bytes together, for as
    long as they are read or worked on. A request over the quota waits `patience` seconds. Create
    it inside the event loop that uses it.
    """

    def __init__(
        self,
        limit: int = BODY_LIMIT,
        of_session: int = SESSION_QUOTA,
        of_all: int = TOTAL_QUOTA,
    ) -> None:
        self.patience = 30.0
        self.held: Counter[str] = Counter()
        """Session id -> bytes, of the sessions that hold any."""
        self._limit = limit
        self._of_session = of_session
        self._of_all = of_all
        self._seconds = BODY_SECONDS
        self._freed = asyncio.Event()
        self._threads = ThreadPoolExecutor(2, "rolltap-decompress")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock lives as long as somebody uses it."""

    @asynccontextmanager
    async def read(self, request: web.Request, session_id: str) -> AsyncIterator[bytes]:
        """Yield the body of a request, decompressed as its Content-Encoding says.

        That is zstd, gzip, deflate or br. The body counts against the quota until the end of the
        context. Raises `DialectError` with status 413 when the body is longer than the limit,
        before or after decompression, 400 when it cannot be decompressed, 408 when it takes too
        long to arrive, and over the quota 429 when the session itself holds too much, which is
        no fault of ours, and else 503.
        """
        if (request.content_length or 0) > self._limit:
            raise too_large(self._limit)
        held = 0
        received = io.BytesIO()  # its value is not a copy
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    async for piece in request.content.iter_any():
                        if held + len(piece) > self._limit:
                            raise too_large(self._limit)
                        await self._take(session_id, len(piece))
                        held += len(piece)
                        received.write(piece)
            except TimeoutError:
                why = f"The request body did not arrive within {self._seconds:g} seconds."
                raise DialectError(why, status=408, code="request_timeout") from None
            body = received.getvalue()
            encoding = request.headers.get("content-encoding", "").strip().lower()
            if body and encoding not in ("", "identity"):
                async with self._turns.setdefault(session_id, asyncio.Lock()):
                    await self._take(session_id, self._limit)  # the size is not known yet
                    held += self._limit
                    body = await finished_in(self._threads, decompress, body, encoding, self._limit)
                self._free(session_id, held - len(body))
                held = len(body)
            yield body
        finally:
            self._free(session_id, held)

    def close(self) -> None:
        """Forget the bodies that wait for decompression."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _take(self, session_id: str, num_bytes: int) -> None:
        """Hold so many more bytes, as soon as the quota has them. Raises as `read`."""
        try:
            async with asyncio.timeout(self.patience):
                while not self._fits(session_id, num_bytes):
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            ours = self.held[session_id] + num_bytes <= self._of_session
            raise DialectError(
                "Too many long requests are in progress. Try again later.",
                status=503 if ours else 429,
                code="overloaded",
                retry_after=_RETRY_SECONDS,
            ) from None
        self.held[session_id] += num_bytes

    def _fits(self, session_id: str, num_bytes: int) -> bool:
        if self.held[session_id] + num_bytes > self._of_session:
            return False
        return self.held.total() + num_bytes <= self._of_all

    def _free(self, session_id: str, num_bytes: int) -> None:
        self.held[session_id] -= num_bytes
        if not self.held[session_id]:
            del self.held[session_id]
        self._freed.set()


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return `body` decompressed. Raises `DialectError`: 413 for more than `limit` bytes, 400
    for what cannot be."""
    if encoding not in _DECODERS:
        known = ", ".join(_DECODERS)
        unknown = f"The request body has the content encoding {encoding[:50]!r}"
        raise DialectError(f"{unknown}: use one of {known}.")
    plain = io.BytesIO()  # its value is not a copy
    try:
        for piece in _DECODERS[encoding](body):
            plain.write(piece)
            if plain.tell() > limit:
                raise too_large(limit)
    except (EOFError, zlib.error, zstandard.ZstdError, brotli.error) as error:
        raise DialectError(f"The request body cannot be decompressed: {error}") from error
    return plain.getvalue()


def too_large(limit: int) -> DialectError:
    """Return the error of a body that is longer than `limit` bytes."""
    why = f"The request body is larger than {limit:,} bytes."
    return DialectError(why, status=413, code="request_too_large")


def _zstd(body: bytes) -> Iterator[bytes]:
    # the window of 8 MiB is what RFC 8878 asks of every decompressor
    decompressor = zstandard.ZstdDecompressor(max_window_size=8 * 1024 * 1024)
    with decompressor.stream_reader(body, read_across_frames=True) as reader:
        while piece := reader.read(_PIECE):
            yield piece


def _gzip(body: bytes) -> Iterator[bytes]:
    for _ in range(_MOST_MEMBERS):
        inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
        body = yield from _inflate(inflater, body)
        if not body:
            return
    raise EOFError(f"it has more than {_MOST_MEMBERS} members")


def _deflate(body: bytes) -> Iterator[bytes]:
    # clients send the format of zlib, as RFC 9110 says, or the bare one
    try:
        zlib.decompressobj().decompress(body[:2], 1)
        inflater = zlib.decompressobj()
    except zlib.error:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    yield from _inflate(inflater, body)


def _inflate(inflater: "zlib._Decompress", body: bytes) -> Generator[bytes, None, bytes]:
    """Yield what the first member of `body` becomes, in pieces, and return the bytes after it."""
    position = 0
    while not inflater.eof:
        given = inflater.unconsumed_tail
        if not given:
            given = body[position : position + _PIECE]
            position += len(given)
        piece = inflater.decompress(given, _PIECE)
        if not (piece or given or inflater.eof):
            raise EOFError("the body ends early")
        yield piece
    return inflater.unused_data + body[position:]


def _brotli(body: bytes) -> Iterator[bytes]:
    decompressor = brotli.Decompressor()
    for start in range(0, len(body), _BROTLI_INPUT):
        yield decompressor.process(body[start : start + _BROTLI_INPUT])
    if not decompressor.is_finished():
        raise EOFError("the body ends early")


_DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "zstd": _zstd,
    "gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
}
