"""Addon: settings of the interpreter that avoid pauses during calls."""

import gc
import sys

_ALLOCATIONS = 10_000
"""Threshold of the youngest generation: net allocations of container objects between two collections. A call makes some
hundreds, and most of them live as long as the call."""


_SWITCH_SECONDS = 0.0005
"""Time after which a thread gives way. The event loop waits so long after each system call while a prompt is made in a
thread: with Python's 5 ms, 256 sessions stalled for up to 0.5 s."""


class Startup:
    """Freezes the objects that exist after start-up, and sets when collections and threads interrupt the event loop.

    The libraries make about 370,000 objects. A full collection that visits them pauses all calls for 0.2 s.
    """

    def running(self) -> None:
        """Freeze all objects (`gc.freeze`). The libraries are loaded by now."""
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_ALLOCATIONS)
