"""Making a value once, however many ask for it at the same time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Once(Generic[K, V]):
    """Values by key, each made on first use. Others who ask meanwhile wait; those who ask for other keys do not.

    A failure is not kept: the next who asks makes it again. It may be used in one event loop after another.
    """

    def __init__(self) -> None:
        self._made: dict[K, V] = {}
        self._making: dict[K, asyncio.Event] = {}

    async def get(self, key: K, make: Callable[[], Awaitable[V]]) -> V:
        """Return the value of a key. Raises what `make` raises."""
        while key not in self._made:
            if key in self._making:
                await self._making[key].wait()
                continue
            self._making[key] = asyncio.Event()
            try:
                self._made[key] = await make()
            finally:
                self._making.pop(key).set()
        return self._made[key]
