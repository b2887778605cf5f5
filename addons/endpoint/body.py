"""Reads the body of a request: bounded on the wire, and decompressed with a bound."""

import asyncio
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import IO

import brotli  # type: ignore[import-untyped]
import zstandard
from aiohttp import web

from rolltap.addons.dialects.types import DialectError

BODY_LIMIT = 32 * 1024 * 1024
"""Maximum bytes of a body, as it is sent and after decompression. The limit of Anthropic's Messages API."""

_PIECE = 64 * 1024
_BROTLI_INPUT = 1
"""Bytes that the Brotli decompressor gets at a time. Brotli 1.1 has no bound, and a few bytes become 16 MiB."""


async def read_body(request: web.Request, limit: int = BODY_LIMIT) -> bytes:
    """Return the body of `request`, decompressed as its Content-Encoding says: zstd, gzip, deflate or br.

    Reads no more than `limit` bytes. Raises `DialectError` with status 413 when the body is longer, before or after
    decompression, and with status 400 when it cannot be decompressed.
    """
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > limit:
            raise _too_large(limit)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if not body or encoding in ("", "identity"):
        return bytes(body)
    return await asyncio.to_thread(decompress, bytes(body), encoding, limit)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return `body` decompressed, at most `limit` bytes. Raises as `read_body`."""
    if encoding not in _DECODERS:
        known = ", ".join(_DECODERS)
        raise DialectError(f"The request body has the content encoding {encoding[:50]!r}: use one of {known}.")
    plain = bytearray()
    try:
        for piece in _DECODERS[encoding](body):
            plain += piece
            if len(plain) > limit:
                raise _too_large(limit)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError, brotli.error) as error:
        raise DialectError(f"The request body cannot be decompressed: {error}") from error
    return bytes(plain)


def _zstd(body: bytes) -> Iterator[bytes]:
    # the window of 8 MiB is what RFC 8878 asks of every decompressor
    decompressor = zstandard.ZstdDecompressor(max_window_size=8 * 1024 * 1024)
    with decompressor.stream_reader(body, read_across_frames=True) as reader:
        yield from _pieces(reader)


def _gzip(body: bytes) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=io.BytesIO(body)) as reader:
        yield from _pieces(reader)


def _deflate(body: bytes) -> Iterator[bytes]:
    # clients send the format of zlib, as RFC 9110 says, or the bare one
    try:
        zlib.decompressobj().decompress(body[:2], 1)
        inflater = zlib.decompressobj()
    except zlib.error:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    while not inflater.eof:
        piece = inflater.decompress(body, _PIECE)
        body = inflater.unconsumed_tail
        if not (piece or body or inflater.eof):
            raise EOFError("the body ends early")
        yield piece


def _brotli(body: bytes) -> Iterator[bytes]:
    decompressor = brotli.Decompressor()
    for start in range(0, len(body), _BROTLI_INPUT):
        yield decompressor.process(body[start : start + _BROTLI_INPUT])
    if not decompressor.is_finished():
        raise EOFError("the body ends early")


def _pieces(reader: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    while piece := reader.read(_PIECE):
        yield piece


_DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "zstd": _zstd,
    "gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
}


def _too_large(limit: int) -> DialectError:
    return DialectError(f"The request body is larger than {limit:,} bytes.", status=413, code="request_too_large")
