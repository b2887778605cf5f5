"""Reads the bodies of requests: bounded on the wire, in time, in memory and after decompression.

A conversation grows at its end: all but a few of its elements have the same bytes as in the last
request of the same program. They are compared and not parsed, so that a request costs what is new
in it (`RecentBodies`).
"""

import asyncio
import io
import re
import secrets
import sys
import threading
import zlib
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import zstandard
from aiohttp import web

from rolltap.addons.concurrency import finished_in
from rolltap.addons.dialects.call import DialectError, ModelCall, Part
from rolltap.addons.dialects.dialect import Dialect
from rolltap.addons.dialects.fields import parse_object
from rolltap.addons.dialects.json_values import (
    JSON,
    MOST_LEVELS_OF_A_BODY,
    bounded_value,
    check_values,
    count_marks,
)

BODY_LIMIT = 32 * 1024 * 1024
"""Maximum bytes of a body, as it is sent and after decompression. The limit of Anthropic's
Messages API."""
SESSION_QUOTA, TOTAL_QUOTA = 2 * BODY_LIMIT, 16 * BODY_LIMIT
"""Bytes of the bodies that are read or worked on at the same time: of one session, and of all."""
BODY_SECONDS = 120.0
"""Maximum time in which a body arrives."""
_RETRY_SECONDS = 5
_PIECE = 64 * 1024
_RECENT = 4
"""Conversations of a session that are kept: agents and sub-agents alternate."""
_MOST_KEPT = 64 * 1024 * 1024
"""Bytes of memory that they may take in total. A million tokens of code count as about 50 MB."""
_MOST_OF_ALL = 256 * 1024 * 1024
"""The same for all sessions together."""
_VALUE_BYTES = 96
"""About the most bytes of a parsed value, besides those of its text."""
_ELEMENT_BYTES = 512
"""The same for what each element of a conversation needs besides its values."""
_FIRST_STEP = 4096
"""Characters that are compared first. Then it is twice as many, again and again."""

_BLANKS = re.compile(r"[ \t\n\r]*")
_PLACE = secrets.token_hex()
"""Stands for the list in the rest of a body, which is parsed without it."""
_WIDE = re.compile(r"\\u(?!00)")
"""An escape of a character that can take 4 bytes, and with it each character of its text."""


class Bodies:
    """The bodies of all sessions.

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
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(2, "rolltap-decompress")

    @asynccontextmanager
    async def read(self, request: web.Request, session_id: str) -> AsyncIterator[bytes]:
        """Yield the body of a request, decompressed as its Content-Encoding says: zstd or gzip.

        The body counts against the quota until the end of the context. Raises `DialectError`
        with status 413 when the body is longer than the limit, before or after decompression,
        400 when it cannot be decompressed, 408 when it takes too long to arrive, and over the
        quota 429 when the session itself holds too much, which is no fault of ours, and else
        503.
        """
        if (request.content_length or 0) > self._limit:
            raise too_large(self._limit)
        room = _Room(session_id)
        encoding = request.headers.get("content-encoding", "").strip().lower()
        try:
            if encoding in ("", "identity"):
                body = await self._receive(request, room)
            else:
                async with self._turn(session_id):
                    body = await self._receive(request, room)
                    body = await self._decompress(body, encoding, room)
            yield body
        finally:
            self._free(room, room.held)

    async def _receive(self, request: web.Request, room: "_Room") -> bytes:
        received = io.BytesIO()  # its value is not a copy
        try:
            async with asyncio.timeout(self._seconds):
                async for piece in request.content.iter_any():
                    if room.held + len(piece) > self._limit:
                        raise too_large(self._limit)
                    await self._take(room, len(piece))
                    received.write(piece)
        except TimeoutError:
            why = f"The request body did not arrive within {self._seconds:g} seconds."
            raise DialectError(why, status=408, code="request_timeout") from None
        return received.getvalue()

    async def _decompress(self, body: bytes, encoding: str, room: "_Room") -> bytes:
        if not body:
            return body
        await self._take(room, self._limit)  # the size is not known yet
        plain = await finished_in(self._threads, decompress, body, encoding, self._limit)
        self._free(room, room.held - len(plain))
        return plain

    @asynccontextmanager
    async def _turn(self, session_id: str) -> AsyncIterator[None]:
        """Let one compressed body of a session arrive and be decompressed at a time.

        Each needs room twice. Two that hold the first and wait for the second would wait for each
        other.
        """
        turn = self._turns.setdefault(session_id, asyncio.Lock())
        try:
            async with asyncio.timeout(self.patience):
                await turn.acquire()
        except TimeoutError:
            raise _overloaded(429) from None
        try:
            yield
        finally:
            turn.release()

    def close(self) -> None:
        """Forget the bodies that wait for decompression."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _take(self, room: "_Room", num_bytes: int) -> None:
        """Hold so many more bytes, as soon as the quota has them. Raises as `read`."""
        status = 503
        try:
            async with asyncio.timeout(self.patience):
                while not self._fits(room, num_bytes):
                    if self.held[room.session_id] + num_bytes > self._of_session:
                        status = 429  # even if it has room again when the patience ends
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            if not self._fits(room, num_bytes):
                raise _overloaded(status) from None
        room.held += num_bytes
        self.held[room.session_id] += num_bytes

    def _fits(self, room: "_Room", num_bytes: int) -> bool:
        if self.held[room.session_id] + num_bytes > self._of_session:
            return False
        return self.held.total() + num_bytes <= self._of_all

    def _free(self, room: "_Room", num_bytes: int) -> None:
        room.held -= num_bytes
        self.held[room.session_id] -= num_bytes
        if not self.held[room.session_id]:
            del self.held[room.session_id]
        self._freed.set()


@dataclass(slots=True)
class _Room:
    """The bytes that a body holds of the quota of its session."""

    session_id: str
    held: int = 0


def _overloaded(status: int) -> DialectError:
    return DialectError(
        "Too many long requests are in progress. Try again later.",
        status=status,
        code="overloaded",
        retry_after=_RETRY_SECONDS,
    )


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
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
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
    inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
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
    if inflater.unused_data or position < len(body):
        raise EOFError("it goes on after the end of the compressed text")


_DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "zstd": _zstd,
    "gzip": _gzip,
}
"""Codings in which clients send requests. No client is known that compresses one in another."""


@dataclass(slots=True)
class Elements:
    """The elements of a conversation."""

    text: str
    """The list in JSON, from its bracket to the end of the last element."""
    ends: list[int]
    """The offset in the text at which each element ends."""
    known: Sequence[Part] = ()
    """The parts of the first elements."""
    nearest: "Elements | None" = field(default=None, repr=False)
    """The earlier ones of which these go on."""
    parsed_bytes: int = 0
    """About the most bytes of memory of the values in all parts."""

    @property
    def num_bytes(self) -> int:
        """About the most bytes of memory that the text and the parts take."""
        return sys.getsizeof(self.text) + _ELEMENT_BYTES * len(self.ends) + self.parsed_bytes


@dataclass(slots=True)
class Decoded:
    """A decoded request."""

    dialect: Dialect
    model_call: ModelCall
    num_bytes: int
    """Bytes of its body."""
    elements: Elements | None = None
    """Its conversation with all parts, for `RecentBodies.keep`, once."""


class KeptTexts:
    """The `RecentBodies` of all sessions: those that were used least recently are forgotten when
    they take more than `most` bytes of memory together."""

    def __init__(self, most: int = _MOST_OF_ALL) -> None:
        self.lock = threading.Lock()
        """For what each of them keeps, and for the account of it."""
        self._most = most
        self._sizes: OrderedDict[RecentBodies, int] = OrderedDict()
        self._total = 0

    def note(self, bodies: "RecentBodies", num_bytes: int) -> None:
        """Note how many bytes a session keeps from now on. It is used now.

        The caller holds the lock.
        """
        self._total += num_bytes - self._sizes.pop(bodies, 0)
        if num_bytes:
            self._sizes[bodies] = num_bytes
        while self._total > self._most:
            forgotten, freed = self._sizes.popitem(last=False)
            self._total -= freed
            forgotten.forget()


class RecentBodies:
    """The conversations in the last accepted requests of a session.

    It keeps the text of each and the parts that it was decoded to.
    """

    def __init__(self, texts: KeptTexts) -> None:
        self._texts = texts
        self._closed = False
        self._recent: list[tuple[Dialect, Elements]] = []
        """Replaced and not changed: a thread may read it."""

    def forget(self) -> None:
        """Forget all: later bodies are parsed as a whole. The caller holds the lock."""
        self._recent = []

    def close(self) -> None:
        """Forget all, and keep nothing from now on."""
        with self._texts.lock:
            self._closed = True
            self.forget()
            self._texts.note(self, 0)

    def decode(self, dialect: Dialect, body: bytes, target: str) -> Decoded:
        """Return the decoded request. Raises as `parse_object` and `Dialect.decode`."""
        recent = [elements for other, elements in self._recent if other is dialect]
        found = read(body, dialect.CONVERSATION, recent)
        if found is None:
            return Decoded(dialect, dialect.decode(parse_object(body), target), len(body))
        request, elements = found
        model_call = dialect.decode(request, target, elements.known)
        decoded = Decoded(dialect, model_call, len(body))
        if len(model_call.parts) == len(elements.ends):
            elements.known = model_call.parts
            decoded.elements = elements
        return decoded

    def keep(self, decoded: Decoded) -> None:
        """Keep the conversation of an accepted request in place of the one that it goes on."""
        elements = decoded.elements
        decoded.elements = None
        if elements is None:
            return
        with self._texts.lock:
            if self._closed:
                return
            kept = [entry for entry in self._recent if entry[1] is not elements.nearest]
            elements.nearest = None
            kept.append((decoded.dialect, elements))
            kept = kept[-_RECENT:]
            num_bytes = sum(entry[1].num_bytes for entry in kept)
            while num_bytes > _MOST_KEPT:
                num_bytes -= kept.pop(0)[1].num_bytes
            self._recent = kept
            self._texts.note(self, num_bytes)


def read(
    body: bytes,
    key: str,
    recent: Sequence[Elements],
) -> tuple[dict[str, Any], Elements] | None:
    """Return the request in a body, and the elements of its list `key`.

    Those that `recent` has too are None in the request. Returns None for a body that is to be
    parsed as a whole: it has no such list of objects, or is invalid.
    """
    try:
        check_values(body)
        return _read(body.decode(), key, recent)
    except (ValueError, IndexError, RecursionError):
        return None


def _read(text: str, key: str, recent: Sequence[Elements]) -> tuple[dict[str, Any], Elements]:
    # within a text of JSON, a quote has a backslash before it: this is a key
    found = re.search(rf'"{key}"{_BLANKS.pattern}:{_BLANKS.pattern}\[', text)
    if found is None:
        raise ValueError("no conversation")
    begin = found.end() - 1
    known = 0
    nearest = Elements("[", [1])
    for earlier in recent:
        alike = bisect_right(earlier.ends, _alike(text, begin, earlier.text))
        if alike > known:
            known = alike
            nearest = earlier
    ends = nearest.ends[:known]
    start = begin + ends[-1] if ends else begin
    values: list[Any] = [None] * known
    at = _skip(text, start)
    while text[at] == ("," if ends else "["):
        value, at = JSON.raw_decode(text, _skip(text, at + 1))
        if not isinstance(value, dict):
            raise ValueError("no object")  # the end of an object needs no look at what follows
        values.append(value)
        ends.append(at - begin)
        at = _skip(text, at)
    if text[at] != "]":
        raise ValueError("no list")
    request = JSON.decode(f'{text[:begin]}"{_PLACE}"{text[at + 1 :]}')
    if not isinstance(request, dict) or request.get(key) != _PLACE:
        raise ValueError("another list of this name")  # a nested one, or the first of two
    request[key] = values
    request = bounded_value(request, text[:begin] + text[start:], MOST_LEVELS_OF_A_BODY)
    elements = Elements(text[begin : begin + ends[-1]], ends, nearest.known[:known])
    new = elements.text
    if known == len(nearest.ends):
        elements.parsed_bytes = nearest.parsed_bytes
        new = text[start : begin + ends[-1]]
    if new:
        elements.parsed_bytes += _parsed_bytes(new)
    if 2 * known > len(nearest.ends):
        elements.nearest = nearest
    return request, elements


def _parsed_bytes(text: str) -> int:
    """Return about the most bytes of memory of what is parsed from a JSON text."""
    size = sys.getsizeof(text)
    if _WIDE.search(text):
        size = 4 * len(text)
    # an escape hides a mark in the JSON within a text
    num_values = count_marks(text.encode()) + text.count(r"\u00")
    return size + _VALUE_BYTES * num_values


def _skip(text: str, at: int) -> int:
    """Return the offset of what follows the blanks at an offset."""
    blanks = _BLANKS.match(text, at)
    assert blanks is not None
    return blanks.end()


def _alike(text: str, begin: int, earlier: str) -> int:
    """Return the number of characters of `earlier` with which `text` goes on from `begin`."""
    alike = 0
    step = _FIRST_STEP
    grows = True
    while step:
        piece = earlier[alike : alike + step]
        grows = grows and bool(piece)
        if text.startswith(piece, begin + alike):
            alike += len(piece)
        else:
            grows = False
        step = step * 2 if grows else step // 2
    return alike
