"""Addon: refuses options that nobody declares or of a wrong type, and sets what interrupts the event loop."""

import gc
import logging
import sys

from mitmproxy import ctx
from mitmproxy.addonmanager import Loader
from mitmproxy.exceptions import OptionsError

from rolltap.addons.options import unknown_options, wrong_values

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
