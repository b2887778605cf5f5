"""Threads for reading, comparing and copying folders, which can take minutes.

They are no threads of the event loop's own pool: watching boxes and reading facts must not wait for them.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from rolltap.addons.endpoint.work import finished_in

P = ParamSpec("P")
T = TypeVar("T")

_POOL = ThreadPoolExecutor(8, "rolltap-folders")


async def in_folder_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that works on folders in a thread, and return its result.

    When the caller is cancelled, CancelledError is raised after the function has returned: see `finished_in`.
    """
    return await finished_in(_POOL, function, *args, **kwargs)
