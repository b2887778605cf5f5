"""Secrets in recorded text: the known forms of keys, tokens and passwords. One of another form is not found."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from rolltap.addons.store.records import json_text
from rolltap.addons.store.tables import read_rows
from rolltap.trainer.traces.reader import RecordedSession, iter_sessions
from rolltap.trainer.traces.tree import find_ends, link_calls

REDACTED = "[redacted]"

_FORMS = {
    "private key": r"-----BEGIN[ A-Z0-9]{0,30} PRIVATE KEY-----[\s\S]{1,20000}?(?:-----END[ A-Z0-9]{0,30} KEY-----|\Z)",
    "JWT": r"(?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}",
    "API key (sk-)": r"(?<![\w-])sk-[A-Za-z0-9_-]{20,}",
    "GitHub token": r"(?<!\w)(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,})",
    "Hugging Face token": r"(?<!\w)hf_[A-Za-z0-9]{30,}",
    "AWS key id": r"(?<!\w)(?:AKIA|ASIA)[A-Z0-9]{16}(?!\w)",
    "Slack token": r"(?<!\w)xox[abeoprs]-[A-Za-z0-9-]{10,}",
    "GitLab token": r"(?<![\w-])glpat-[\w-]{20,}",
    "Google API key": r"(?<!\w)AIza[\w-]{35}",
    "bearer token": r"(?i:authorization['\"]?\s*[:=]\s*['\"]?bearer)\s+[\w.~+/=-]{12,}",
    "password in a URL": r"(?<=://)[^\s/:@\"'<>]{1,100}:[^\s/@\"'<>]{3,200}@(?=[\w.\[-])",
}
_NAMES = [*_FORMS, "given text"]
_SHORTEST = 20
"""Characters of the shortest key or token."""


class Secrets:
    """Finds the known forms of secrets, and the texts that are given."""

    def __init__(self, texts: Collection[str] = ()) -> None:
        # as it is, and as it is within JSON, such as the arguments of a tool call
        written = {form for text in texts if text for form in (text, text.replace("\\", "\\\\").replace('"', '\\"'))}
        given = "|".join(map(re.escape, sorted(written, key=len, reverse=True))) or r"(?!)"
        self._pattern = re.compile("|".join(f"({form})" for form in [*_FORMS.values(), given]))

    def find(self, text: str) -> Iterator[tuple[str, int, int]]:
        """Yield the kind, start and end of what is found in a text, in order."""
        for found in self._pattern.finditer(text):
            yield _NAMES[(found.lastindex or 1) - 1], found.start(), found.end()

    def redact(self, text: str) -> str:
        """Return the text with a note in place of each secret."""
        return self._pattern.sub(REDACTED, text)

    def redact_values(self, value: Any) -> Any:
        """Return JSON values with their texts redacted, and the keys of objects that are not short words."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, list):
            return [self.redact_values(part) for part in value]
        if isinstance(value, dict):
            return {
                name if name.isidentifier() and len(name) < _SHORTEST else self.redact(name): self.redact_values(part)
                for name, part in value.items()
            }
        return value

    def kinds(self, texts: Iterable[str | None]) -> set[str]:
        """Return the kinds of the secrets in texts."""
        return {kind for text in texts if text for kind, _, _ in self.find(text)}


def find_in_run(run: Path, decode: Callable[[list[int]], str] | None) -> dict[str | None, set[str]]:
    """Return session id -> kinds of secrets, for sessions that have one; None for events of nobody.

    Without `decode`, the text of token ids, the tokens are not looked at. Raises `RunError`.
    """
    secrets, found = Secrets(), defaultdict[str | None, set[str]](set)
    for recorded in iter_sessions(run):
        found[recorded.session_id] |= secrets.kinds(_texts(recorded, decode))
    for event in read_rows(run, "events"):
        found[event["session_id"]] |= secrets.kinds([event["detail"]])
    return {session_id: kinds for session_id, kinds in found.items() if kinds}


def _texts(recorded: RecordedSession, decode: Callable[[list[int]], str] | None) -> Iterator[str | None]:
    """Yield the texts that a session recorded. JSON stays as it is: the known forms have nothing to escape."""
    calls = recorded.calls
    for call in calls:
        yield from (call.messages, call.reply, call.tools, call.sampling, call.error, call.path)
    if (session := recorded.session) is not None:
        yield from (session.error, json_text(session.evidence))
    if decode is not None:  # all other calls are a part of one at an end of the call tree
        for end in find_ends(link_calls(calls)[0], range(len(calls))):
            yield decode([*calls[end].prompt_ids, *calls[end].completion_ids])
