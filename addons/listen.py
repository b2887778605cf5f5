"""Addon: the address the proxy listens on. Loopback, unless sessions have passwords."""

import asyncio
import ipaddress
import logging

from mitmproxy import ctx, exceptions
from mitmproxy.addonmanager import Loader
from mitmproxy.proxy.mode_specs import ProxyMode

from rolltap.addons.options import option_errors

logger = logging.getLogger(__name__)

READY = "recording to %s, proxy at %s"
"""What is logged once calls can be taken; `rolltap` reads the address from it."""


class Listen:
    """Has the proxy listen on loopback by default, and refuses any other address without `rolltap_secret`."""

    def __init__(self) -> None:
        self._announcing: asyncio.Task[None] | None = None

    def load(self, loader: Loader) -> None:
        """Listen on loopback unless another address was given."""
        if not ctx.options.listen_host:
            ctx.options.update(listen_host="127.0.0.1")

    def configure(self, updated: set[str]) -> None:
        """Refuse to be reachable from other machines without a secret."""
        with option_errors():
            for mode in ctx.options.mode:
                host = ProxyMode.parse(mode).listen_host(ctx.options.listen_host)
                if not ctx.options.rolltap_secret and not is_loopback(host):
                    raise exceptions.OptionsError(
                        f"the proxy would listen on {host!r}, which other machines can reach: set rolltap_secret, or "
                        "listen on 127.0.0.1 (listen_host, or mode regular@127.0.0.1:PORT)"
                    )

    def running(self) -> None:
        """Say where the proxy listens."""
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
        if not ctx.options.rolltap_secret and not all(is_loopback(host) for host, *_ in addresses):
            logger.error("the proxy listens on %s without rolltap_secret: stopping", addresses)
            ctx.master.shutdown()
            return
        where = " and ".join(f"http://{host}:{port}" for host, port, *_ in addresses)
        logger.info(READY, ctx.options.rolltap_out, where)


def is_loopback(host: str) -> bool:
    """Whether an address that was given to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
