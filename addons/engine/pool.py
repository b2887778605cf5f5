"""Pool of vLLM servers with the same model: assigns an engine to each session."""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence

from rolltap.addons.engine.client import Engine
from rolltap.addons.engine.connections import Patience
from rolltap.addons.engine.lookup import OwnModel, WrongModel
from rolltap.addons.errors import EngineError

logger = logging.getLogger(__name__)

DOWN_SECONDS = 10.0
"""Seconds between an engine's failure and the first question whether it is healthy, and between the questions. An
engine that is healthy and fails every call is logged at most twice in this time."""

START_SECONDS = 10.0
"""Time limit for an engine to answer at the start of the recorder."""


class EnginePool:
    """Assigns sessions to engines by rendezvous hashing.

    The calls of a session go to one engine, which has their prefix cached. After `failed`, the sessions of that engine
    move to others. They return when it is healthy again, `DOWN_SECONDS` later at the earliest. `key` is sent to every
    engine, and every engine must serve the model `own`, if it is given. `patience` is the time in seconds for which a
    call retries after all engines have failed. With `routing`, calls ask for the experts of their
    tokens. Create it inside the event loop that uses it.
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
        self.patience, self.routing = patience, routing
        self._engines = [Engine(url, key, own) for url in urls]
        self._down: dict[Engine, asyncio.Task[None]] = {}
        """Engines that are not chosen, unless all are down, and the tasks that wait for their health."""
        self._failures: Counter[Engine] = Counter()
        self.token_at: dict[str | None, float] = {}
        """URL of an engine -> time of its newest tokens, whatever call they are of, of the event loop's clock."""

    def of(self, session_id: str, avoid: Collection[Engine] = ()) -> Engine:
        """Return the engine of a session: among those that are up and not in `avoid`, or among all if none is."""
        engines = self._up(avoid) or self._up() or self._engines
        keys = {f"{engine.url} {session_id}".encode(): engine for engine in engines}
        return keys[max(keys, key=lambda key: hashlib.blake2b(key, digest_size=8).digest())]

    async def ready(self, session_id: str) -> tuple[Engine, int]:
        """Return the engine of a session and its context window in tokens. Raises `EngineError`.

        An engine that fails is replaced by another one. If all have failed, they are asked again within `patience`.
        """
        pauses = Patience(self.patience)
        while True:
            engine = self.of(session_id)
            try:
                return engine, await engine.max_model_len()
            except EngineError as error:
                if not self.failed(engine, error) and not (error.retryable and await pauses.wait()):
                    raise

    def failed(self, engine: Engine, error: EngineError, avoid: Collection[Engine] = ()) -> bool:
        """Exclude an engine until it is healthy again. Returns True when another one is up and not in `avoid`.

        An engine that answered with an error is not excluded: one session's request must not take it from the others.
        """
        if not error.answered:
            engine.forget()
            if engine not in self._down:
                logger.warning("engine down: %s", error)
                self._down[engine] = asyncio.create_task(self._watch(engine))
            self._failures[engine] += 1
        return self.any_up(avoid)

    def any_up(self, avoid: Collection[Engine]) -> bool:
        """Return True when an engine is up and not in `avoid`."""
        return bool(self._up(avoid))

    async def _watch(self, engine: Engine) -> None:
        """Wait until an engine is healthy, then let sessions use it again."""
        started = time.monotonic()
        while True:
            await asyncio.sleep(DOWN_SECONDS)
            if await engine.healthy():
                break
        del self._down[engine]
        seconds, failures = time.monotonic() - started, self._failures.pop(engine)
        logger.info("engine back: %s after %.0f s, in which %d requests failed", engine.url, seconds, failures)

    def _up(self, avoid: Collection[Engine] = ()) -> list[Engine]:
        return [engine for engine in self._engines if engine not in self._down and engine not in avoid]

    async def close(self) -> None:
        """Close the connections."""
        for watch in self._down.values():
            watch.cancel()
        await asyncio.gather(*self._down.values(), return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self._engines))


async def require_model(urls: Sequence[str], key: str | None, own: OwnModel) -> list[str]:
    """Return the warnings of the comparison of the engines' models with `own`.

    Raises `WrongModel` if an engine serves a model with another tokenizer. One that does not answer within
    `START_SECONDS` is logged: it is compared at its first contact.
    """
    engines = [Engine(url, key, own) for url in urls]

    async def check(engine: Engine) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                await engine.max_model_len()
        except (EngineError, TimeoutError) as error:
            if isinstance(error, WrongModel):
                raise
            why = str(error) or f"nothing in {START_SECONDS:g} s"
            logger.warning("the engine at %s does not answer yet, its model will be compared then: %s", engine.url, why)

    try:
        for outcome in await asyncio.gather(*map(check, engines), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
    return [engine.lookup.warning for engine in engines if engine.lookup.warning]
