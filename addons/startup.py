"""Addon: refuses options that nobody declares, and sets what interrupts the event loop."""

import difflib
import gc
import logging
import sys

from mitmproxy import ctx
from mitmproxy.addonmanager import Loader

logger = logging.getLogger(__name__)

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
        """Refuse options of the recorder that no addon declares. mitmproxy would wait for one that does."""
        known = sorted(ctx.options.keys())
        for name in ctx.options.deferred:
            if name.startswith("rolltap_") and name not in known:
                (nearest,) = difflib.get_close_matches(name, known, 1, 0)
                logger.error("%s is no option of the recorder: did you mean %s?", name, nearest)  # stops mitmdump

    def running(self) -> None:
        """Freeze all objects (`gc.freeze`). The libraries are loaded by now."""
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_ALLOCATIONS)
