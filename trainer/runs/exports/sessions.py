"""Sessions as exports write them: one at a time, as JSON, without paths and addresses of the
recorder's machine."""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rolltap.addons.store.metadata import read_metadata
from rolltap.addons.store.records import Call, Session, json_text
from rolltap.trainer.console import Advance
from rolltap.trainer.traces.conversations import CallConversation, rebuild_conversations
from rolltap.trainer.traces.ledger import LeftOut
from rolltap.trainer.traces.reader import RecordedSession, iter_sessions, recorded_ids
from rolltap.trainer.traces.sessions import classify_session

_PATH = re.compile(
    r"(?<![\w.:/~-])(?:file://)?~?/(?:[^\s'\"/:,;()\[\]<>|]+/)+([^\s'\"/:,;()\[\]<>|]*)"
)
"""An absolute path of at least two parts, or one in a home folder; not the path of a URL."""
_SOCKET = re.compile(r"\('[^']+', \d+(?:, \d+, \d+)?\)")
"""A socket address, `('HOST', PORT)`, as Python's connection errors print it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A call with its conversation, and why its tokens are not trained; None when they are."""

    conversation: CallConversation
    left_out: LeftOut | None

    @property
    def call(self) -> Call:
        """The call."""
        return self.conversation.call


def each_session(
    run: Path, advance: Advance, leave_out: Collection[str | None] = ()
) -> Iterator[RecordedSession]:
    """Yield the sessions of a run, one at a time, but those of the ids `leave_out`. Raises
    `RunError` when the folder cannot be read."""
    chosen = recorded_ids(run) - {*leave_out}
    for done, recorded in enumerate(iter_sessions(run, chosen), 1):
        yield recorded
        advance("sessions", done, len(chosen))


def session_turns(recorded: RecordedSession) -> list[Turn]:
    """Return the calls of a session as turns, in the order of their starts."""
    conversations = rebuild_conversations(recorded.calls)
    _, reasons = classify_session(recorded)
    return [Turn(*pair) for pair in zip(conversations, reasons, strict=True)]


def public_session(session: Session) -> Session:
    """Return the session with the absolute paths in its error and its evidence cut to their last
    part."""
    evidence = json.loads(without_paths(json_text(session.evidence)))
    return replace(session, error=session.error and without_paths(session.error), evidence=evidence)


def without_paths(text: str) -> str:
    """Cut absolute paths in a text to their last part: `/home/me/runs/a.log` becomes `…/a.log`."""
    return _PATH.sub(r"…/\1", text)


def engine_addresses(run: Path) -> set[str]:
    """Return the addresses (HOST:PORT) of the engines that a run's metadata names."""
    metadata = read_metadata(run)
    urls = set(metadata.get("engines", ()))
    for recorder in metadata.get("recorders", ()):
        urls.update(recorder.get("engines", ()))
    return {urlsplit(url).netloc for url in urls}


def without_addresses(row: dict[str, Any], engines: Collection[str]) -> dict[str, Any]:
    """Replace addresses of engines in the free text of a row: they disclose the recorder's
    network."""
    for column in ("error", "evidence", "detail"):
        if row.get(column):
            text = _SOCKET.sub("ENGINE", row[column])
            # the longest first: one address may be a prefix of another
            for address in sorted(engines, key=len, reverse=True):
                text = text.replace(address, "ENGINE")
            row[column] = text
    return row
