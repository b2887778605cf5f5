import asyncio
import gzip
import os
import threading
import zlib
from unittest import mock

import brotli
import pytest
import zstandard
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from rolltap.addons.dialects.model_call import DialectError
from rolltap.addons.endpoint import body as body_module
from rolltap.addons.endpoint.body import Bodies

LIMIT = 100_000


def bare_deflate(body):
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


ENCODERS = {"zstd": zstandard.compress, "gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress}
ALL = [*ENCODERS.items(), ("deflate", bare_deflate)]


@pytest.fixture
async def post():
    """Return a function that posts a body and returns what was read, or the status of the error."""

    bodies = Bodies(LIMIT, 2 * LIMIT, 4 * LIMIT)

    async def answer(request):
        try:
            async with bodies.read(request, "s1") as body:
                return web.Response(body=body)
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


@pytest.fixture
async def reading():
    """Return a function that begins to send a body of a session, and the function that ends it.

    The request that it returns resolves to a status and what was read, when `leave` is set.
    """
    bodies = Bodies(LIMIT, 2 * LIMIT, 3 * LIMIT, seconds=60, patience=60)
    leave = asyncio.Event()

    async def answer(request):
        try:
            async with bodies.read(request, request.headers["session"]) as body:
                await leave.wait()
                return web.Response(body=body)
        except DialectError as error:
            retry = {"retry-after": str(error.retry_after)} if error.retry_after else {}
            return web.Response(status=error.status, text=str(error), headers=retry)

    app = web.Application(client_max_size=1 << 40)
    app.router.add_post("/", answer)
    server = TestServer(app)
    await server.start_server(auto_decompress=False)
    async with TestClient(server) as client:

        def post(session, body):
            return asyncio.create_task(client.post("/", data=body, headers={"session": session}))

        yield bodies, leave, post


async def held(bodies, num_bytes):
    """Return when the bodies of all sessions take so many bytes."""
    while bodies.quota.held.total() != num_bytes:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_bodies_of_a_session_wait_for_room_and_others_do_not(reading):
    bodies, leave, post = reading
    first = [post("s1", bytes(LIMIT)) for _ in range(2)]
    await held(bodies, 2 * LIMIT)
    waiting = post("s1", b"waits")
    other = post("s2", bytes(100))
    await held(bodies, 2 * LIMIT + 100)
    assert not waiting.done()
    leave.set()
    assert [(await request).status for request in (*first, waiting, other)] == [200] * 4
    await held(bodies, 0)


async def test_a_body_that_finds_no_room_is_refused_for_a_while(reading):
    bodies, leave, post = reading
    first = [post("s1", bytes(LIMIT)) for _ in range(2)]
    await held(bodies, 2 * LIMIT)
    bodies.quota.patience = 0
    refused = await post("s1", b"x")
    assert (refused.status, refused.headers["retry-after"]) == (429, "5")  # no fault: the session itself fills its room
    leave.set()
    assert [(await request).status for request in first] == [200, 200]


async def test_a_body_that_does_not_arrive_in_time_is_refused_and_takes_no_room(reading):
    bodies, _, post = reading
    bodies._seconds = 0

    async def unfinished():
        yield b"x"
        await asyncio.Event().wait()

    assert (await post("s1", unfinished())).status == 408
    await held(bodies, 0)


async def test_a_client_that_hangs_up_leaves_no_bytes_behind(reading):
    bodies, leave, post = reading
    request = post("s1", bytes(LIMIT))
    await held(bodies, LIMIT)
    request.cancel()
    leave.set()
    await held(bodies, 0)


async def test_a_session_decompresses_one_body_at_a_time(monkeypatch):
    running, most, free = [], [], threading.Event()

    def decompress(body, encoding, limit):
        running.append(body)
        most.append(running.count(body))
        free.wait(10)
        running.remove(body)
        return body

    monkeypatch.setattr(body_module, "decompress", decompress)
    bodies = Bodies(LIMIT, 10 * LIMIT, 20 * LIMIT)

    def request(body):
        content = mock.Mock(iter_any=lambda: pieces(body))
        return mock.Mock(content=content, content_length=len(body), headers={"content-encoding": "br"})

    async def pieces(body):
        yield body

    async def read(session):
        async with bodies.read(request(session.encode()), session) as body:
            return body

    reads = [asyncio.create_task(read(session)) for session in ("s1", "s1", "s1", "s2")]
    while len(running) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert sorted(running) == [b"s1", b"s2"]
    free.set()
    assert await asyncio.gather(*reads) == [b"s1", b"s1", b"s1", b"s2"]
    assert set(most) == {1}
    bodies.close()
