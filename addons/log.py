"""Addon: what reaches the log. No lines of requests, no control characters, no flood."""

import logging
import traceback
from collections import Counter

from mitmproxy import ctx
from mitmproxy.addonmanager import Loader

from rolltap.addons.endpoint import refusals
from rolltap.addons.endpoint.refusals import is_listed
from rolltap.addons.store.rows import printable

LISTED = 100
"""Number of lines that a place in the code can log. Later ones are counted."""
LONGEST_LINE = 2_000
"""Maximum number of characters of a log line."""
ERROR = "error: "
"""Begins each line of an error, after the time. The process that starts mitmdump looks for it."""


class Log:
    """Cuts mitmproxy's lines for connections and requests, which hold queries, and makes others
    printable and short.

    A place in the code logs `LISTED` lines, and after that those at powers of two. Lines of
    refusals are counted by session: see `Refusals`.
    """

    def __init__(self) -> None:
        self._handlers: list[logging.Handler] = []
        self._counts: Counter[tuple[str, int]] = Counter()
        self._last: logging.LogRecord | None = None
        self._last_count = 0

    def load(self, loader: Loader) -> None:
        """Set the options of the log, and filter what the handlers of mitmdump print."""
        ctx.options.update(flow_detail=0)
        logging.getLogger("mitmproxy.proxy.server").setLevel(logging.ERROR)
        self._handlers = list(logging.getLogger().handlers)
        for handler in self._handlers:
            handler.addFilter(self._filter)

    def done(self) -> None:
        """Remove the filter."""
        for handler in self._handlers:
            handler.removeFilter(self._filter)

    def _filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if record.name == "aiohttp.server" and isinstance(error, ConnectionError):
            return False  # the client of a reply has hung up
        if record is not self._last:  # each handler gets the same record
            self._last = record
            self._last_count = self._count(record)
            text = record.getMessage()
            if record.exc_info:
                text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
            lines = [printable(line, LONGEST_LINE) for line in text.split("\n")]
            if record.levelno >= logging.ERROR:
                lines = [ERROR + line for line in lines]
            if self._last_count > LISTED:
                lines[0] += f" ({self._last_count} such lines so far)"
            record.msg = "\n".join(lines)
            record.args = ()
            record.exc_info = None
        return is_listed(self._last_count, LISTED)

    def _count(self, record: logging.LogRecord) -> int:
        if record.name == refusals.__name__:
            return 1  # they are counted before they are logged
        place = (record.pathname, record.lineno)
        self._counts[place] += 1
        return self._counts[place]
