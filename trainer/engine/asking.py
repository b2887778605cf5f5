"""Questions to several engines at the same time, which an interruption ends in an orderly way."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Thread
from typing import TypeVar

from rolltap.addons.errors import EngineError
from rolltap.trainer.engine.admin import EngineAdmin

T = TypeVar("T")

_log = logging.getLogger(__name__)

STOP_SECONDS = 20.0
"""Longest that an interruption waits for the engines. `torchrun` kills after 30 seconds."""


class Unanswered(KeyboardInterrupt):
    """An interruption while engines were asked, which have not answered since."""


def ask_all(engines: Sequence[EngineAdmin], ask: Callable[[EngineAdmin], T]) -> list[T]:
    """Call `ask` with every engine, all at the same time. Return the results in the order of the engines.

    Raises one `EngineError` with the messages of all engines that failed, after all calls have ended. An interruption
    waits for that too: otherwise going back would race with a call that is still under way. It waits `STOP_SECONDS`,
    or until the next interruption, and then raises `Unanswered`.
    """
    calls: dict[EngineAdmin, Future[T]] = {engine: Future() for engine in engines}
    try:
        for engine, call in calls.items():
            # not of a pool: Python waits for its threads at the end
            Thread(target=_answer, args=(call, ask, engine), daemon=True).start()
        wait(calls.values())
    except KeyboardInterrupt as interruption:
        _log.warning("stopping: waiting for the engines")
        with suppress(KeyboardInterrupt):
            wait(calls.values(), STOP_SECONDS)
        if left := [engine.url for engine, call in calls.items() if not call.done()]:
            advice = "left as it is: the next start of the training restores it"
            _log.warning("the engine at %s has not answered, and is %s", ", ".join(left), advice)
            raise Unanswered from interruption
        raise
    failures = [error for call in calls.values() if (error := call.exception())]
    for failure in failures:
        if not isinstance(failure, EngineError):
            raise failure
    if failures:
        raise EngineError("; ".join(map(str, failures))) from failures[0]
    return [call.result() for call in calls.values()]


def _answer(call: Future[T], ask: Callable[[EngineAdmin], T], engine: EngineAdmin) -> None:
    try:
        call.set_result(ask(engine))
    except BaseException as error:
        call.set_exception(error)
