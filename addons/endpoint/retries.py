"""Retries: finds the call that a request repeats, so that it is not sampled twice.

See "What a retry joins" in `generation.py`.
"""

from collections.abc import Mapping, Sequence

from rolltap.addons.endpoint.generation import Generation

_RETRY_COUNT = "x-stainless-retry-count"
"""Header of the OpenAI and Anthropic SDKs: the number of times that the client has sent this
request already."""
REMEMBERED = 8
"""Number of finished calls of a session that a retry can still get: the newest."""


def find_retried(
    calls: Sequence[Generation],
    digest: bytes,
    headers: Mapping[str, str],
) -> Generation | None:
    """Return the newest of `calls` with this digest that a request repeats, or None.

    `headers` ignore case.
    """
    marked = headers.get(_RETRY_COUNT, "0") != "0"
    equal = None
    for call in reversed(calls):
        if call.error is not None or call.digest != digest:
            continue
        if call.abandoned:
            return call
        if equal is None and marked:
            equal = call
    return equal
