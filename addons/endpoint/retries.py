"""Retries: finds the call that a request repeats, so that it is not sampled twice."""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rolltap.addons.dialects.model_call import DialectError, Reply, Usage

_RETRY_COUNT = "x-stainless-retry-count"
"""Header of the OpenAI and Anthropic SDKs: the number of times that the client has already sent this request."""

_REMEMBERED = 8
"""Number of finished calls of a session that a retry can still get."""


class Repeatable(Protocol):
    """A running or finished call, as `find_retried` sees it."""

    @property
    def request(self) -> bytes:
        """The `request_digest` of the call."""

    @property
    def error(self) -> DialectError | None:
        """The error that ended the call, or None."""

    @property
    def unheard(self) -> bool:
        """True without listeners, if the whole reply has not been delivered either."""


class Completed(Protocol):
    """A completed generation, as `FinishedCall.of` sees it."""

    reply: Reply | None
    request: bytes
    delivered: bool

    @property
    def call_id(self) -> str:
        """The id of the call."""

    @property
    def usage(self) -> Usage:
        """Token counts."""


T = TypeVar("T")
AnyCall = TypeVar("AnyCall", bound=Repeatable)


@dataclass(slots=True, kw_only=True)
class FinishedCall:
    """A completed call whose reply can be given again. To listeners it is a `Generation` that is done.

    It holds no tokens: a session keeps `_REMEMBERED` of them.
    """

    call_id: str
    request: bytes
    """The `request_digest` of the call."""
    reply: Reply
    usage: Usage
    delivered: bool
    """True when the whole reply was written to a listener's connection. False for a call that was committed by an
    earlier process, unless a later call shows that its reply arrived."""
    listeners: int = field(default=0, init=False)

    done = True
    error = None

    @classmethod
    def of(cls, generation: "Completed") -> "FinishedCall":
        """Return the record of a completed generation without listeners."""
        assert generation.reply is not None
        return cls(
            call_id=generation.call_id,
            request=generation.request,
            reply=generation.reply,
            usage=generation.usage,
            delivered=generation.delivered,
        )

    @property
    def unheard(self) -> bool:
        """True without listeners, if the whole reply has not been delivered either."""
        return not self.listeners and not self.delivered

    @property
    def pieces(self) -> list[tuple[str, str]]:
        """The text of the reply, as one pair of (reasoning, content); none for a reply without text."""
        piece = self.reply.reasoning, self.reply.content
        return [piece] if any(piece) else []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for the duration of the block. The reply counts as delivered when it ends without an exception."""
        self.listeners += 1
        try:
            yield
            self.delivered = True
        finally:
            self.listeners -= 1

    async def changed(self, timeout: float) -> bool:
        """Return True."""
        return True

    async def finished(self, timeout: float) -> bool:
        """Return True."""
        return True

    def advance(self) -> bool:
        """Return False: there are no new tokens."""
        return False


def request_digest(dialect: str, model: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> bytes:
    """Return the digest of a request: two requests with the same digest repeat each other.

    It covers the API, the model's name, the prompt and `sampling`, the parsed column `sampling` of the call's row:
    the parameters sent to the engine (token limit, stop texts, schema) and `asked`.
    """
    digest = hashlib.blake2b(json.dumps([dialect, model, sampling], sort_keys=True).encode(), digest_size=16)
    digest.update(array("i", prompt_ids))
    return digest.digest()


def find_retried(calls: Sequence[AnyCall], request: bytes, headers: Mapping[str, str]) -> AnyCall | None:
    """Return the newest of `calls` that the request repeats, or None for a request of its own.

    A repeated request has the same `request_digest`. It is a retry when the call has no listener and its reply was not
    delivered, or when the client marks it as a retry (`_RETRY_COUNT`) and there is no such call. Other equal requests
    are new samples: two sub-agents can send the same prompt. Failed and aborted calls are not reused. `headers` need
    lookups that ignore case, or lower-case keys.
    """
    equal = [call for call in reversed(calls) if call.error is None and call.request == request]
    unheard = [call for call in equal if call.unheard]
    marked = headers.get(_RETRY_COUNT, "0") != "0"
    return next(iter(unheard or (equal if marked else [])), None)


def newest(finished: Sequence[T]) -> list[T]:
    """Return the `_REMEMBERED` newest of a session's finished calls, in the same order."""
    return list(finished[-_REMEMBERED:])
