"""All engines of a training as one: they have one owner, and take new weights all or not at all."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.engine.admin import EngineAdmin, Models
from rolltap.trainer.engine.base_weights import Base, difference, verify_base
from rolltap.trainer.engine.owner import Owner, claim, release

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint on the disk, and the version that engines report for it."""

    folder: Path
    version: str


class Engines:
    """The vLLM servers at `urls`, which is a sequence, or one text with commas between them.

    Methods ask all engines at the same time, and return when all have answered. They raise `EngineError`, which names
    every engine that failed. The constructor raises `InputError` for no URL, and for one that is given twice.
    """

    def __init__(self, urls: Sequence[str] | str) -> None:
        given = [url.strip().rstrip("/") for url in (urls.split(",") if isinstance(urls, str) else urls)]
        if not given or not all(given) or len(set(given)) < len(given):
            raise InputError(f"engine is {urls!r}: give the URL of each engine once, with commas between them")
        self.admins = tuple(EngineAdmin(url) for url in given)
        self._owner: Owner | None = None

    def require_endpoints(self) -> None:
        """Raise `EngineError` when an engine lacks an endpoint that recording or publishing needs."""
        self.each(EngineAdmin.require_endpoints)

    def models(self) -> list[Models]:
        """Return the models that each engine serves, in the order of the URLs."""
        return self.each(EngineAdmin.models)

    def runs_on_cpu(self) -> bool:
        """Return True when an engine runs on CPU."""
        return any(self.each(EngineAdmin.runs_on_cpu))

    @contextmanager
    def claimed(self, owner: str, about: str, *, steal: bool = False) -> Iterator[None]:
        """Own the engines inside the block: no other training can take one, unless it steals it.

        `owner` is the training's id, and its restarts take the engines again. `about` says where it runs, for people.
        Raises `EngineError` when another training owns an engine and `steal` is False.
        """
        training = Owner(owner, about)
        with ExitStack() as stack:
            for engine in self.admins:
                if claim(engine, training, steal=steal):
                    stack.callback(_give_back, engine, training)
                else:
                    advice = "start it with `rolltap serve`, or see to it that no other training uses it"
                    _log.warning("the engine at %s has no register of its owner: %s", engine.url, advice)
            self._owner = training
            try:
                yield
            finally:
                self._owner = None

    def require_owned(self) -> None:
        """Raise `EngineError` when another training has stolen an engine. Take one that has been started again."""
        if (owner := self._owner) is not None:
            self.each(lambda engine: claim(engine, owner))

    def verify_base(
        self,
        model: Path,
        version: str,
        ids: Sequence[int],
        own: Sequence[float],
        limit: float,
        say: Callable[[str], None],
    ) -> None:
        """Make sure that every engine serves the base model, and is not paused. Call it before the first publication.

        `model` is the base model's folder. `ids`, shape (T,), are scored. `own`, shape (T - 1,), are the trainer's
        log-probabilities of `ids[1:]` by the base model. An engine's may differ by `limit` nats on average. Otherwise,
        and where an engine is paused or serves published weights, it loads the folder as `version`, and `say` is told.
        Raises `EngineError` when an engine cannot serve the base model.
        """
        base = Base(model, version, ids, own, limit)
        self.each(lambda engine: verify_base(engine, base, say))

    def difference(self, name: str | None, ids: Sequence[int], own: Sequence[float]) -> float:
        """Return the largest of the engines' mean differences from `own`, in nats, for the model called `name`.

        `ids`, shape (T,), are scored. `own`, shape (T - 1,), are the trainer's log-probabilities of `ids[1:]`. `name`
        None is the base model. A difference that cannot be computed is infinite.
        """
        return max(self.each(lambda engine: difference(engine, name, ids, own)))

    def reload(self, new: Weights, old: Weights) -> None:
        """Let all engines serve the checkpoint `new` in place of `old`, or go back to `old`.

        The engines are paused meanwhile: calls in flight end first, and new ones wait. Raises `EngineError` when one
        refused. An engine that cannot go back is named, and stays paused: its next call could crash it.
        """
        with self.paused(old) as touch:

            def install(engine: EngineAdmin) -> None:
                touch(engine)
                engine.install(new.folder, new.version)

            self.each(install)

    @contextmanager
    def paused(self, old: Weights) -> Iterator[Callable[[EngineAdmin], None]]:
        """Pause all engines inside the block, and resume them after it.

        The block calls what is yielded before it changes an engine's weights. When it raises, or when an engine cannot
        be resumed, these engines load `old` again, and all are resumed. Raises as `reload` does.
        """
        touched: set[EngineAdmin] = set()
        try:
            self.each(EngineAdmin.pause)
            yield touched.add
            self.each(EngineAdmin.resume)
        except BaseException as error:
            self._go_back(touched, old, error)

    def _go_back(self, touched: set[EngineAdmin], old: Weights, error: BaseException) -> NoReturn:
        def go_back(engine: EngineAdmin) -> None:
            if engine in touched:
                engine.serve(old.folder, old.version)
            else:
                engine.resume()

        try:
            self.each(go_back)
        except EngineError as lost:
            raise EngineError(
                f"{error}; then it could not go back to the weights {old.version}: {lost}. Such an engine stays "
                "paused: restart it"
            ) from error
        if isinstance(error, EngineError):
            raise EngineError(f"{error}; all engines serve the weights {old.version}") from error
        raise error

    def load_adapters(self, adapters: Mapping[str, Path]) -> None:
        """Load adapters, name -> folder, into all engines or none. An engine keeps those that it has.

        Raises `EngineError` when one refused. What the others loaded is then unloaded again.
        """
        loaded: list[tuple[EngineAdmin, str]] = []

        def load(engine: EngineAdmin) -> None:
            for name in adapters.keys() - engine.models().adapters:
                engine.load_adapter(name, adapters[name])
                loaded.append((engine, name))

        try:
            self.each(load)
        except BaseException:
            for engine, name in loaded:
                with suppress(EngineError):  # no call names the adapter; the first error is the informative one
                    engine.unload_adapter(name)
            raise

    def unload_adapters(self, unwanted: Callable[[str], bool]) -> None:
        """Unload the adapters whose names are `unwanted`."""

        def unload(engine: EngineAdmin) -> None:
            for name in filter(unwanted, engine.models().adapters):
                engine.unload_adapter(name)

        self.each(unload)

    def each(self, ask: Callable[[EngineAdmin], T]) -> list[T]:
        """Call `ask` with every engine, all at the same time. Return the results in the order of the URLs.

        Raises one `EngineError` with the messages of all engines that failed, after all calls have ended. An
        interruption waits for that too: otherwise going back would race with a call that is still under way.
        """
        with ThreadPoolExecutor(len(self.admins)) as pool:
            calls = [pool.submit(ask, engine) for engine in self.admins]
            interrupted = _wait(calls)
        if interrupted is not None:
            raise interrupted
        failures = [error for call in calls if (error := call.exception())]
        for failure in failures:
            if not isinstance(failure, EngineError):
                raise failure
        if failures:
            raise EngineError("; ".join(map(str, failures))) from failures[0]
        return [call.result() for call in calls]


def _wait(calls: Sequence[Future[T]]) -> KeyboardInterrupt | None:
    """Wait until all calls have ended. Return the interruption that came meanwhile, if any."""
    interrupted = None
    while True:
        try:
            wait(calls)
        except KeyboardInterrupt as error:
            interrupted = error
        else:
            return interrupted


def _give_back(engine: EngineAdmin, owner: Owner) -> None:
    with suppress(EngineError):  # it ended with its register
        release(engine, owner)
