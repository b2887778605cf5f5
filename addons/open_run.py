"""The options that say what is recorded and where to, and the run that they open."""

import json
import logging
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from mitmproxy.addonmanager import Loader
from mitmproxy.exceptions import OptionsError
from mitmproxy.optmanager import OptManager

from rolltap.addons.endpoint.server import Endpoint
from rolltap.addons.engine.sampling import NEUTRAL_SAMPLING
from rolltap.addons.errors import InputError, RunError
from rolltap.addons.prompts.rendering import Rendering, model_folder
from rolltap.addons.store.metadata import add_recorder, write_metadata
from rolltap.addons.store.tables import RunWriter, Sync

logger = logging.getLogger(__name__)

RUN_OPTIONS = {f"rolltap_{name}" for name in ("out", "engine", "model", "renderer", "sampling", "patience", "fsync")}
"""Options that stay as they are while a run is open."""
_SAMPLING_KEYS = {*NEUTRAL_SAMPLING, "max_tokens", "seed"}
_PACKAGES = ("rolltap", "mitmproxy", "renderers", "transformers", "pyarrow")
"""Whose versions `run.json` names."""


def add_options(loader: Loader) -> None:
    """Declare the options of a run."""
    loader.add_option("rolltap_out", str, "", "The run folder that calls are recorded to. Made when missing.")
    engine = "Base URL of the vLLM server, for instance http://127.0.0.1:8000; several of the same model by commas."
    loader.add_option("rolltap_engine", str, "", engine)
    loader.add_option("rolltap_model", str, "", "Folder or name of the served model, for its tokenizer.")
    renderer = "How conversations become tokens: a name of the `renderers` library, for instance `qwen3`, or `auto`."
    loader.add_option("rolltap_renderer", str, "auto", renderer)
    sampling = (
        f"JSON object of sampling parameters that differ from neutral ones ({', '.join(sorted(_SAMPLING_KEYS))}). "
        "Those that a harness asks for are recorded, not applied."
    )
    loader.add_option("rolltap_sampling", str, "{}", sampling)
    patience = (
        "Seconds that a call waits for an engine that fails, counted from its last sampled token. Within it the "
        "generation goes on from that token; after it the harness gets its API's own error."
    )
    loader.add_option("rolltap_patience", int, 120, patience)
    fsync = (
        "When calls are brought to the disk itself: `call`, before a reply ends; `session`, when a session ends; "
        "`never`, when the system does it. A killed recorder loses no committed call in any case; a machine that "
        "stops does."
    )
    loader.add_option("rolltap_fsync", str, "session", fsync, choices=get_args(Sync))


def open_run(options: OptManager) -> Endpoint:
    """Open the run folder that the options name, and the endpoint that records to it.

    Raises `OptionsError` with a line for each option that is wrong; nothing is written then.
    """
    wrong: list[str] = []

    def read(parse: Callable[[OptManager], Any]) -> Any:
        try:
            return parse(options)
        except OptionsError as error:
            return wrong.append(str(error))

    run, engines, sampling, rendering = map(read, (_run, _engines, _sampling, _rendering))
    if wrong:
        raise OptionsError("\n".join(wrong))
    metadata = {
        "model": model_folder(options.rolltap_model),
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
        raise OptionsError(f"rolltap_out: {error}") from error
    writer = RunWriter(run, options.rolltap_fsync)
    return Endpoint(rendering, engines, writer, sampling, patience=options.rolltap_patience)


def _required(options: OptManager, name: str) -> str:
    value: str = getattr(options, name)
    if not value:
        raise OptionsError(f"{name} is not set: add --set {name}=...")
    return value


def _run(options: OptManager) -> Path:
    return Path(_required(options, "rolltap_out")).expanduser()


def _engines(options: OptManager) -> list[str]:
    urls = [url.strip() for url in _required(options, "rolltap_engine").split(",")]
    for url in urls:
        parts = urlsplit(url)
        if parts.username or parts.password:
            # calls name the engine that answered them, and nothing secret belongs in a run
            raise OptionsError("rolltap_engine has a user or a password: give the URL without")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionsError(f"rolltap_engine is {url!r}: give a URL such as http://127.0.0.1:8000")
    return urls


def _sampling(options: OptManager) -> dict[str, Any]:
    text = options.rolltap_sampling
    try:
        sampling = json.loads(text)
    except ValueError as error:
        raise OptionsError(f"rolltap_sampling is not JSON: {error}") from error
    if not isinstance(sampling, dict):
        raise OptionsError(f"rolltap_sampling is {text!r}: give a JSON object")
    for key, value in sampling.items():
        if key not in _SAMPLING_KEYS:
            known = ", ".join(sorted(_SAMPLING_KEYS))
            raise OptionsError(f"rolltap_sampling has the unknown key {key!r}: use {known}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise OptionsError(f"rolltap_sampling[{key!r}] is {value!r}: give a number")
    return sampling


def _rendering(options: OptManager) -> Rendering:
    model = model_folder(_required(options, "rolltap_model"))
    try:
        rendering = Rendering(model, options.rolltap_renderer)
    except InputError as error:
        raise OptionsError(f"rolltap_model: {error}") from error
    if rendering.name == "default":
        advice = "tool calls are not parsed. Set rolltap_renderer if you know the model's family."
        logger.warning("no renderer knows the chat template of %s: %s", model, advice)
    if rendering.refusal:
        logger.warning("no conversation can be continued token for token: %s", rendering.refusal)
    return rendering
