"""Server-sent events of a journal. A line is read once, and all who follow get the same text."""

from collections.abc import AsyncIterator
from functools import lru_cache

from rolltap.addons.errors import RunError
from rolltap.addons.store.records import json_text
from rolltap.trainer.service.journal import Journal

_NEWEST = 256
"""Number of events whose texts are kept: those that followers get in these moments."""
_HIDDEN = ("request", "task_digest")
"""Fields of the journal that its events do not have. The others are short."""


class EventStream:
    """The events of a journal as the texts of server-sent events."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._text = lru_cache(_NEWEST)(self._read)

    async def follow(self, after: int) -> AsyncIterator[str]:
        """Yield the events after a number, a few at a time, for ever; a comment after a silence."""
        async for numbers in self._journal.follow(after):
            yield "".join(map(self._text, numbers)) or ":\n\n"

    def _read(self, number: int) -> str:
        """Return the text of an event. It is empty for a line that is set aside."""
        try:
            event = self._journal.get(number)
        except RunError:
            return ""
        kind = event.pop("kind")
        data = json_text({name: value for name, value in event.items() if name not in _HIDDEN})
        return f"id: {self._journal.cursor(number)}\nevent: {kind}\ndata: {data}\n\n"
