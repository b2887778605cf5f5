"""Addon: the address the proxy listens on. Loopback, unless sessions have passwords."""

import asyncio
import ipaddress
import json
import logging
from pathlib import Path

from mitmproxy import ctx, exceptions
from mitmproxy.addonmanager import Loader
from mitmproxy.proxy.mode_specs import ProxyMode

from rolltap.addons.store.staging import write_atomically

logger = logging.getLogger(__name__)


class Listen:
    """Has the proxy listen on loopback by default, refuses any other address without `rolltap_secret`, and tells the
    address once calls can be taken."""

    def __init__(self) -> None:
        self._announcing: asyncio.Task[None] | None = None

    def load(self, loader: Loader) -> None:
        """Declare the option, and listen on loopback unless another address was given."""
        text = "File, or /dev/fd/NUMBER, that is told `host` and `port` in a line of JSON once calls can be taken."
        loader.add_option("rolltap_ready", str, "", text)
        if not ctx.options.listen_host:
            ctx.options.update(listen_host="127.0.0.1")

    def configure(self, updated: set[str]) -> None:
        """Refuse to be reachable from other machines without a secret."""
        for mode in ctx.options.mode:
            host = ProxyMode.parse(mode).listen_host(ctx.options.listen_host)
            if ctx.options.rolltap_secret or is_loopback(host):
                continue
            refusal = (
                f"the proxy would listen on {host!r}, which other machines can reach: set rolltap_secret, or "
                "listen on 127.0.0.1 (listen_host, or mode regular@127.0.0.1:PORT)"
            )
            if self._announcing is not None:
                raise exceptions.OptionsError(refusal)
            logger.error("%s", refusal)  # see `Capture.configure`

    def running(self) -> None:
        """Tell where the proxy listens."""
        self._announcing = asyncio.get_running_loop().create_task(self._announce())

    async def _announce(self) -> None:
        proxyserver = ctx.master.addons.get("proxyserver")
        addresses = proxyserver.listen_addrs()
        if is_loopback(ctx.options.listen_host) and not all(is_loopback(host) for host, *_ in addresses):
            # mitmproxy 12 chooses its address before it loads scripts: `load` came too late, so listen again
            port = addresses[0][1]
            modes = [mode if "@" in mode else f"{mode}@{ctx.options.listen_host}:{port}" for mode in ctx.options.mode]
            ctx.options.update(mode=modes)
            await proxyserver.setup_servers()
            addresses = proxyserver.listen_addrs()
        if not addresses:
            return  # the port is taken, which mitmproxy says and ends for
        if not ctx.options.rolltap_secret and not all(is_loopback(host) for host, *_ in addresses):
            logger.error("the proxy listens on %s without rolltap_secret: stopping", addresses)
            ctx.master.shutdown()
            return
        where = " and ".join(f"http://{host}:{port}" for host, port, *_ in addresses)
        logger.info("recording to %s, proxy at %s", ctx.options.rolltap_out, where)
        if ctx.options.rolltap_ready:
            ready = Path(ctx.options.rolltap_ready).expanduser()
            host, port, *_ = addresses[0]
            try:
                write_atomically(ready, json.dumps({"host": host, "port": port}) + "\n")
            except OSError as error:
                logger.error("rolltap_ready: %s: stopping", error)
                ctx.master.shutdown()


def is_loopback(host: str) -> bool:
    """Whether an address that was given to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
