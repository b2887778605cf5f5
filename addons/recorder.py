"""Addon: the life of a recorder, from its options and its run folder to its end."""

import asyncio
import gc
import logging
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version

from mitmproxy import ctx
from mitmproxy.addonmanager import Loader
from mitmproxy.exceptions import OptionsError
from mitmproxy.optmanager import OptManager

from rolltap.addons.endpoint.server import Endpoint
from rolltap.addons.engine.key import read_key
from rolltap.addons.engine.own_model import OwnModel, WrongModel
from rolltap.addons.engine.pool import require_model
from rolltap.addons.errors import InputError, RunError
from rolltap.addons.options import OPTIONS, PREFIX, RecorderOptions, check_options, unknown
from rolltap.addons.prompts.rendering import Rendering
from rolltap.addons.prompts.tokenizer import resolve_model
from rolltap.addons.store.metadata import add_recorder, write_metadata
from rolltap.addons.store.records import Event
from rolltap.addons.store.session_options import SessionOptions
from rolltap.addons.store.tables import RunWriter

logger = logging.getLogger(__name__)

_PACKAGES = ("rolltap", "mitmproxy", "renderers", "transformers", "pyarrow")
"""Packages whose versions are written to `run.json`."""
_ALLOCATIONS = 10_000
"""Threshold of the youngest generation: net allocations of container objects between two
collections. A call makes some hundreds, and most of them live as long as the call."""
_LIVE = {"rolltap_allow", "rolltap_ready", "rolltap_secret_file"}
"""Options that other addons read. They may change while a run is recorded."""
_SWITCH_SECONDS = 0.0005
"""Time after which a thread gives way. The event loop waits so long after each system call while a
prompt is made in a thread: with Python's 5 ms, 256 sessions stalled for up to 0.5 s."""


def open_run(options: RecorderOptions) -> Endpoint:
    """Open the run folder `rolltap_out`, and return the endpoint that records to it.

    Raises `InputError`, before anything is written, if the model has no tokenizer, or an engine
    that answers serves another model. Raises it also when the run folder cannot be written or
    belongs to another tokenizer.
    """
    with _naming("rolltap_engine_key_file"):
        key = read_key(options.engine_key_file)
    with _naming("rolltap_model, rolltap_renderer, rolltap_tool_parser"):
        rendering = Rendering(resolve_model(options.model), options.renderer, options.tool_parser)
    for text in (*rendering.lacks, *rendering.notes):
        logger.warning("%s", text)
    own = OwnModel.of(rendering.model, rendering.tokenizer)
    # mitmdump serves nobody yet: its event loop may wait
    warnings: list[str] = []
    with ThreadPoolExecutor(1) as pool, _naming("rolltap_model"):
        if options.rerun is None or options.rerun.until:
            warnings = pool.submit(asyncio.run, require_model(options.engine, key, own)).result()
    metadata = {
        "model": rendering.model,
        "renderer": rendering.name,
        "tool_parser": rendering.family.name,
        "bridge_refusal": rendering.refusal,
        **rendering.digests,
    }
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        versions[name] = version(name)
    recorder = {
        "engines": [*options.engine],  # as JSON reads it back: an equal entry is not added again
        "sampling": options.sampling,
        "limits": {name: value for name, value in options if name.startswith("max_")},
        "keep_adapter": options.keep_adapter,
        "accept_rewards": options.accept_rewards,
        "images": options.images,
        "versions": versions,
    }
    with _naming("rolltap_out"):
        write_metadata(options.out, metadata)
        add_recorder(options.out, recorder)
    warnings = [*rendering.lacks, *warnings]
    writer = RunWriter(options.out, options.fsync)
    with _naming("rolltap_rerun"):
        return Endpoint(rendering, writer, options, engine_key=key, warnings=warnings)


@contextmanager
def _naming(options: str) -> Iterator[None]:
    """Turn an error into one that names the options which are wrong."""
    try:
        yield
    except (InputError, WrongModel, RunError, OSError) as error:
        raise InputError(f"{options}: {error}") from error


class Recorder:
    """Declares the recorder's options, and owns the endpoint and with it the writer of the run
    folder.

    It also sets when collections and threads interrupt the event loop: the libraries make about
    370,000 objects, and a full collection that visits them pauses all calls for 0.2 s.

    Must be the first addon after `Log`, because the others read the options.
    """

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        """None until a run is open."""
        self._starting: asyncio.Task[None] | None = None

    def load(self, loader: Loader) -> None:
        """Declare the options. Log each unknown name and each wrong value, and raise
        `OptionsError`."""
        RecorderOptions.load(loader)
        given = {name: getattr(value, "val", value) for name, value in ctx.options.deferred.items()}
        refusals = unknown_options(ctx.options)
        try:
            check_options(given)
        except InputError as error:
            refusals += str(error).splitlines()
        for refusal in refusals:
            logger.error("%s", refusal)
        if refusals:
            # a script whose `load` raises it is not configured; mitmproxy 11 says nothing of it
            raise OptionsError("these options are wrong")

    def configure(self, updated: set[str]) -> None:
        """Check the options and open the run folder."""
        fixed = sorted(updated & {*OPTIONS} - _LIVE)
        if not fixed:
            return
        if self.endpoint is not None:
            names = ", ".join(fixed)
            raise OptionsError(f"{names} cannot change while a run is recorded: restart mitmdump")
        try:
            self.endpoint = open_run(RecorderOptions.read(ctx.options))
        except InputError as error:
            # raised while the script is loaded, the error would get a traceback; a logged error
            # also stops mitmdump
            for line in str(error).splitlines():
                logger.error("%s", line)

    def running(self) -> None:
        """Start the endpoint, and freeze all objects (`gc.freeze`). The libraries are loaded by
        now.

        The endpoint's socket has been listening since `configure`, so that early requests queue.
        """
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_ALLOCATIONS)
        if self.endpoint is not None:
            self._starting = asyncio.get_running_loop().create_task(self.endpoint.start())

    async def done(self) -> None:
        """Abort running calls and close the run folder."""
        if self.endpoint is None:
            return
        if self._starting is not None:
            await self._starting
            await self.endpoint.close()
        await asyncio.to_thread(self.endpoint.writer.close)

    def options_of(self, session_id: str) -> SessionOptions:
        """Return the options of a session, as `Endpoint.options_of`."""
        if self.endpoint is None:
            return SessionOptions()
        return self.endpoint.options_of(session_id)

    def record(self, event: Event) -> None:
        """Write or count a refusal, if a run is open. Logs an `OSError` instead of raising it."""
        if self.endpoint is not None:
            self.endpoint.refusals.record(event)


def unknown_options(options: OptManager) -> list[str]:
    """Return a refusal of each option of `--set` that no addon declares, with the nearest that one
    does.

    mitmproxy would wait for an addon that declares it. Another script may do that, and mitmproxy's
    configuration file has options of its other programs: their names are not refused.
    """
    refusals = []
    for name, value in options.deferred.items():
        is_set = hasattr(value, "val")
        if is_set and not name.startswith(PREFIX) and name not in options:
            refusals.append(unknown(name, options.keys()))
    if refusals and len(options.scripts) > 1:
        return []
    return refusals
