"""`rolltap view`: serves the page of a run until it is stopped."""

import errno
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from rolltap.addons.errors import InputError
from rolltap.addons.store.metadata import read_metadata
from rolltap.trainer.viewer.app import link, make_app
from rolltap.trainer.viewer.reader import RunReader


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises `InputError` for a port in use, and `OSError`."""
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    try:
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise InputError(
            f"port {port} of {host} is in use: give another --port, or --port 0"
        ) from error
    # asyncio sets it for its own sockets only; without it a client waits 40 ms for the second
    # packet of an answer
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


async def serve(
    run: Path,
    *,
    host: str,
    port: int,
    say: Callable[[str], None],
) -> None:
    """Serve the page until it is cancelled or gets a signal. `port` 0 is a free one; `say` is told
    the link.

    Raises `RunError` when the folder is not a run, `InputError` for a port in use, and `OSError`.
    """
    read_metadata(run)
    token = secrets.token_urlsafe(32)
    reader = RunReader(run)
    with listen(host, port) as listening:
        app = make_app(reader, token, [host])
        config = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)
        config.timeout_graceful_shutdown = 1  # streams of changes do not end by themselves
        reader.start()
        say(link(host, listening.getsockname()[1], token))
        try:
            await uvicorn.Server(config).serve(sockets=[listening])
        finally:
            reader.close()
