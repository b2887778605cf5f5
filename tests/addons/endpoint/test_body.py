"""Bodies are bounded on the wire, in time, in memory and after decompression."""

import asyncio
import gzip
import os
import threading
import tracemalloc
from contextlib import asynccontextmanager, suppress
from unittest import mock

import pytest
import zstandard
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from rolltap.addons.dialects.call import DialectError
from rolltap.addons.endpoint import body as body_module
from rolltap.addons.endpoint.body import _DECODERS, Bodies, _Room, decompress
from tests.addons.harness import until
from tests.deep import examples

LIMIT = 100_000


ENCODERS = {"zstd": zstandard.compress, "gzip": gzip.compress}
ALL = [*ENCODERS.items()]


@asynccontextmanager
async def serving(bodies, leave):
    """Yield a client of a server that answers with what it has read, when `leave` is set."""

    async def answer(request):
        try:
            async with bodies.read(request, request.headers.get("session", "s1")) as body:
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
        yield client


@pytest.fixture
async def post():
    """Return a function that posts a body and returns the status and what was read, or the
    error."""
    leave = asyncio.Event()
    leave.set()
    async with serving(Bodies(LIMIT, 2 * LIMIT, 4 * LIMIT), leave) as client:

        async def post(body, encoding=None):
            headers = {"content-encoding": encoding} if encoding else {}
            async with client.post("/", data=body, headers=headers) as response:
                return response.status, await response.read()

        yield post


@pytest.mark.parametrize(("encoding", "encode"), ALL)
@pytest.mark.parametrize(
    "body", [b"", b'{"messages": []}', b"x" * LIMIT], ids=["empty", "short", "as long as allowed"]
)
async def test_a_compressed_body_arrives_as_it_was(post, encoding, encode, body):
    assert await post(encode(body), encoding) == (200, body)
    assert await post(encode(body), f" {encoding.upper()} ") == (200, body)


async def test_several_frames_are_one_body(post):
    encode = zstandard.compress
    assert await post(encode(b"a") + encode(b"b"), "zstd") == (200, b"ab")


async def chunks(body):
    for start in range(0, len(body), LIMIT):
        yield body[start : start + LIMIT]


@pytest.mark.parametrize(("encoding", "encode"), [*ALL, (None, bytes), (None, chunks)])
async def test_a_body_that_is_or_becomes_too_long_is_refused(post, encoding, encode):
    status, text = await post(encode(bytes(LIMIT + 1)), encoding)
    assert status == 413
    assert text == b"The request body is larger than 100,000 bytes."


@pytest.mark.parametrize(
    "other", [lambda body: body[:-5], lambda body: body * 2], ids=["early", "later"]
)
async def test_a_body_that_does_not_end_where_it_says_is_refused(post, other):
    """A cut zstd frame is read as far as it goes, as mitmproxy does."""
    status, text = await post(other(gzip.compress(os.urandom(1000))), "gzip")
    assert status == 400
    assert b"cannot be decompressed" in text


@pytest.mark.parametrize("encoding", ["gzip, zstd", "deflate", "br", "gzip;q=1"])
async def test_other_encodings_are_refused(post, encoding):
    status, text = await post(b"x", encoding)
    assert status == 400
    assert b"use one of zstd, gzip." in text


@pytest.fixture
async def reading():
    """Return bodies, the event that ends their requests, and a function that begins to send a body
    of a session."""
    bodies = Bodies(LIMIT, 2 * LIMIT, 3 * LIMIT)
    leave = asyncio.Event()
    async with serving(bodies, leave) as client:

        def post(session, body):
            return asyncio.create_task(client.post("/", data=body, headers={"session": session}))

        yield bodies, leave, post


async def held(bodies, num_bytes):
    """Return when the bodies of all sessions take so many bytes."""
    await until(lambda: bodies.held.total() == num_bytes)


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
    bodies.patience = 0
    refused = await post("s1", b"x")
    assert refused.status == 429  # no fault: the session itself fills its room
    assert refused.headers["retry-after"] == "5"
    leave.set()
    assert [(await request).status for request in first] == [200, 200]


async def test_a_body_that_does_not_arrive_in_time_and_one_whose_client_hangs_up_leave_no_bytes_behind(
    reading,
):
    bodies, leave, post = reading
    request = post("s1", bytes(LIMIT))
    await held(bodies, LIMIT)
    request.cancel()
    bodies._seconds = 0

    async def unfinished():
        yield b"x"
        await asyncio.Event().wait()

    assert (await post("s1", unfinished())).status == 408
    leave.set()
    await held(bodies, 0)


def gzipped(body):
    """Return a request whose bytes have all arrived some time before their end is seen."""

    async def arrive():
        yield body
        await asyncio.sleep(0)

    content = mock.Mock(iter_any=arrive)
    return mock.Mock(
        content=content, content_length=len(body), headers={"content-encoding": "gzip"}
    )


async def test_two_bodies_that_fit_one_after_the_other_are_both_read():
    """The compressed bytes of both and the decompressed ones of one are more than a session may
    have."""
    bodies = Bodies(LIMIT, 2 * LIMIT, 4 * LIMIT)
    plain = os.urandom(LIMIT * 6 // 10)

    async def read():
        async with bodies.read(gzipped(gzip.compress(plain)), "s1") as body:
            return body

    assert await asyncio.gather(read(), read()) == [plain, plain]
    assert not bodies.held
    assert not bodies._turns
    bodies.close()


async def test_a_compressed_body_that_waits_for_its_turn_too_long_is_no_fault_of_ours():
    bodies = Bodies(LIMIT, 2 * LIMIT, 4 * LIMIT)
    async with bodies._turn("s1"):
        bodies.patience = 0
        with pytest.raises(DialectError) as refused:
            async with bodies.read(gzipped(gzip.compress(b"x")), "s1"):
                pass
    assert refused.value.status == 429
    assert refused.value.retry_after == 5
    bodies.close()


async def test_a_flood_of_one_session_is_no_fault_of_ours_when_its_first_body_has_given_up():
    bodies = Bodies(LIMIT, 2 * LIMIT, 3 * LIMIT)
    bodies.patience = 0
    await bodies._take(_Room("s2"), 2 * LIMIT - 10)
    first = _Room("s1")
    second = _Room("s1")
    await bodies._take(first, 10)
    await bodies._take(second, LIMIT)

    async def more(room):
        try:
            await bodies._take(room, LIMIT)
        except DialectError as error:
            return error.status
        finally:
            bodies._free(room, room.held)

    assert await asyncio.gather(more(first), more(second)) == [429, 429]
    assert await more(_Room("s3")) is None
    await bodies._take(_Room("s3"), LIMIT)
    assert await more(_Room("s4")) == 503
    bodies.close()


async def test_room_that_is_there_at_the_end_of_the_patience_is_taken():
    bodies = Bodies(LIMIT, LIMIT, LIMIT)
    bodies.patience = 0
    room = _Room("s1")
    await bodies._take(room, LIMIT)
    waiting = asyncio.create_task(bodies._take(_Room("s1"), LIMIT))
    asyncio.get_running_loop().call_soon(bodies._free, room, LIMIT)
    await waiting
    assert bodies.held["s1"] == LIMIT
    bodies.close()


async def test_a_session_decompresses_one_body_at_a_time(monkeypatch):
    running = []
    most = []
    free = threading.Event()

    def decompress(body, encoding, limit):
        running.append(body)
        most.append(running.count(body))
        free.wait()
        running.remove(body)
        return body

    monkeypatch.setattr(body_module, "decompress", decompress)
    bodies = Bodies(LIMIT, 2 * LIMIT, 20 * LIMIT)

    async def read(session):
        async with bodies.read(gzipped(session.encode()), session) as body:
            return body

    reads = [asyncio.create_task(read(session)) for session in ("s1", "s1", "s1", "s2")]
    await until(lambda: len(running) == 2)
    assert sorted(running) == [b"s1", b"s2"]
    free.set()
    assert await asyncio.gather(*reads) == [b"s1", b"s1", b"s1", b"s2"]
    assert set(most) == {1}
    bodies.close()


MEGABYTE = 1 << 20
NOTHING = {
    "gzip members": ("gzip", gzip.compress(b"") * 400_000),
    "gzip padding": ("gzip", gzip.compress(b"") + bytes(8 * MEGABYTE)),
    "zstd frames": ("zstd", zstandard.compress(b"") * 800_000),
}
"""Bodies of 8 MB that become nothing. A quadratic way takes minutes for each."""


@given(body=st.binary(max_size=2000), encoding=st.sampled_from(sorted(_DECODERS)))
@examples(300)
def test_no_bytes_crash_a_decompressor(body, encoding):
    for made in (body, ENCODERS[encoding](body)[: len(body)]):
        with suppress(DialectError):
            assert len(decompress(made, encoding, 1000)) <= 1000


@pytest.mark.parametrize(("encoding", "body"), NOTHING.values(), ids=NOTHING)
def test_input_that_becomes_nothing_ends(encoding, body):
    with suppress(DialectError):
        assert decompress(body, encoding, 1000) == b""


def test_a_long_body_that_was_not_compressed_is_read_in_linear_time():
    body = os.urandom(31 * MEGABYTE)
    assert decompress(gzip.compress(body, 0), "gzip", 32 * MEGABYTE) == body


@pytest.mark.parametrize("encoding", ENCODERS)
def test_a_body_that_becomes_a_quarter_of_a_gigabyte_takes_bounded_memory(encoding):
    bomb = ENCODERS[encoding](bytes(1 << 28))
    assert len(bomb) < MEGABYTE
    tracemalloc.start()
    try:
        with pytest.raises(DialectError) as refused:
            decompress(bomb, encoding, MEGABYTE)
        assert tracemalloc.get_traced_memory()[1] < 100 * MEGABYTE
    finally:
        tracemalloc.stop()
    assert refused.value.status == 413
