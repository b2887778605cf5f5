"""Several vLLM servers of the same model: which of them answers a session."""

import asyncio
import hashlib
from collections.abc import Sequence

from rolltap.addons.engine.client import Engine

DOWN_SECONDS = 30.0
"""How long an engine that failed is left out while another one answers."""


class EnginePool:
    """Rendezvous hashing: a session stays with one engine, so that its calls meet their own prefix cache there, and the
    sessions of an engine that fails move to the others and back. Must be created inside the event loop that uses it."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._engines = [Engine(url) for url in urls]
        self._down_until: dict[Engine, float] = {}

    def of(self, session_id: str) -> Engine:
        """The engine of a session, among those that did not just fail; among all when all did."""
        return max(self._up() or self._engines, key=lambda engine: _weight(engine.url, session_id))

    def failed(self, engine: Engine) -> bool:
        """Leave an engine out for a while; says whether another one is left."""
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
