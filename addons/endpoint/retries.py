"""Retries: finds the call that a request repeats, so that it is not sampled twice. See "What a retry joins" in
`generation.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self, TypeVar

from rolltap.addons.dialects.call import Reply, Usage
from rolltap.addons.endpoint.generation import Generation

_RETRY_COUNT = "x-stainless-retry-count"
"""Header of the OpenAI and Anthropic SDKs: the number of times that the client has already sent this request."""
_REMEMBERED = 8
"""Number of finished calls of a session that a retry can still get."""

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class FinishedCall:
    """A completed call whose reply can be given again, to listeners a `Generation` that is done. Has no tokens."""

    call_id: str
    digest: bytes
    """The `request_digest`."""
    reply: Reply
    usage: Usage
    delivered: bool
    """True when the whole reply was written to a listener's connection. False for a call that was committed by an
    earlier process, unless a later call shows that its reply arrived."""
    listeners: int = field(default=0, init=False)

    done = True
    error = None

    @classmethod
    def of(cls, generation: Generation) -> Self:
        """Return the record of a completed generation without listeners."""
        assert generation.reply is not None
        return cls(
            call_id=generation.call_id,
            digest=generation.digest,
            reply=generation.reply,
            usage=generation.usage,
            delivered=generation.delivered,
        )

    @property
    def abandoned(self) -> bool:
        """True when no request listens and the reply was never fully delivered."""
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

    async def changed(self, num_pieces: int, timeout: float) -> bool:
        """Return True."""
        return True

    async def finished(self, timeout: float) -> bool:
        """Return True."""
        return True


AnyCall = Generation | FinishedCall


def find_retried(calls: Sequence[AnyCall], digest: bytes, headers: Mapping[str, str]) -> AnyCall | None:
    """Return the newest of `calls` with this digest that a request repeats, or None. `headers` ignore case."""
    equal = [call for call in reversed(calls) if call.error is None and call.digest == digest]
    abandoned = [call for call in equal if call.abandoned]
    marked = headers.get(_RETRY_COUNT, "0") != "0"
    return next(iter(abandoned or (equal if marked else [])), None)


def newest(finished: Sequence[T]) -> list[T]:
    """Return the `_REMEMBERED` newest of a session's finished calls, in the same order."""
    return list(finished[-_REMEMBERED:])
