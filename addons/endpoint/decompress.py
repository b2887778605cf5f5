"""Decompresses bodies, with a bound of what they become and of the work that they make."""

import io
import zlib
from collections.abc import Callable, Generator, Iterator

import brotli  # type: ignore[import-untyped]
import zstandard

from rolltap.addons.dialects.types import DialectError

_PIECE = 64 * 1024
_BROTLI_INPUT = 8
"""Bytes that the Brotli decompressor gets at a time. Brotli 1.1 has no bound of what it returns. A meta-block of 16 MiB
has at least 77 bits before its first command, so 8 bytes do not become more than one of them."""
_MOST_MEMBERS = 16
"""Maximum number of members of a gzip file. Each costs a copy of what follows."""


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return `body` decompressed, at most `limit` bytes.

    Raises `DialectError` with status 413 when it becomes longer, and with status 400 when it cannot be decompressed.
    """
    if encoding not in _DECODERS:
        known = ", ".join(_DECODERS)
        raise DialectError(f"The request body has the content encoding {encoding[:50]!r}: use one of {known}.")
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
    return DialectError(f"The request body is larger than {limit:,} bytes.", status=413, code="request_too_large")


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
