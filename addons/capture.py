"""Addon: sends a model call to the endpoint instead of its host."""

import asyncio
import json
import logging
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from mitmproxy import ctx, exceptions, http
from mitmproxy.addonmanager import Loader

from rolltap.addons.dialects.routes import Route, find_route, is_websocket
from rolltap.addons.dialects.types import DialectError
from rolltap.addons.endpoint import server as ep
from rolltap.addons.engine.sampling import NEUTRAL_SAMPLING
from rolltap.addons.options import option_errors
from rolltap.addons.prompts.rendering import ModelError, Rendering, model_folder
from rolltap.addons.sessions import SESSION, writable
from rolltap.addons.store.errors import RunError
from rolltap.addons.store.metadata import add_recorder, write_metadata
from rolltap.addons.store.records import Event
from rolltap.addons.store.tables import RunWriter, Sync

logger = logging.getLogger(__name__)

CAPTURED = "rolltap_captured"
"""Key of `flow.metadata` that marks a model call."""

_OPTIONS = (
    "rolltap_out",
    "rolltap_engine",
    "rolltap_model",
    "rolltap_renderer",
    "rolltap_sampling",
    "rolltap_patience",
    "rolltap_fsync",
)
_PACKAGES = ("rolltap", "mitmproxy", "renderers", "transformers", "pyarrow")
"""Whose versions `run.json` names."""
_SAMPLING_KEYS = {*NEUTRAL_SAMPLING, "max_tokens", "seed"}
_CREDENTIALS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "cookie")


class Capture:
    """Recognises model calls, owns the run folder and the endpoint that answers them."""

    def __init__(self) -> None:
        self._endpoint: ep.Endpoint | None = None
        self._writer: RunWriter | None = None
        self._starting: asyncio.Task[None] | None = None

    def load(self, loader: Loader) -> None:
        """Declare the options, and have mitmproxy answer TLS by itself without ever dialling the real host."""
        loader.add_option("rolltap_out", str, "", "The run folder that calls are recorded to. Made when missing.")
        loader.add_option(
            "rolltap_engine",
            str,
            "",
            "Base URL of the vLLM server, for instance http://127.0.0.1:8000; several of the same model by commas.",
        )
        loader.add_option("rolltap_model", str, "", "Folder or name of the served model, for its tokenizer.")
        loader.add_option(
            "rolltap_renderer",
            str,
            "auto",
            "How conversations become tokens: a name of the `renderers` library, for instance `qwen3`, or `auto`.",
        )
        loader.add_option(
            "rolltap_sampling",
            str,
            "{}",
            "JSON object of sampling parameters that differ from neutral ones "
            f"({', '.join(sorted(_SAMPLING_KEYS))}). Those that a harness asks for are recorded, not applied.",
        )
        loader.add_option(
            "rolltap_patience",
            int,
            120,
            "Seconds that a call waits for an engine that fails, counted from its last sampled token. Within it the "
            "generation goes on from that token; after it the harness gets its API's own error.",
        )
        loader.add_option(
            "rolltap_fsync",
            str,
            "session",
            "When calls are brought to the disk itself: `call`, before a reply ends; `session`, when a session ends; "
            "`never`, when the system does it. A killed recorder loses no committed call in any case; a machine that "
            "stops does.",
            choices=get_args(Sync),
        )
        loader.add_option(
            "rolltap_websocket",
            bool,
            False,
            "Serve the Responses API over WebSockets too. Codex asks for one first and falls back to HTTP at once "
            "when it is declined.",
        )
        # http2=False: over HTTP/2 mitmproxy opens a connection per call and allows five at a time
        ctx.options.update(connection_strategy="lazy", upstream_cert=False, http2=False)
        with option_errors():
            # mitmproxy does this next; a refusal there would leave it running without these addons
            ctx.options.process_deferred()

    def configure(self, updated: set[str]) -> None:
        """Check the options and open the run folder."""
        if not updated & set(_OPTIONS):
            return
        with option_errors():
            if self._endpoint is not None:
                raise exceptions.OptionsError("the rolltap options cannot change while a run is recorded")
            self._open()

    def _open(self) -> None:
        for name in ("rolltap_out", "rolltap_engine", "rolltap_model"):
            if not getattr(ctx.options, name):
                raise exceptions.OptionsError(f"{name} is not set: add --set {name}=...")
        engines = [url.strip() for url in ctx.options.rolltap_engine.split(",")]
        for engine in engines:
            if urlsplit(engine).username or urlsplit(engine).password:
                # calls name the engine that answered them, and nothing secret belongs in a run
                raise exceptions.OptionsError("rolltap_engine has a user or a password: give the URL without")
            if urlsplit(engine).scheme not in ("http", "https") or not urlsplit(engine).hostname:
                raise exceptions.OptionsError(f"rolltap_engine is {engine!r}: give a URL such as http://127.0.0.1:8000")
        sampling = _sampling(ctx.options.rolltap_sampling)
        run = Path(ctx.options.rolltap_out).expanduser()
        model = model_folder(ctx.options.rolltap_model)
        try:
            rendering = Rendering(model, ctx.options.rolltap_renderer)
        except ModelError as error:
            raise exceptions.OptionsError(f"rolltap_model: {error}") from error
        if rendering.name == "default":
            logger.warning(
                "no renderer knows the chat template of %s: tool calls are not parsed. Set rolltap_renderer if you "
                "know the model's family.",
                model,
            )
        if rendering.refusal:
            logger.warning("no conversation can be continued token for token: %s", rendering.refusal)
        metadata = {
            "model": model,
            "renderer": rendering.name,
            "bridge_refusal": rendering.refusal,
            "tokenizer_sha256": rendering.tokenizer_sha256,
            "chat_template_sha256": rendering.chat_template_sha256,
        }
        recorder = {
            "engines": engines,
            "sampling": {**NEUTRAL_SAMPLING, **sampling},
            "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        }
        try:
            write_metadata(run, metadata)
            add_recorder(run, recorder)
        except (RunError, OSError) as error:
            raise exceptions.OptionsError(f"rolltap_out: {error}") from error
        self._writer = RunWriter(run, ctx.options.rolltap_fsync)
        patience = ctx.options.rolltap_patience
        self._endpoint = ep.Endpoint(rendering, engines, self._writer, run, sampling, patience=patience)

    def running(self) -> None:
        """Start the endpoint. Its socket is open already, so nothing has to wait for it."""
        if self._endpoint is None:
            return
        self._starting = asyncio.get_running_loop().create_task(self._endpoint.start())

    async def done(self) -> None:
        """Abort running calls and close the run folder."""
        if self._endpoint is not None and self._starting is not None:
            await self._starting
            await self._endpoint.close()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)

    def request(self, flow: http.HTTPFlow) -> None:
        """Redirect a model call to the endpoint, without the harness's API key."""
        if flow.response is not None or self._endpoint is None:
            return
        headers = flow.request.headers
        if flow.request.host == ep.CONTROL_HOST:
            if (flow.request.method, flow.request.path) == ("POST", ep.END_PATH):
                self._redirect(flow)
            return
        route = find_route(flow.request.method, flow.request.path, headers)
        if is_websocket(flow.request.path, headers):
            if not ctx.options.rolltap_websocket:
                # 426 makes Codex fall back at once; other refusals cost it seconds
                flow.response = http.Response.make(426, b"{}", {"content-type": "application/json"})
                return
        elif route is None:
            return
        if route is not None and not self._decompress(flow, route):
            return
        self._redirect(flow)

    def _redirect(self, flow: http.HTTPFlow) -> None:
        assert self._endpoint is not None
        headers = flow.request.headers
        for name in [n for n in headers if n.lower() in _CREDENTIALS or n.lower().startswith("x-rolltap-")]:
            del headers[name]
        headers[ep.SECRET_HEADER] = self._endpoint.secret
        headers[ep.SESSION_HEADER] = flow.metadata[SESSION]
        headers[ep.HOST_HEADER] = flow.request.host
        flow.request.scheme, flow.request.host, flow.request.port = "http", "127.0.0.1", self._endpoint.port
        flow.metadata[CAPTURED] = True

    def _decompress(self, flow: http.HTTPFlow, route: Route) -> bool:
        """Codex compresses its bodies with zstd."""
        try:
            flow.request.decode()
        except ValueError as error:
            told = DialectError(f"The request body cannot be decompressed: {error}")
            body = route.dialect.encode_error(told)
            flow.response = http.Response.make(told.status, body, {"content-type": "application/json"})
            path = flow.request.path.partition("?")[0]
            self.record(Event("rejected", flow.metadata[SESSION], flow.request.host, "POST", writable(path), str(told)))
            return False
        return True

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """Pass the endpoint's bytes on as they come."""
        if flow.metadata.get(CAPTURED) and flow.response is not None:
            flow.response.stream = True

    def websocket_message(self, flow: http.HTTPFlow) -> None:
        """mitmproxy keeps every message of a connection; they are in the run already."""
        if flow.metadata.get(CAPTURED) and flow.websocket is not None:
            del flow.websocket.messages[:-1]

    def record(self, event: Event) -> None:
        """Write an event to the run folder; a full disk must not keep a refusal from being answered."""
        if self._writer is None:
            return
        try:
            self._writer.add_event(event)
        except OSError as error:
            logger.error("cannot write to %s: %s", self._writer.run, error)


def _sampling(text: str) -> dict[str, Any]:
    try:
        sampling = json.loads(text)
    except ValueError as error:
        raise exceptions.OptionsError(f"rolltap_sampling is not JSON: {error}") from error
    if not isinstance(sampling, dict):
        raise exceptions.OptionsError(f"rolltap_sampling is {text!r}: give a JSON object")
    for key, value in sampling.items():
        if key not in _SAMPLING_KEYS:
            known = ", ".join(sorted(_SAMPLING_KEYS))
            raise exceptions.OptionsError(f"rolltap_sampling has the unknown key {key!r}: use {known}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise exceptions.OptionsError(f"rolltap_sampling[{key!r}] is {value!r}: give a number")
    return sampling
