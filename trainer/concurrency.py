"""Async functions from blocking code, blocking functions from async code, single flight, and pauses
between retries."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import count
from typing import Any, Generic, ParamSpec, TypeVar

from rolltap.addons.concurrency import finished_in

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result.

    When an event loop runs in the calling thread, as in a notebook, the coroutine runs in a thread
    of its own and the caller's loop is blocked. KeyboardInterrupt cancels the coroutine, and is
    raised after the coroutine's cleanup.
    """
    if not _loop_runs_here():
        return asyncio.run(coroutine)
    begin: Future[bool] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()
    done: Future[T] = Future()

    async def supervise() -> T:
        task = asyncio.ensure_future(coroutine)
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    def work() -> None:
        if begin.result():
            try:
                done.set_result(asyncio.run(supervise()))
            except BaseException as error:
                done.set_exception(error)

    try:
        threading.Thread(target=work, name="rolltap").start()
        begin.set_result(True)
        while not done.done():
            wait([done], timeout=1)  # an interrupt that came just before a wait is handled after it
        return done.result()
    except KeyboardInterrupt:
        if not begin.done():
            begin.set_result(False)
            coroutine.close()
            raise
        loop, task = started.result()
        with suppress(RuntimeError):  # the loop is closed: the coroutine has just ended
            loop.call_soon_threadsafe(task.cancel)
        wait([done])
        raise


async def run_to_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function in a thread and wait for its end, even when the caller is cancelled
    meanwhile.

    A thread cannot be cancelled. CancelledError is raised after the function has returned; an error
    of the function is its cause then.
    """
    return await finished(asyncio.to_thread(function, *args, **kwargs))


async def finished(awaitable: Awaitable[T]) -> T:
    """Wait for the end of what is awaited, even when the caller is cancelled meanwhile.

    CancelledError is raised after that end; an error is its cause then.
    """
    task = asyncio.ensure_future(awaitable)
    if await wait_for_end(task):
        raise asyncio.CancelledError from task.exception()
    return task.result()


async def wait_for_end(task: asyncio.Task[Any]) -> bool:
    """Wait for the end of a task, even when the caller is cancelled. Return True if it was."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_FOLDER_THREADS = ThreadPoolExecutor(8, "rolltap-folders")


async def in_folder_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that reads, compares or copies folders in a thread, and return its result.

    It may take minutes, so it has no thread of the event loop's own pool: watching boxes and
    reading facts must not wait for it. When the caller is cancelled, CancelledError is raised after
    the function has returned.
    """
    return await finished_in(_FOLDER_THREADS, function, *args, **kwargs)


def submit_folder_work(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function in such a thread, and do not wait for it."""
    _FOLDER_THREADS.submit(function, *args, **kwargs)


def backoff(retries: int | None, first: float, longest: float = math.inf) -> Iterator[float | None]:
    """Yield the pause in seconds after each attempt of a loop, and None after the last one. None as
    `retries`: no end.

    The first pause is `first`; each one after it is twice as long, and none is over `longest`.
    """
    pause = first
    for _ in count() if retries is None else range(retries):
        yield min(pause, longest)
        pause *= 2.0
    yield None


class Once(Generic[K, V]):
    """Values by key, each made on first use. Others who ask meanwhile wait for it; those who ask
    for other keys do not.

    A failure is not kept, nor a value that `keep` refuses: the next who asks makes it again. When
    the one who makes it is cancelled, another one who waits makes it. It may be used in several
    event loops; each makes its own then.
    """

    def __init__(self, keep: Callable[[V], bool] = lambda _: True) -> None:
        self._keep = keep
        self._made: dict[K, V] = {}
        self._making: dict[tuple[asyncio.AbstractEventLoop, K], asyncio.Future[V]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def forget(self, key: K) -> None:
        """Make the value of a key again for the next who asks."""
        self._made.pop(key, None)

    async def get(self, key: K, make: Callable[[], Awaitable[V]]) -> V:
        """Return the value of a key. Raises what `make` raises."""
        loop = asyncio.get_running_loop()
        while key not in self._made:
            making = self._making.get((loop, key))
            if making is not None:
                await asyncio.wait([making])
                if not making.cancelled():
                    return making.result()
                continue
            making = self._making[loop, key] = loop.create_future()
            try:
                value = await make()
                making.set_result(value)
                if self._keep(value):
                    self._made[key] = value
                return value
            finally:
                del self._making[loop, key]
                making.cancel()  # of a failure; a result stays
        return self._made[key]
