"""How a setting is refused: in mitmproxy's way while it runs, without a traceback while it starts."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mitmproxy import ctx, exceptions

logger = logging.getLogger(__name__)


@contextmanager
def option_errors() -> Iterator[None]:
    """Around the body of `configure`.

    mitmproxy prints a traceback for an `OptionsError` that a script raises while it is loaded. A logged error ends
    mitmdump at start-up just as well, with the message alone.
    """
    try:
        yield
    except exceptions.OptionsError as error:
        proxyserver = ctx.master.addons.get("proxyserver")
        if proxyserver is None or proxyserver.is_running:
            raise
        logger.error("%s", error)
