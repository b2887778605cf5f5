"""The one way out of a box: a port on the box's own loopback, at which the recorder accepts
connections."""

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from rolltap.addons.concurrency import finished_in
from rolltap.trainer.boxes.runtime import Accept
from rolltap.trainer.boxes.supervised import PROGRAM_THREADS

PORT = 3128
"""Port of a box's loopback that leads to the recorder."""
_SCRIPT = Path(__file__).with_name("inside") / "listener.py"


@asynccontextmanager
async def way_out(pid: int, accept: Accept, port: int = PORT) -> AsyncIterator[None]:
    """Open 127.0.0.1:`port` in the network namespace of process `pid` for the recorder, see
    `BoxSpec.accept`. Outside of the block there is no way out.

    The box needs no program for it, and no byte goes through this process: a short-lived process
    joins the namespace, opens the port and hands over the socket, which goes on to the recorder.

    Entering raises `OSError` when the namespace cannot be joined, the port is taken, or the
    recorder has ended.
    """
    with ExitStack() as stack:

        def open_port() -> None:
            with listening_socket(pid, port) as listener:
                stack.enter_context(accept(listener))

        await finished_in(PROGRAM_THREADS, open_port)
        yield


def listening_socket(pid: int, port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1:`port` in the network namespace of process `pid`.

    Raises `OSError`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            control = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SCRIPT), str(control), str(pid), str(port)],
                env={},
                stdin=subprocess.DEVNULL,
                pass_fds=[control],
            )
        message, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
        process.wait()
    if not descriptors:
        status = f"listener.py ended with status {process.returncode}"
        why = message.decode(errors="replace") or status
        where = f"in the network namespace of process {pid}"
        raise OSError(f"port {port} cannot be opened {where}: {why}")
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    os.set_inheritable(listener.fileno(), False)
    return listener
