"""The mitmproxy options of a run, and the function that opens the run.

Addon: refuses options that nobody declares or of a wrong type, and sets what interrupts the event loop.
"""

import asyncio
import gc
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from mitmproxy import ctx
from mitmproxy.addonmanager import Loader
from mitmproxy.exceptions import OptionsError
from mitmproxy.optmanager import OptManager

from rolltap.addons.dialects.images import Images
from rolltap.addons.endpoint.budget import Budgets
from rolltap.addons.endpoint.server import Endpoint
from rolltap.addons.engine.key import KEY_FILE, read_key
from rolltap.addons.engine.lookup import OwnModel, WrongModel
from rolltap.addons.engine.pool import require_model
from rolltap.addons.engine.sampling import NEUTRAL_SAMPLING
from rolltap.addons.errors import InputError, RunError
from rolltap.addons.options import unknown_options, wrong_values
from rolltap.addons.prompts.rendering import Rendering, resolve_model
from rolltap.addons.store.metadata import add_recorder, write_metadata
from rolltap.addons.store.tables import RunWriter, Sync

logger = logging.getLogger(__name__)

LIMITS = {
    "rolltap_max_concurrent_calls": "Maximum number of requests of a session that run at the same time.",
    "rolltap_max_session_bytes": "Maximum bytes of the bodies that a session sends and receives.",
    "rolltap_max_requests_per_minute": "Maximum number of requests of a session in a minute.",
}
"""Options of the limits of a session, and what they say."""
BUDGETS = {
    "rolltap_max_calls": "Maximum number of model calls of a session. Failed ones do not count.",
    "rolltap_max_sampled_tokens": "Maximum number of tokens that are sampled for a session. The last reply is cut.",
    "rolltap_max_prompt_tokens": (
        "Maximum number of prompt tokens of one call. A longer one gets its API's error for a full context window."
    ),
}
"""Options of the budgets of a session, and what they say."""
RUN_OPTIONS = {
    f"rolltap_{name}"
    for name in (
        *("out", "engine", "engine_key_file", "model", "renderer", "sampling", "patience", "fsync"),
        *("keep_adapter", "accept_rewards", "prefix", "images"),
    )
}
RUN_OPTIONS |= LIMITS.keys() | BUDGETS.keys()
"""Options that cannot change while a run is open."""
_SAMPLING_KEYS = {*NEUTRAL_SAMPLING, "max_tokens", "seed"}
_PACKAGES = ("rolltap", "mitmproxy", "renderers", "transformers", "pyarrow")
"""Packages whose versions are written to `run.json`."""


def add_options(loader: Loader) -> None:
    """Declare the options of a run."""
    loader.add_option("rolltap_out", str, "", "Run folder to record to. Created if it does not exist.")
    engine = (
        "Base URL of the vLLM server, for instance http://127.0.0.1:8000. Separate several servers of the same model "
        "with commas."
    )
    loader.add_option("rolltap_engine", str, "", engine)
    key_file = (
        "File with the key of the engines, one for all, or /dev/fd/NUMBER. By default the file that the environment "
        f"variable {KEY_FILE} names, if any. `rolltap serve` makes it."
    )
    loader.add_option("rolltap_engine_key_file", str, os.environ.get(KEY_FILE, ""), key_file)
    model = "Model whose tokenizer is used: a folder or a Hugging Face name. Must be the model that the engine serves."
    loader.add_option("rolltap_model", str, "", model)
    renderer = (
        "Renderer from conversations to token ids: a name of the `renderers` library, for instance `qwen3`, or `auto` "
        "to find the one that agrees with the model's chat template."
    )
    loader.add_option("rolltap_renderer", str, "auto", renderer)
    sampling = (
        'Sampling parameters of all calls, a JSON object such as {"temperature": 0.7}. Keys: '
        f"{', '.join(sorted(_SAMPLING_KEYS))}. Missing keys are neutral: tokens are sampled from the policy itself. "
        "Of a harness's request only the token limit, stop texts and JSON schema are applied; its sampling parameters "
        "are recorded."
    )
    loader.add_option("rolltap_sampling", str, "{}", sampling)
    patience = (
        "Seconds after an engine failure, at first contact too, during which a call is retried. A newly sampled token "
        "resets it. A retry continues after the last sampled token. When it is used up, the harness gets an error."
    )
    loader.add_option("rolltap_patience", int, 120, patience)
    fsync = (
        "When recorded calls are synced to disk: `call`, before a reply ends; `session`, when a session ends; `never`, "
        "left to the operating system. A killed recorder loses no committed call in any case. A machine crash can lose "
        "calls that are not synced."
    )
    loader.add_option("rolltap_fsync", str, "session", fsync, choices=get_args(Sync))
    keep_adapter = (
        "A session keeps the LoRA adapter with which its first call was sampled, though newer ones are published, so "
        "that its prefix cache in the engine stays. When false, each request gets the newest adapter. A restarted "
        "recorder finds an adapter again only under the name policy-VERSION, as rolltap publishes it."
    )
    loader.add_option("rolltap_keep_adapter", bool, True, keep_adapter)
    accept_rewards = (
        "Accept a reward with the request that ends a session: a POST through the proxy to http://session.rolltap/end "
        "with a JSON object of the keys reward, parts, task and group. Only for programs that you trust: a harness "
        "knows its session's credentials, and can send a reward of its own."
    )
    loader.add_option("rolltap_accept_rewards", bool, False, accept_rewards)
    prefix = (
        "What the paths of a model API have before `/v1/...`, `/v1beta/...` or `/chat/completions` at a gateway of "
        "yours, for instance `/my/gateway`; `*` stands for any text. Those of well-known providers need no option. "
        "Repeat it for more."
    )
    loader.add_option("rolltap_prefix", Sequence[str], [], prefix)
    images = (
        "What happens to images, audio and files in a conversation. `hide`: the model gets a text that says what is "
        "not shown, and the run an event. `refuse`: the call is an error."
    )
    loader.add_option("rolltap_images", str, "hide", images, choices=get_args(Images))
    for name, text in LIMITS.items():
        loader.add_option(name, int, 0, f"{text} A request over it gets 429. 0 is no limit.")
    for name, text in BUDGETS.items():
        loader.add_option(name, int, 0, f"{text} 0 is no budget.")


def open_run(options: OptManager) -> Endpoint:
    """Open the run folder `rolltap_out`, and return the endpoint that records to it.

    Raises `OptionsError` with a line for each wrong option, before anything is written. Raises it also when an
    engine that answers serves another model, and when the run folder cannot be written or belongs to another tokenizer.
    """
    wrong: list[str] = []

    def read(parse: Callable[[OptManager], Any]) -> Any:
        try:
            return parse(options)
        except OptionsError as error:
            return wrong.append(str(error))

    checks = (_run, _engines, _key, _sampling, _sync, _limits, _images, _prefixes, _rendering)
    run, engines, key, sampling, sync, limits, images, _, rendering = map(read, checks)
    if wrong:
        raise OptionsError("\n".join(wrong))
    warnings = _compare(engines, key, rendering)
    metadata = {
        "model": resolve_model(options.rolltap_model),
        "renderer": rendering.name,
        "bridge_refusal": rendering.refusal,
        **rendering.digests,
    }
    recorder = {
        "engines": engines,
        "sampling": {**NEUTRAL_SAMPLING, **sampling},
        "limits": limits,
        "keep_adapter": options.rolltap_keep_adapter,
        "accept_rewards": options.rolltap_accept_rewards,
        "images": images,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
    }
    try:
        write_metadata(run, metadata)
        add_recorder(run, recorder)
    except (RunError, OSError) as error:
        raise OptionsError(f"rolltap_out: {error}") from error
    writer = RunWriter(run, sync)
    return Endpoint(
        rendering,
        engines,
        writer,
        sampling,
        patience=options.rolltap_patience,
        engine_key=key,
        keep_adapter=options.rolltap_keep_adapter,
        accept_rewards=options.rolltap_accept_rewards,
        images=images,
        budgets=Budgets(**{field.name: limits[field.name] for field in fields(Budgets)}),
        warnings=warnings,
    )


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
            # the URL is recorded with each call, and a run must not contain secrets
            raise OptionsError("rolltap_engine contains a user name or password: remove them from the URL")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionsError(f"rolltap_engine is {url!r}: give a URL such as http://127.0.0.1:8000")
    return urls


def _key(options: OptManager) -> str | None:
    try:
        return read_key(options.rolltap_engine_key_file)
    except InputError as error:
        raise OptionsError(f"rolltap_engine_key_file: {error}") from error


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


def _sync(options: OptManager) -> Sync:
    sync: Sync = _chosen("rolltap_fsync", options.rolltap_fsync, get_args(Sync))
    return sync


def _images(options: OptManager) -> Images:
    images: Images = _chosen("rolltap_images", options.rolltap_images, get_args(Images))
    return images


def _chosen(name: str, value: Any, choices: Sequence[str]) -> Any:
    # mitmproxy checks `choices` in its user interfaces only
    if value not in choices:
        raise OptionsError(f"{name} is {value!r}: choose {', '.join(choices)}")
    return value


def _limits(options: OptManager) -> dict[str, int]:
    limits = {name.removeprefix("rolltap_"): getattr(options, name) for name in (*LIMITS, *BUDGETS)}
    for name, limit in limits.items():
        if limit < 0:
            raise OptionsError(f"rolltap_{name} is {limit}: give 0 for no limit, or a number above 0")
    return limits


def _prefixes(options: OptManager) -> None:
    for prefix in options.rolltap_prefix:
        if not prefix.startswith(("/", "*")) or prefix.endswith("/"):
            raise OptionsError(f"rolltap_prefix is {prefix!r}: give the start of a path, such as /my/gateway, or *")


def _rendering(options: OptManager) -> Rendering:
    model = resolve_model(_required(options, "rolltap_model"))
    try:
        rendering = Rendering(model, options.rolltap_renderer)
    except InputError as error:
        raise OptionsError(f"rolltap_model, rolltap_renderer: {error}") from error
    if rendering.name == "default":
        advice = "tool calls are not parsed. Set rolltap_renderer if a renderer of the model's family exists."
        logger.warning("no renderer matches the chat template of %s: %s", model, advice)
    if rendering.refusal:
        logger.warning(
            "conversations cannot be continued token for token, each call is rendered: %s", rendering.refusal
        )
    return rendering


def _compare(urls: list[str], key: str | None, rendering: Rendering) -> list[str]:
    """Return warnings. Raises `OptionsError` if an engine serves another model.

    mitmdump serves nobody yet: its event loop may wait.
    """
    own = OwnModel.of(rendering.model, rendering.encode)
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(asyncio.run, require_model(urls, key, own)).result()
        except WrongModel as error:
            raise OptionsError(f"rolltap_model: {error}") from error


_ALLOCATIONS = 10_000
"""Threshold of the youngest generation: net allocations of container objects between two collections. A call makes some
hundreds, and most of them live as long as the call."""


_SWITCH_SECONDS = 0.0005
"""Time after which a thread gives way. The event loop waits so long after each system call while a prompt is made in a
thread: with Python's 5 ms, 256 sessions stalled for up to 0.5 s."""


class Startup:
    """Freezes the objects that exist after start-up, and sets when collections and threads interrupt the event loop.

    The libraries make about 370,000 objects. A full collection that visits them pauses all calls for 0.2 s. Must be the
    last addon: the options of all others are declared when it is loaded.
    """

    def load(self, loader: Loader) -> None:
        """Refuse options that no addon declares, and values that are not of an option's type: nothing is opened then.

        Raises `OptionsError` after it has logged each refusal. The logged ones stop mitmdump.
        """
        refusals = [*unknown_options(ctx.options), *wrong_values(ctx.options)]
        for refusal in refusals:
            logger.error("%s", refusal)
        if refusals:
            # a script whose `load` raises it is not configured; mitmproxy 11 says nothing of it
            raise OptionsError("these options are wrong")

    def running(self) -> None:
        """Freeze all objects (`gc.freeze`). The libraries are loaded by now."""
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_ALLOCATIONS)
