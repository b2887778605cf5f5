import gzip
import os
import zlib
from contextlib import suppress

import brotli
import pytest
import zstandard
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.addons.dialects.types import DialectError
from rolltap.addons.endpoint.body import _DECODERS, decompress, read_body

LIMIT = 100_000


def bare_deflate(body):
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


ENCODERS = {"zstd": zstandard.compress, "gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress}
ALL = [*ENCODERS.items(), ("deflate", bare_deflate)]


@pytest.fixture
async def post():
    """Return a function that posts a body and returns what was read, or the status of the error."""

    async def answer(request):
        try:
            return web.Response(body=await read_body(request, LIMIT))
        except DialectError as error:
            return web.Response(status=error.status, text=str(error))

    app = web.Application(client_max_size=1 << 40)
    app.router.add_post("/", answer)
    server = TestServer(app)
    await server.start_server(auto_decompress=False)
    async with TestClient(server) as client:

        async def post(body, encoding=None):
            headers = {"content-encoding": encoding} if encoding else {}
            async with client.post("/", data=body, headers=headers) as response:
                return response.status, await response.read()

        yield post


@pytest.mark.parametrize(("encoding", "encode"), ALL)
@pytest.mark.parametrize("body", [b"", b'{"messages": []}', b"x" * LIMIT], ids=["empty", "short", "as long as allowed"])
async def test_a_compressed_body_arrives_as_it_was(post, encoding, encode, body):
    assert await post(encode(body), encoding) == (200, body)
    assert await post(encode(body), f" {encoding.upper()} ") == (200, body)


async def test_several_frames_are_one_body(post):
    for encoding in ("zstd", "gzip"):
        encode = ENCODERS[encoding]
        assert await post(encode(b"a") + encode(b"b"), encoding) == (200, b"ab")


@pytest.mark.parametrize(("encoding", "encode"), ALL)
async def test_a_body_that_becomes_too_long_is_refused(post, encoding, encode):
    status, text = await post(encode(bytes(LIMIT + 1)), encoding)
    assert (status, text) == (413, b"The request body is larger than 100,000 bytes.")


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_that_is_too_long_is_refused(post, chunked):
    async def chunks():
        yield bytes(LIMIT)
        yield b"x"

    assert (await post(chunks() if chunked else bytes(LIMIT + 1)))[0] == 413


@pytest.mark.parametrize(("encoding", "encode"), ALL[1:])  # what a cut zstd frame holds is read, as mitmproxy does
async def test_a_body_that_ends_early_is_refused(post, encoding, encode):
    status, text = await post(encode(os.urandom(1000))[:-5], encoding)
    assert (status, b"cannot be decompressed" in text) == (400, True), text


@pytest.mark.parametrize("encoding", ["gzip, zstd", "rot13", "br;q=1"])
async def test_other_encodings_are_refused(post, encoding):
    status, text = await post(b"x", encoding)
    assert status == 400
    assert b"use one of zstd, gzip, deflate, br" in text


@given(body=st.binary(max_size=2000), encoding=st.sampled_from(sorted(_DECODERS)))
@settings(max_examples=300, deadline=None)
def test_no_bytes_crash_a_decompressor(body, encoding):
    for made in (body, ENCODERS[encoding](body)[: len(body)]):
        with suppress(DialectError):
            assert len(decompress(made, encoding, 1000)) <= 1000
