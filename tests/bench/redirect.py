"""A minimal redirecting proxy, the baseline of the recorder's cost."""

import json
from pathlib import Path
from urllib.parse import urlsplit

from mitmproxy import ctx


class Redirect:
    """An addon that sends every request to `bench_engine`, with the mitmproxy options of the
    recorder."""

    def load(self, loader):
        loader.add_option("bench_engine", str, "", "Base URL of the engine.")
        loader.add_option("rolltap_ready", str, "", "File that the address is written to.")
        ctx.options.update(connection_strategy="lazy", upstream_cert=False, http2=False)

    def running(self):
        host, port = ctx.master.addons.get("proxyserver").listen_addrs()[0][:2]
        Path(ctx.options.rolltap_ready).write_text(json.dumps({"host": host, "port": port}) + "\n")

    def request(self, flow):
        engine = urlsplit(ctx.options.bench_engine)
        flow.request.scheme = "http"
        flow.request.host = engine.hostname
        flow.request.port = engine.port

    def responseheaders(self, flow):
        flow.response.stream = True


addons = [Redirect()]
