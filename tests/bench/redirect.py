"""The least that a redirecting proxy does: what the recorder's cost is compared with."""

from urllib.parse import urlsplit

from mitmproxy import ctx


class Redirect:
    """Sends every request to `bench_engine`, with the mitmproxy options of the recorder."""

    def load(self, loader):
        loader.add_option("bench_engine", str, "", "Base URL of the engine.")
        ctx.options.update(connection_strategy="lazy", upstream_cert=False, http2=False)

    def request(self, flow):
        engine = urlsplit(ctx.options.bench_engine)
        flow.request.scheme, flow.request.host, flow.request.port = "http", engine.hostname, engine.port

    def responseheaders(self, flow):
        flow.response.stream = True


addons = [Redirect()]
