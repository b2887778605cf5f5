import asyncio
import socket

from rolltap.trainer.boxes.far_side import relay


async def test_a_box_has_a_bounded_number_of_connections(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "CONNECTIONS", 2)

    async def greet(reader, writer):
        writer.write(b"hello")
        await reader.read()
        writer.close()

    recorder = await asyncio.start_unix_server(greet, tmp_path / "recorder")
    listener = socket.create_server(("127.0.0.1", 0))
    relaying = relay.relayed(str(tmp_path / "recorder"), asyncio.get_running_loop(), listener)
    await asyncio.to_thread(relaying.__enter__)

    async def connect():
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        return await reader.read(5), reader, writer

    first, second, third = [await connect() for _ in range(3)]
    assert [first[0], second[0], third[0]] == [b"hello", b"hello", b""]
    first[2].close()
    again = third
    while not again[0]:  # until the end of the first one has come that far
        again[2].close()
        again = await connect()
    for _, reader, writer in (second, again):
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    relaying.__exit__(None, None, None)
    recorder.close()
    listener.close()
