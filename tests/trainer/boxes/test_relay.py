import asyncio
import contextlib
import os
import shlex
import socket
import subprocess

import pytest

from rolltap.trainer.boxes.relay import Relay
from rolltap.trainer.boxes.sandbox import SandboxRuntime
from tests.boxes import sandboxed, spec_in

pytestmark = sandboxed

CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", 3128)) as s:
    s.sendall(b"x" * int(sys.argv[1])); s.shutdown(socket.SHUT_WR)
    print(len(b"".join(iter(lambda: s.recv(65536), b""))))
"""


@contextlib.asynccontextmanager
async def recorder(answer):
    """A server that stands for the recorder. `answer` gets a reader and a writer."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def echo(reader, writer):
    writer.write(await reader.read())
    writer.close()


async def in_box(tmp_path, proxy, command):
    async with SandboxRuntime().box(spec_in(tmp_path, proxy=proxy)) as box:
        ended = await box.run(["sh", "-c", command], env={"PATH": os.environ["PATH"]}, timeout=60, log=tmp_path / "log")
        return box.proxy, ended, (tmp_path / "log").read_text()


def client(bytes_sent):
    return f"python3 -c {shlex.quote(CLIENT)} {bytes_sent}"


async def test_a_program_in_a_box_reaches_the_recorder_and_nothing_is_lost(tmp_path):
    async with recorder(echo) as proxy:
        address, ended, said = await in_box(tmp_path, proxy, client(20_000_000))
    assert (address, ended.status, said) == ("127.0.0.1:3128", 0, "20000000\n")


async def test_many_connections_wait_for_their_turn(tmp_path):
    async with recorder(echo) as proxy:
        script = f"for i in $(seq 20); do {client(10)} & done; wait"
        _, _, said = await in_box(tmp_path, proxy, script)
    assert said == "10\n" * 20


async def test_a_recorder_that_is_gone_is_an_end_of_the_connection(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        proxy = f"127.0.0.1:{taken.getsockname()[1]}"
    _, ended, said = await in_box(tmp_path, proxy, client(10))
    assert (ended.status, said) in [(0, "0\n"), (1, said)]


@pytest.fixture
def namespace():
    """Process id of a program in a network namespace of its own."""
    with subprocess.Popen(["unshare", "-rn", "cat"], stdin=subprocess.PIPE) as box:
        while os.readlink(f"/proc/{box.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            pass
        yield box.pid
        box.stdin.close()


async def test_the_port_is_not_open_on_the_machine_itself(namespace):
    async with recorder(echo) as proxy, Relay(namespace, proxy, port=3127):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", 3127))


async def test_a_port_that_is_taken_is_an_os_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} cannot be opened .* Address already in use"):
            async with Relay(os.getpid(), "127.0.0.1:1", port=port):
                pass


async def test_a_process_that_is_gone_is_an_os_error(tmp_path):
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    with pytest.raises(OSError, match="No such file"):
        async with Relay(gone.pid, "127.0.0.1:1"):
            pass
