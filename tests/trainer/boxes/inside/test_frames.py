import asyncio
import socket
import struct
from contextlib import asynccontextmanager, suppress

import pytest

from rolltap.trainer.boxes.inside import frames
from rolltap.trainer.boxes.inside.frames import Connection, LostError


@asynccontextmanager
async def connected(serve):
    """Yield the side that opens streams, of two sides that run here."""
    ends = socket.socketpair()
    opener, server = [await asyncio.open_connection(sock=end) for end in ends]
    sides = [Connection(*opener), Connection(*server, serve)]
    running = [asyncio.create_task(side.run()) for side in sides]
    try:
        yield sides[0]
    finally:
        opener[1].close()
        await asyncio.gather(*running)
        server[1].close()


async def test_messages_and_bytes_of_streams_arrive_in_order():
    async def echo(stream):
        message = await stream.receive()
        content = b""
        while chunk := await stream.receive_bytes():
            content += chunk
        await stream.send({"length": len(content), **message})
        await stream.send_bytes(content)
        await stream.send_end()

    async def ask(connection, number):
        stream = await connection.open({"number": number})
        await stream.send_bytes(bytes([number]) * 300_000)
        await stream.send_end()
        assert await stream.receive() == {"length": 300_000, "number": number}
        content = b""
        while chunk := await stream.receive_bytes():
            content += chunk
        assert content == bytes([number]) * 300_000
        await stream.close()

    async with connected(echo) as connection:
        await asyncio.gather(*(ask(connection, number) for number in range(5)))


async def test_to_close_a_stream_ends_its_task_also_one_that_has_not_begun():
    ended = []

    async def wait(stream):
        await stream.send({})
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(stream)

    async with connected(wait) as connection:
        stream = await connection.open({})
        await stream.receive()
        await stream.close()
        assert len(ended) == 1
        with pytest.raises(LostError, match="ended it"):
            await stream.receive()
        other = await connection.open({})
        await other.close()


async def test_a_stream_that_nobody_reads_any_more_keeps_no_other_waiting():
    async def flood(stream):
        message = await stream.receive()
        await stream.send_bytes(bytes(message["bytes"]))
        await stream.send_end()

    async with connected(flood) as connection:
        flooded = await connection.open({"bytes": 20 << 20})
        await flooded.receive_bytes()
        await flooded.close()
        stream = await connection.open({"bytes": 1})
        assert await stream.receive_bytes() == b"\0"
        await stream.close()


async def test_the_end_of_one_side_is_the_end_of_all_streams_of_the_other():
    cancelled = asyncio.Event()

    async def wait(stream):
        await stream.send({})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with connected(wait) as connection:
        stream = await connection.open({})
        await stream.receive()
        waiting = asyncio.create_task(stream.receive())
        await connection.write(9, 0, b"")  # what it does not know is nothing
    with pytest.raises(LostError):
        await waiting
    with pytest.raises(LostError):
        await connection.open({})
    assert cancelled.is_set()


async def test_a_side_that_is_silent_is_lost(monkeypatch):
    monkeypatch.setattr(frames, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(frames, "_LOOK_SECONDS", 0.01)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    connection = Connection(reader, writer)
    await connection.run()
    assert connection.why == "it was silent for 0.05 s"
    writer.close()
    theirs.close()


async def test_a_silent_side_that_takes_nothing_keeps_no_writer_waiting(monkeypatch):
    monkeypatch.setattr(frames, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(frames, "_LOOK_SECONDS", 0.01)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    connection = Connection(reader, writer)
    stream = await connection.open({})
    running = asyncio.create_task(connection.run())
    with pytest.raises(LostError):
        await stream.send_bytes(bytes(20 << 20))
    await stream.close()
    await running
    theirs.close()


async def test_a_side_that_says_that_it_is_alive_is_not_lost(monkeypatch):
    monkeypatch.setattr(frames, "ALIVE_SECONDS", 0.01)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    running = asyncio.create_task(Connection(reader, writer).run())
    theirs.setblocking(False)
    frame = await asyncio.get_running_loop().sock_recv(theirs, 100)
    assert frame[:9] == bytes([0, 0, 0, 0, 4, 0, 0, 0, 0])
    writer.close()
    theirs.close()
    await running


async def test_a_side_that_is_alive_and_does_not_answer_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(frames, "END_SECONDS", 0.01)
    may_end = asyncio.Event()

    async def serve(stream):
        if not (await stream.receive())["hangs"]:
            await stream.send({})
            return
        while not may_end.is_set():
            with suppress(asyncio.CancelledError):
                await may_end.wait()

    async with connected(serve) as connection:
        stream = await connection.open({"hangs": True})
        stream.patience = 0.01
        with pytest.raises(LostError, match=r"it is alive, and sent nothing for 0\.01 s"):
            await stream.receive()
        await stream.close()
        other = await connection.open({"hangs": False})
        assert await other.receive() == {}
        may_end.set()


def frame(kind, content):
    return struct.pack(">IBI", 1, kind, len(content)) + content


@pytest.mark.parametrize(
    "content",
    [
        b"\0\0\0\1\0\xff\xff\xff\xff",
        frame(0, b"x"),
        frame(0, b"[]"),
        frame(0, b"[" * 10_000),
        frame(0, b"{}") + frame(1, b"[]"),
        frame(0, b"{}") + frame(1, b"[" * 10_000),
        frame(0, b"{}") + frame(2, b"x" * (frames.CHUNK + 1)),
    ],
    ids=range(7),
)
async def test_what_is_no_frame_ends_the_connection(content):
    async def serve(stream):
        await stream.receive()
        await stream.receive()

    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    theirs.send(content)
    connection = Connection(reader, writer, serve)
    await connection.run()
    assert connection.why
    writer.close()
    theirs.close()
