"""Addon: the address that the proxy listens on. Without `rolltap_secret_file` it must be
loopback."""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mitmproxy import ctx, exceptions
from mitmproxy.proxy.mode_specs import ProxyMode

from rolltap.addons.options import is_loopback
from rolltap.addons.recorder import Recorder
from rolltap.addons.store.staging import write_atomically

logger = logging.getLogger(__name__)


class Listen:
    """Sets the default address to loopback, refuses other addresses without `rolltap_secret_file`,
    and writes the address to `rolltap_ready` once the proxy listens."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._announcing: asyncio.Task[None] | None = None

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
        self._announcing = asyncio.get_running_loop().create_task(self._announce())

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


def _are_loopback(addresses: Sequence[Sequence[Any]]) -> bool:
    return all(is_loopback(address[0]) for address in addresses)
