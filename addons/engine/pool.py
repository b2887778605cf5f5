"""Pool of vLLM servers with the same model: assigns an engine to each session."""

import asyncio
import hashlib
from collections.abc import Sequence

from rolltap.addons.engine.client import Engine

DOWN_SECONDS = 30.0
"""Seconds for which a failed engine is not chosen, unless all have failed."""


class EnginePool:
    """Assigns sessions to engines by rendezvous hashing.

    The calls of a session go to one engine, which has their prefix cached. After `failed`, the sessions of that engine
    move to others, and they return when `DOWN_SECONDS` are over. Create it inside the event loop that uses it.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._engines = [Engine(url) for url in urls]
        self._down_until: dict[Engine, float] = {}

    def of(self, session_id: str) -> Engine:
        """Return the engine of a session: among those that did not fail lately, or among all if all did."""
        return max(self._up() or self._engines, key=lambda engine: _weight(engine.url, session_id))

    def failed(self, engine: Engine) -> bool:
        """Exclude an engine for `DOWN_SECONDS`. Returns True when another one is available."""
        self._down_until[engine] = asyncio.get_running_loop().time() + DOWN_SECONDS
        return bool(self._up())

    def _up(self) -> list[Engine]:
        now = asyncio.get_running_loop().time()
        return [engine for engine in self._engines if self._down_until.get(engine, 0.0) <= now]

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(engine.close() for engine in self._engines))


def _weight(url: str, session_id: str) -> bytes:
    return hashlib.blake2b(f"{url} {session_id}".encode(), digest_size=8).digest()
