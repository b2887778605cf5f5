import asyncio
import contextlib
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from rolltap.trainer.boxes.way_out import way_out
from tests.boxes import accept_with, sandboxed

pytestmark = sandboxed


@pytest.fixture
def namespace():
    """Process id of a program in a network namespace of its own."""
    with subprocess.Popen(["unshare", "-rn", "cat"], stdin=subprocess.PIPE) as box:
        while os.readlink(f"/proc/{box.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            pass
        yield box.pid
        box.stdin.close()


def is_open_in(namespace):
    """Return True if the port is open in the namespace, see proc_net(5)."""
    sockets = Path(f"/proc/{namespace}/net/tcp").read_text()
    return f"0100007F:{3127:04X} 00000000:0000 0A" in sockets


async def test_the_port_is_open_in_the_namespace_alone_and_only_in_the_block(namespace):
    async with way_out(namespace, accept_with(lambda client: None), port=3127):
        assert is_open_in(namespace)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", 3127))
    assert not is_open_in(namespace)


async def test_a_port_that_is_taken_is_an_os_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=f"port {port} cannot be opened .* Address already in use"
        ):
            async with way_out(os.getpid(), accept_with(lambda client: None), port=port):
                pass


async def test_a_process_that_is_gone_is_an_os_error():
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    with pytest.raises(OSError, match="No such file"):
        async with way_out(gone.pid, accept_with(lambda client: None)):
            pass


async def test_a_way_that_is_cancelled_while_it_is_opened_is_closed_again(namespace):
    opening, cancelled, left = threading.Event(), threading.Event(), threading.Event()

    @contextlib.contextmanager
    def accept(listener):
        opening.set()
        cancelled.wait()
        try:
            yield
        finally:
            left.set()

    async def enter():
        async with way_out(namespace, accept, port=3127):
            raise AssertionError("it was cancelled")

    entering = asyncio.create_task(enter())
    await asyncio.to_thread(opening.wait)
    entering.cancel()
    await asyncio.sleep(0)
    cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert left.is_set()
