"""Bounds what JSON becomes when it is parsed: a few compressed bytes can be millions of values, in one call of C."""

from typing import Any

MOST_VALUES = 500_000
"""Maximum number of values of a JSON text, about. They take 0.1 s and 60 MB; the largest requests of harnesses have
some 10,000. Each value that is not the first follows one of `_BEFORE_A_VALUE`."""
MOST_WITHIN = 4_000_000
"""The same for a body and the JSON within its texts, such as arguments, together. Prose has a comma in 20 bytes or
more, so this refuses texts only that no context window holds."""
MOST_LEVELS = 100
"""Maximum number of levels in the JSON within a text. Chat templates and renderers recurse."""
MOST_LEVELS_OF_A_BODY = 128
"""The same for a body. It is more: bodies repeat the arguments of calls, which were sampled as text, as objects."""

_BEFORE_A_VALUE = b"[{,:"


class TooManyValues(ValueError):
    """A JSON text that would become too many values."""


class TooManyLevels(ValueError):
    """A JSON text whose objects and lists are nested too deep."""


def check_levels(value: Any, most: int) -> None:
    """Raise `TooManyLevels` for a parsed JSON value with more than `most` levels of objects and lists."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    if level:
        raise TooManyLevels(f"it is nested more than {most} levels deep")


def check_values(text: bytes) -> None:
    """Raise `TooManyValues` for a JSON text of more than `MOST_VALUES` values, or `MOST_WITHIN` with those in texts.

    Most requests have fewer bytes than that, and cost nothing.
    """
    if len(text) <= MOST_VALUES:
        return
    within = _marks(text)
    # an escape such as \u002c hides a comma of the JSON within a text
    if within + text.count(b"\\u00") > MOST_WITHIN or (within > MOST_VALUES and _outside_of_texts(text) > MOST_VALUES):
        raise TooManyValues(f"it has more than {MOST_VALUES:,} values")


def _marks(text: bytes) -> int:
    return len(text) - len(text.translate(None, _BEFORE_A_VALUE))


def _outside_of_texts(text: bytes) -> int:
    """Return the number of marks outside of texts, or that of texts if it is greater. Ends soon after `MOST_VALUES`."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = texts = begin = 0
    while begin < len(plain) and max(marks, texts) <= MOST_VALUES:
        quote = plain.find(b'"', begin)
        end = len(plain) if quote < 0 else quote
        marks += _marks(plain[begin:end])
        texts += 1
        closing = plain.find(b'"', end + 1)
        begin = len(plain) if closing < 0 else closing + 1
    return max(marks, texts)
