"""Sampled text, cut at the marks of a response template while it grows.

The parts are those of transformers' `ResponseParser`, which keeps and copies the whole text, and searches all of a
piece again after each mark: its work is quadratic in the text. Here a mark is at most `LONGEST_MARK` characters long,
and no more text than that is held. So the work is linear in the text, whatever was sampled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

LONGEST_MARK = 1024
"""Characters. Longer text that may be the beginning of a mark is no mark."""
_PIECE = 1024
"""Characters that are searched together."""
_BEFORE = "\0"
"""A character in place of the text before: the beginning of the held text is not that of the reply."""


@dataclass(frozen=True, slots=True)
class Part:
    """A mark that opens or closes a field, or text of a field. `field` is None outside of all fields."""

    kind: Literal["open", "text", "close"]
    field: str | None
    text: str


class MarkScanner:
    """Cuts a text into parts. `template` is a `ResponseTemplate` of transformers."""

    def __init__(self, template: Any) -> None:
        self._fields = template.fields
        self._implicit = template.implicit
        self._opens = [("open", field) for field in self._fields.values() if field.open_re is not None]
        self._held = ""
        self._begin = 0
        """Index of the first held character: 1 behind `_BEFORE`."""
        self.field: str | None = self._implicit
        """The field that the text is in."""

    def feed(self, text: str) -> Iterator[Part]:
        """Yield the parts that later text cannot change."""
        for start in range(0, len(text), _PIECE):
            self._held += text[start : start + _PIECE]
            yield from self._scan(last=False)

    def finish(self) -> Iterator[Part]:
        """Yield the parts that were held back."""
        yield from self._scan(last=True)

    def _scan(self, *, last: bool) -> Iterator[Part]:
        while True:
            mark, safe = self._next_mark(last)
            end = safe if mark is None else mark[2].start()
            if end > self._begin:
                yield Part("text", self.field, self._held[self._begin : end])
            if mark is None:
                self._forget(end)
                if len(self._held) <= LONGEST_MARK:
                    return
                yield Part("text", self.field, self._held[self._begin])
                self._forget(self._begin + 1)
                continue
            kind, field, found = mark
            self._forget(found.end())
            if kind == "open":
                self.field = field.name
            yield Part(kind, self.field, found.group())
            if kind == "close":
                self.field = self._implicit

    def _next_mark(self, last: bool) -> tuple[Any, int]:
        """Return the first mark (kind, field, match), or None, and the end of the text before all possible marks.

        Of several marks at one place it is the longest.
        """
        best, best_key = None, None
        safe = len(self._held)
        for kind, field in self._watched():
            pattern = field.open_re if kind == "open" else field.close_re
            found = pattern.search(self._held, self._begin, partial=not last)
            if found is None or (kind == "close" and self._closes_nothing(found)):
                continue
            if not last and (found.partial or found.end() == len(self._held)):  # later text may make it longer
                safe = min(safe, found.start())
                continue
            key = (found.start(), -found.end(), kind == "close")
            if best_key is None or key < best_key:
                best, best_key = (kind, field, found), key
        if best is not None and best[2].start() > safe:
            best = None
        return best, safe

    def _closes_nothing(self, found: Any) -> bool:
        """Return True for an empty close of the implicit field, after which that field goes on."""
        return not found.partial and self.field == self._implicit and found.start() == found.end()

    def _watched(self) -> list[tuple[str, Any]]:
        watched = []
        if self.field == self._implicit:
            watched += self._opens
        if self.field is not None and self._fields[self.field].close_re is not None:
            watched.append(("close", self._fields[self.field]))
        return watched

    def _forget(self, end: int) -> None:
        """Forget the held text up to `end`."""
        if end > self._begin:
            self._held = _BEFORE + self._held[end:]
            self._begin = 1
