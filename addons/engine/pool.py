"""The vLLM servers of a run, which serve the same model: each session has one of them."""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence

from rolltap.addons.engine.client import Engine
from rolltap.addons.engine.own_model import OwnModel, Served, WrongModel
from rolltap.addons.errors import EngineError

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
"""Bounds in seconds of the pauses between the retries of a call."""
DOWN_SECONDS = 10.0
"""Seconds between an engine's failure and the first question whether it is healthy, and between the
questions. An engine that is healthy and fails every call is logged at most twice in this time."""
START_SECONDS = 10.0
"""Time limit for an engine to answer at the start of the recorder."""


class Patience:
    """The pauses of one call between its retries, until `seconds` have passed since its first
    failure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        """Begin anew, because the call went on."""
        self._pause = FIRST_PAUSE_SECONDS
        self._failed_at: float | None = None

    async def wait(self) -> bool:
        """Pause. Returns False, without a pause, when the time would be used up at its end."""
        now = asyncio.get_running_loop().time()
        if self._failed_at is None:
            self._failed_at = now
        if now - self._failed_at + self._pause > self._seconds:
            return False
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return True


class EnginePool:
    """Assigns sessions to engines by rendezvous hashing.

    The calls of a session go to one engine, which has their prefix cached. After `failed`, the
    sessions of that engine move to others. They return when it is healthy again, `DOWN_SECONDS`
    later at the earliest. `key` is sent to every engine, and every engine must serve the model
    `own`, if it is given. `patience` is the time in seconds for which a call retries after all
    engines have failed. With `routing`, calls ask for the experts of their tokens. Create it inside
    the event loop that uses it.
    """

    def __init__(
        self,
        urls: Sequence[str],
        key: str | None = None,
        own: OwnModel | None = None,
        *,
        patience: float = 0.0,
        routing: bool = False,
    ) -> None:
        self.patience = patience
        self.routing = routing
        self.token_at: dict[str | None, float] = {}
        """URL of an engine -> time of its newest tokens, whatever call they are of, of the event
        loop's clock."""
        self._engines = [Engine(url, key, own) for url in urls]
        self._down: dict[Engine, asyncio.Task[None]] = {}
        """Engines that are not chosen, unless all are down, and the tasks that wait for their
        health."""
        self._failures: Counter[Engine] = Counter()

    def up(self, avoid: Collection[Engine] = ()) -> list[Engine]:
        """Return the engines that are up and not in `avoid`."""
        return [each for each in self._engines if each not in self._down and each not in avoid]

    def of(self, session_id: str, avoid: Collection[Engine] = ()) -> Engine:
        """Return the engine of a session: one that is up and not in `avoid`, any if none is."""

        def weight(engine: Engine) -> bytes:
            key = f"{engine.url} {session_id}".encode()
            return hashlib.blake2b(key, digest_size=8).digest()

        return max(self.up(avoid) or self.up() or self._engines, key=weight)

    async def ready(self, session_id: str) -> tuple[Engine, Served]:
        """Return the engine of a session and what it serves. Raises `EngineError`.

        An engine that fails is replaced by another one. If all have failed, they are asked again
        within `patience`.
        """
        patience = Patience(self.patience)
        while True:
            engine = self.of(session_id)
            try:
                return engine, await engine.served()
            except EngineError as error:
                if self.failed(engine, error):
                    continue
                if not error.retryable or not await patience.wait():
                    raise

    def failed(self, engine: Engine, error: EngineError, avoid: Collection[Engine] = ()) -> bool:
        """Exclude an engine until it is healthy again. Returns True if another one is up and not in
        `avoid`.

        An engine that answered with an error is not excluded: one session's request must not take
        it from the others.
        """
        if not error.answered:
            engine.forget()
            self._failures[engine] += 1
            if engine not in self._down:
                logger.warning("engine down: %s", error)
                self._down[engine] = asyncio.create_task(self._watch(engine))
        return bool(self.up(avoid))

    async def _watch(self, engine: Engine) -> None:
        """Wait until an engine is healthy, then let sessions use it again."""
        started = time.monotonic()
        healthy = False
        while not healthy:
            await asyncio.sleep(DOWN_SECONDS)
            healthy = await engine.healthy()
        del self._down[engine]
        logger.info(
            "engine back: %s after %.0f s, in which %d requests failed",
            engine.url,
            time.monotonic() - started,
            self._failures.pop(engine),
        )

    async def close(self) -> None:
        """Close the connections."""
        for watch in self._down.values():
            watch.cancel()
        await asyncio.gather(*self._down.values(), return_exceptions=True)
        for engine in self._engines:
            await engine.close()


async def require_model(urls: Sequence[str], key: str | None, own: OwnModel) -> list[str]:
    """Return the warnings of the comparison of the engines' models with `own`.

    Raises `WrongModel` if an engine serves a model with another tokenizer. One that does not answer
    within `START_SECONDS` is logged: it is compared at its first contact.
    """
    engines = [Engine(url, key, own) for url in urls]
    try:
        await asyncio.gather(*map(_compare, engines))
    finally:
        for engine in engines:
            await engine.close()
    return [engine.warning for engine in engines if engine.warning is not None]


async def _compare(engine: Engine) -> None:
    try:
        async with asyncio.timeout(START_SECONDS):
            await engine.served()
    except WrongModel:
        raise
    except (EngineError, TimeoutError) as error:
        logger.warning(
            "the engine at %s does not answer yet, its model will be compared then: %s",
            engine.url,
            str(error) or f"nothing in {START_SECONDS:g} s",
        )
