"""The journal of a service: `service.jsonl` in the run folder, one event a line, in the order of
their numbers.

The first line names the journal. Event N is line N + 1. A line is on the disk before anybody is
told of it, and none is changed later, so a number stays the same event after a restart. A line that
cannot be used keeps its number, and is set aside: nobody is told of it.
"""

import asyncio
import errno
import json
import logging
import os
import re
import secrets
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

from rolltap.addons.concurrency import finished_in
from rolltap.addons.errors import InputError, RunError
from rolltap.addons.store.records import json_text, utc_now
from rolltap.addons.store.staging import locked
from rolltap.trainer.service.requests import require_plain

logger = logging.getLogger(__name__)

JOURNAL = "service.jsonl"
"""Name of the file in the run folder."""
_NAME = r"[0-9a-f]{8}"
_AT_ONCE = 64
"""Events that a follower gets at once."""
_NEWEST = 256
"""Events whose texts are kept: those that followers get in these moments."""
_HIDDEN = ("request", "task_digest")
"""Fields that followers do not get. The others are short."""
SILENT_SECONDS = 15.0
"""Longest time without a word to a follower."""
_COMMENT = ":\n\n"
"""A word that is no event."""
_TOLD = 20
"""Most lines that are named when they are set aside."""

Event = dict[str, Any]
"""A line: `kind`, `at` (ISO 8601) and the fields of its kind."""


class Journal:
    """The file of a run, for one service at a time.

    The constructor removes a last line that was not written to its end. Raises `RunError` for a
    file that is not a journal, and for one that another service has; and `OSError`.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / JOURNAL
        self._thread = ThreadPoolExecutor(1, "rolltap-journal")
        """One thread: it writes in the order of the calls."""
        self._grown = asyncio.Event()
        """Set by the next event, and replaced then."""
        self._ends = array("Q", [0])
        """Byte offsets: 0, and the end of each line."""
        self.set_aside: dict[int, str] = {}
        """Number of an event that cannot be used -> why."""
        self._text = lru_cache(_NEWEST)(self._read_text)
        """A line is read once, and all who follow get the same text."""
        run.mkdir(parents=True, exist_ok=True)
        if self._path.is_symlink() or (self._path.exists() and not self._path.is_file()):
            fix = "put the journal itself there, or use a new folder"
            raise RunError(f"{self._path} is no regular file: {fix}")
        with ExitStack() as stack:
            self._file = stack.enter_context(self._path.open("ab", buffering=0))
            if stack.enter_context(locked(self._path)) is None:
                raise RunError(f"another service runs in {run}: stop it, or use another folder")
            for found in re.finditer(rb"\n", self._path.read_bytes()):
                self._ends.append(found.end())
            os.truncate(self._path, self._ends[-1])
            if self._ends[-1] == 0:
                self._write({"journal": secrets.token_hex(4)})
            self.name = self._read_name()
            self._cleanup = stack.pop_all()

    def __len__(self) -> int:
        return len(self._ends) - 2

    def _read_name(self) -> str:
        line = next(self._lines([0]))
        try:
            name = json.loads(line)["journal"]
            if re.fullmatch(_NAME, name):
                return str(name)
        except (ValueError, LookupError, TypeError, RecursionError):
            pass  # of a line that is none of ours
        what = "is not the journal of a service: restore it, or use a new folder"
        raise RunError(f"{self._path} {what}")

    async def add(self, kind: str, **fields: Any) -> int:
        """Append an event and return its number. It is on the disk then.

        Raises `OSError`; then there is no event.
        """
        event = {"kind": kind, "at": utc_now(), **fields}
        number = await finished_in(self._thread, self._write, event)
        self._grown.set()
        self._grown = asyncio.Event()
        return number

    def read(self) -> Iterator[tuple[int, Event]]:
        """Yield number and event of each line. Sets damaged lines aside."""
        for number, line in enumerate(self._lines(range(1, len(self) + 1)), 1):
            event = self._parse(number, line)
            if event is not None:
                yield number, event

    def _parse(self, number: int, line: bytes) -> Event | None:
        """Return the event of a line. A damaged one is set aside."""
        if number in self.set_aside:
            return None
        try:
            event: Event = json.loads(line)
            require_plain(event)
            if not isinstance(event, dict):
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            self.put_aside(number, f"it is damaged: {error}")
            return None
        return event

    def put_aside(self, number: int, why: str) -> None:
        """Set the line of an event aside, and say so."""
        self.set_aside[number] = why
        if len(self.set_aside) <= _TOLD:
            logger.warning("%s", self._named(number))

    def get(self, number: int) -> Event:
        """Return the event with a number. Raises `RunError` for a line that is set aside."""
        return self.get_all([number])[0]

    def get_all(self, numbers: Sequence[int]) -> list[Event]:
        """Return the events with these numbers. Raises as `get`."""
        events = []
        for number, line in zip(numbers, self._lines(numbers), strict=True):
            event = self._parse(number, line)
            if event is None:
                raise RunError(self._named(number))
            events.append(event)
        return events

    def _named(self, number: int) -> str:
        return f"{self._path}, line {number + 1} is set aside: {self.set_aside[number]}"

    async def follow(self, after: int) -> AsyncIterator[str]:
        """Yield the events after a number as server-sent events, a few at a time, for ever.

        A comment is yielded after a silence.
        """
        while True:
            grown = self._grown
            if after < len(self):
                first = after + 1
                after = min(len(self), after + _AT_ONCE)
                texts = [self._text(number) for number in range(first, after + 1)]
                yield "".join(texts) or _COMMENT
                # others have their turn, and it is seen that a client has gone
                await asyncio.sleep(0)
                continue
            try:
                await asyncio.wait_for(grown.wait(), SILENT_SECONDS)
            except TimeoutError:
                yield _COMMENT

    def _read_text(self, number: int) -> str:
        """Return an event as a server-sent one. The text is empty for a line that is set aside."""
        try:
            event = self.get(number)
        except RunError:
            return ""
        kind = event.pop("kind")
        for name in _HIDDEN:
            event.pop(name, None)
        return f"id: {self.cursor(number)}\nevent: {kind}\ndata: {json_text(event)}\n\n"

    def cursor(self, number: int) -> str:
        """Return the name of a place in the journal: after the event with the number."""
        return f"{self.name}-{number}"

    def place(self, cursor: str | None) -> int:
        """Return the number of a cursor; 0 for None.

        Raises `InputError` for a cursor of another journal.
        """
        if cursor is None:
            return 0
        name, _, number = cursor.rpartition("-")
        is_number = re.fullmatch(r"[0-9]{1,15}", number)
        if name == self.name and is_number and int(number) <= len(self):
            return int(number)
        raise InputError(
            f"after = {cursor[:80]!r} is no cursor of this run, whose cursors are {self.cursor(0)} "
            f"to {self.cursor(len(self))}: leave it out to read from the first event"
        )

    def close(self) -> None:
        """Write what was added, and close the file."""
        self._thread.shutdown()
        self._cleanup.close()

    def _write(self, line: Event) -> int:
        text = json_text(line).encode() + b"\n"
        end = self._ends[-1]
        try:
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.fsync(self._file.fileno())
        except OSError:
            os.truncate(self._path, end)
            raise
        self._ends.append(end + len(text))
        return len(self)

    def _lines(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """Yield the lines of events. Number 0 is the first line, which names the journal."""
        with self._path.open("rb") as file:
            for number in numbers:
                start = self._ends[number]
                if file.tell() != start:
                    file.seek(start)
                yield file.readline()
