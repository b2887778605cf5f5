"""Addon: the address that the proxy listens on. Without `rolltap_secret_file` it must be
loopback. And the sockets that listen in boxes, where a program reaches its own loopback alone."""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mitmproxy import ctx, exceptions
from mitmproxy.proxy.mode_specs import ProxyMode

from rolltap.addons.options import is_loopback
from rolltap.addons.recorder import Recorder
from rolltap.addons.store.staging import write_atomically

logger = logging.getLogger(__name__)

_BACKLOG = 128
"""Connections of a box that wait until the proxy accepts them."""


class Listen:
    """Sets the default address to loopback, refuses other addresses without `rolltap_secret_file`,
    and writes the address to `rolltap_ready` once the proxy listens."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._announcing: asyncio.Task[None] | None = None
        self._control: socket.socket | None = None
        self.boxes: set[asyncio.Task[None]] = set()
        """One for each box in which the proxy accepts connections."""

    def load(self, _: object) -> None:
        """Set `listen_host` to loopback if it is empty."""
        if not ctx.options.listen_host:
            ctx.options.update(listen_host="127.0.0.1")

    def configure(self, updated: set[str]) -> None:
        """Refuse a non-loopback address without a secret, and modes other than `regular`."""
        for mode in map(ProxyMode.parse, ctx.options.mode):
            host = mode.listen_host(ctx.options.listen_host)
            if mode.type_name != "regular":
                # sessions have no credentials in other modes, and some carry other protocols
                given = mode.full_spec
                self._refuse(f"the mode is {given!r}: rolltap records in the mode `regular` only")
            elif not ctx.options.rolltap_secret_file and not is_loopback(host):
                self._refuse(
                    f"the proxy would listen on {host!r}, which other machines can reach: set "
                    "rolltap_secret_file, or listen on 127.0.0.1 (listen_host, or mode "
                    "regular@127.0.0.1:PORT)"
                )

    def _refuse(self, reason: str) -> None:
        if self._announcing is not None:
            raise exceptions.OptionsError(reason)
        logger.error("%s", reason)  # see `Recorder.configure`

    def running(self) -> None:
        """Announce the address of the proxy."""
        loop = asyncio.get_running_loop()
        self._announcing = loop.create_task(self._announce())
        if ctx.options.rolltap_boxes:
            descriptor = int(Path(ctx.options.rolltap_boxes).name)
            self._control = socket.socket(fileno=descriptor)
            loop.add_reader(descriptor, self._receive, self._control)

    async def _announce(self) -> None:
        options = ctx.options
        proxyserver = ctx.master.addons.get("proxyserver")
        addresses = proxyserver.listen_addrs()
        if is_loopback(options.listen_host) and not _are_loopback(addresses):
            # mitmproxy 12 binds its address before it loads scripts, that is before `load` sets it
            port = addresses[0][1]
            modes = []
            for mode in options.mode:
                if "@" not in mode:
                    mode += f"@{options.listen_host}:{port}"
                modes.append(mode)
            options.update(mode=modes)
            await proxyserver.setup_servers()
            addresses = proxyserver.listen_addrs()
        if not addresses:
            return  # the port is in use: mitmproxy logs that and stops
        if not options.rolltap_secret_file and not _are_loopback(addresses):
            advice = "set rolltap_secret_file, or listen on 127.0.0.1"
            logger.error("the proxy listens on %s: stopping; %s", addresses, advice)
            ctx.master.shutdown()
            return
        urls = " and ".join(f"http://{host}:{port}" for host, port, *_ in addresses)
        logger.info("recording to %s, proxy at %s", options.rolltap_out, urls)
        if options.rolltap_ready:
            self._write(addresses[0])

    def _write(self, address: Sequence[Any]) -> None:
        warnings: Sequence[str] = ()
        if self._recorder.endpoint is not None:
            warnings = self._recorder.endpoint.warnings
        ready = Path(ctx.options.rolltap_ready).expanduser()
        announced = {"host": address[0], "port": address[1], "warnings": [*warnings]}
        try:
            write_atomically(ready, json.dumps(announced) + "\n")
        except OSError as error:
            logger.error("rolltap_ready: %s: stopping", error)
            ctx.master.shutdown()

    def _receive(self, control: socket.socket) -> None:
        """Receive the socket of a box, and the end of a pipe that is closed when the box ends."""
        loop = asyncio.get_running_loop()
        message, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not message:  # rolltap has ended
            loop.remove_reader(control)
            control.close()
        elif len(descriptors) == 2:
            box = loop.create_task(_accept(socket.socket(fileno=descriptors[0]), descriptors[1]))
            self.boxes.add(box)
            box.add_done_callback(self.boxes.discard)


async def _accept(listener: socket.socket, pipe: int) -> None:
    """Accept connections at a box's socket until the other end of the pipe is closed."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pipe, ended.set)
    proxy = next(iter(ctx.master.addons.get("proxyserver").servers))
    try:
        # the boxes take turns: asyncio accepts as many in a row as its backlog has
        server = await asyncio.start_server(proxy.handle_stream, sock=listener, backlog=1)
        listener.listen(_BACKLOG)
        await ended.wait()
        server.close()
    finally:
        loop.remove_reader(pipe)
        os.close(pipe)
        listener.close()


def _are_loopback(addresses: Sequence[Sequence[Any]]) -> bool:
    return all(is_loopback(address[0]) for address in addresses)
