"""Addon: the address that the proxy listens on. Without `rolltap_secret_file` it must be loopback."""

import asyncio
import json
import logging
from pathlib import Path

from mitmproxy import ctx, exceptions
from mitmproxy.proxy.mode_specs import ProxyMode

from rolltap.addons.options import is_loopback
from rolltap.addons.recorder import Recorder
from rolltap.addons.store.staging import write_atomically

logger = logging.getLogger(__name__)


class Listen:
    """Sets the default address to loopback, refuses other addresses without `rolltap_secret_file`, and writes the
    address to `rolltap_ready` once the proxy listens."""

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
                refusal = f"the mode is {mode.full_spec!r}: rolltap records in the mode `regular` only"
            elif ctx.options.rolltap_secret_file or is_loopback(host):
                continue
            else:
                refusal = (
                    f"the proxy would listen on {host!r}, which other machines can reach: set rolltap_secret_file, or "
                    "listen on 127.0.0.1 (listen_host, or mode regular@127.0.0.1:PORT)"
                )
            if self._announcing is not None:
                raise exceptions.OptionsError(refusal)
            logger.error("%s", refusal)  # see `Recorder.configure`

    def running(self) -> None:
        """Announce the address of the proxy."""
        self._announcing = asyncio.get_running_loop().create_task(self._announce())

    async def _announce(self) -> None:
        proxyserver = ctx.master.addons.get("proxyserver")
        addresses = proxyserver.listen_addrs()
        if is_loopback(ctx.options.listen_host) and not all(is_loopback(host) for host, *_ in addresses):
            # mitmproxy 12 binds its address before it loads scripts, that is before `load` sets it: bind again
            port = addresses[0][1]
            modes = [mode if "@" in mode else f"{mode}@{ctx.options.listen_host}:{port}" for mode in ctx.options.mode]
            ctx.options.update(mode=modes)
            await proxyserver.setup_servers()
            addresses = proxyserver.listen_addrs()
        if not addresses:
            return  # the port is in use: mitmproxy logs that and stops
        if not ctx.options.rolltap_secret_file and not all(is_loopback(host) for host, *_ in addresses):
            advice = "set rolltap_secret_file, or listen on 127.0.0.1"
            logger.error("the proxy listens on %s without rolltap_secret_file: stopping; %s", addresses, advice)
            ctx.master.shutdown()
            return
        urls = " and ".join(f"http://{host}:{port}" for host, port, *_ in addresses)
        logger.info("recording to %s, proxy at %s", ctx.options.rolltap_out, urls)
        if ctx.options.rolltap_ready:
            ready = Path(ctx.options.rolltap_ready).expanduser()
            host, port, *_ = addresses[0]
            endpoint = self._recorder.endpoint
            warnings = [] if endpoint is None else [*endpoint.warnings]
            announced = {"host": host, "port": port, "warnings": warnings}
            try:
                write_atomically(ready, json.dumps(announced) + "\n")
            except OSError as error:
                logger.error("rolltap_ready: %s: stopping", error)
                ctx.master.shutdown()
