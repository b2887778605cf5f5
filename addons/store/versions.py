"""The weights with which a session began."""

from collections.abc import Iterable
from typing import Any

FIRST_VERSION_COLUMNS = ("first_token_at", "started_at", "weight_versions")
"""The columns of a call that `first_version` takes."""


def first_version(calls: Iterable[tuple[Any, ...]]) -> str | None:
    """Return the weights that sampled the first token of calls, or None when no token was sampled.

    Each call is a tuple of `first_token_at`, `started_at` and `weight_versions`, a list of dicts. Calls without a time
    of their first token count from their start.
    """
    for _, spans in sorted(((first or start, spans) for first, start, spans in calls), key=lambda call: call[0]):
        for span in spans or ():
            if span["end"] > span["start"]:
                version: str = span["version"]
                return version
    return None
