"""All engines of a training as one: they have one owner, and take new weights all or not at all."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import NamedTuple, NoReturn, TypeVar

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.engine import weights
from rolltap.trainer.engine.admin import EngineAdmin, Load, Sampled
from rolltap.trainer.engine.owners import Owner, StolenError, claim, note_base, release
from rolltap.trainer.engine.weights import COMPARED, Base, Score, published_version

T = TypeVar("T")
_log = logging.getLogger(__name__)

STOP_SECONDS = 20.0
"""Longest that an interruption waits for the engines. `torchrun` kills after 30 seconds."""


class Unanswered(KeyboardInterrupt):
    """An interruption while engines were asked, which have not answered since."""


def ask_all(engines: Sequence[EngineAdmin], ask: Callable[[EngineAdmin], T]) -> list[T]:
    """Call `ask` with every engine, all at the same time. Return the results in the order of the
    engines.

    Raises one `EngineError` with the messages of all engines that failed, after all calls have
    ended. An interruption waits for that too: otherwise going back would race with a call that is
    still under way. It waits `STOP_SECONDS`, or until the next interruption, and then raises
    `Unanswered`.
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
        left = [engine.url for engine, call in calls.items() if not call.done()]
        if left:
            advice = "left as it is: the next start of the training restores it"
            _log.warning("the engine at %s has not answered, and is %s", ", ".join(left), advice)
            raise Unanswered from interruption
        raise
    failures: list[EngineError] = []
    for call in calls.values():
        error = call.exception()
        if isinstance(error, EngineError):
            failures.append(error)
        elif error is not None:
            raise error
    if failures:
        raise EngineError("; ".join(map(str, failures))) from failures[0]
    return [call.result() for call in calls.values()]


def _answer(call: Future[T], ask: Callable[[EngineAdmin], T], engine: EngineAdmin) -> None:
    try:
        call.set_result(ask(engine))
    except BaseException as error:
        call.set_exception(error)


class Weights(NamedTuple):
    """A checkpoint on the disk, and the version that engines report for it."""

    folder: Path
    version: str


class Engines:
    """The vLLM servers at `urls`, which is a sequence, or one text with commas between them.

    Methods ask all engines at the same time, and return when all have answered. They raise
    `EngineError`, which names every engine that failed. The constructor raises `InputError` for no
    URL, and for one that is given twice. With `keep`, calls in flight go on with new weights, where
    they would else end first.
    """

    def __init__(self, urls: Sequence[str] | str, *, keep: bool = False) -> None:
        listed = urls.split(",") if isinstance(urls, str) else urls
        given = [url.strip().rstrip("/") for url in listed]
        if not given or not all(given) or len(set(given)) < len(given):
            raise InputError(
                f"engine is {urls!r}: give the URL of each engine once, with commas between them"
            )
        self.admins = tuple(EngineAdmin(url) for url in given)
        self._keep = keep
        self._owner: Owner | None = None
        self._owned: set[EngineAdmin] = set()
        """Engines whose register names this training."""

    def each(self, ask: Callable[[EngineAdmin], T]) -> list[T]:
        """Call `ask` with every engine as `ask_all` does."""
        return ask_all(self.admins, ask)

    def silent(self) -> list[str]:
        """Return the URLs of the engines that do not answer their health check, asked twice."""

        def is_healthy(engine: EngineAdmin) -> bool:
            return engine.healthy() or engine.healthy()

        found = zip(self.admins, self.each(is_healthy), strict=True)
        return [engine.url for engine, healthy in found if not healthy]

    def load(self) -> Load:
        """Return the load of all engines together; `cache` is that of the fullest one."""
        loads = self.each(EngineAdmin.load)
        return Load(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            cache=max(load.cache for load in loads),
            preemptions=sum(load.preemptions for load in loads),
        )

    @contextmanager
    def claimed(self, owner: str, about: str, *, steal: bool = False) -> Iterator[None]:
        """Own the engines inside the block: no other training can take one, unless it steals it.

        `owner` is the training's id, and its restarts take the engines again. `about` says where it
        runs, for people. Raises `EngineError` when another training owns an engine and `steal` is
        False.
        """
        training = Owner(owner, about)

        def give_back(engine: EngineAdmin) -> None:
            if engine in self._owned:
                self._owned.remove(engine)
                with suppress(EngineError):  # it ended with its register
                    release(engine, training)

        try:
            # in order: of two trainings that start together, one gets all engines
            for engine in self.admins:
                if claim(engine, training, steal=steal):
                    self._owned.add(engine)
                else:
                    advice = (
                        "start it with `rolltap serve`, or see to it that no other training uses it"
                    )
                    _log.warning(
                        "the engine at %s has no register of its owner: %s", engine.url, advice
                    )
            self._owner = training
            yield
        finally:
            self._owner = None
            self.each(give_back)

    def require_owned(self) -> None:
        """Raise `EngineError` when another training has stolen an engine. Take one that has been
        started again."""
        self.each(self._require_owned)

    def _require_owned(self, engine: EngineAdmin) -> None:
        if self._owner is not None:
            claim(engine, self._owner)

    def verify_base(self, base: Base, say: Callable[[str], None]) -> dict[EngineAdmin, float]:
        """Make sure that every engine serves the base model, and is not paused. Call it before the
        first publication.

        An engine that differs by more than the limit, is paused or serves published weights loads
        the model again, and `say` is told. Returns the difference of each, in nats. Raises
        `EngineError` when an engine cannot serve the model.
        """
        doubts: dict[EngineAdmin, str] = {}
        found = self.each(partial(weights.find_doubt, base=base))
        for engine, doubt in zip(self.admins, found, strict=True):
            if doubt is not None:
                doubts[engine] = doubt
        trusted = [engine for engine in self.admins if engine not in doubts]
        differences = self.differences(None, base.ids, base.score, trusted)
        for engine, nats in differences.items():
            root = engine.models().root
            if not nats <= base.limit:
                version = engine.weight_version()
                doubts[engine] = (
                    f"serves the weights {version}, which differ from {base.model} by {nats:.2g}"
                    " nats"
                )
            elif not weights.same_folder(root, str(base.model)):
                say(
                    f"the engine at {engine.url} serves {root}: taken for {base.model},"
                    f" {nats:.2g} nats from it"
                )
        differences |= self._load_base(base, doubts, say)
        owner = self._owner
        if owner is not None:
            folder = str(base.model.absolute())
            ask_all(list(self._owned), partial(note_base, owner=owner, folder=folder))
        return differences

    def _load_base(
        self, base: Base, doubts: Mapping[EngineAdmin, str], say: Callable[[str], None]
    ) -> dict[EngineAdmin, float]:
        """Let engines load the base model again, for a reason each. Return their differences."""
        loading = [engine for engine in self.admins if engine in doubts]
        for engine in loading:
            say(f"the engine at {engine.url} {doubts[engine]}: it loads {base.model} again")

        def load(engine: EngineAdmin) -> None:
            weights.load_base(engine, base, doubts[engine])

        ask_all(loading, load)
        loaded = self.differences(None, base.ids, base.score, loading)
        failures = []
        for engine, nats in loaded.items():
            if not nats <= base.limit:
                failures.append(weights.still_differs(engine, nats, base))
        if failures:
            raise EngineError("; ".join(failures))
        return loaded

    def differences(
        self,
        name: str | None,
        ids: Sequence[int],
        score: Score,
        engines: Sequence[EngineAdmin] | None = None,
    ) -> dict[EngineAdmin, float]:
        """Return the mean difference of engines, by default of all, from the trainer, in nats.

        The model called `name`, None for the base model, samples `COMPARED` tokens after `ids`, and
        the trainer scores them. A difference that cannot be computed is infinite.
        """
        asked = self.admins if engines is None else engines

        def sample(engine: EngineAdmin) -> Sampled:
            return engine.sample(name or engine.models().base, ids, COMPARED)

        found = {}
        # scored one after the other: there is one trainer
        for engine, sampled in zip(asked, ask_all(asked, sample), strict=True):
            found[engine] = weights.difference(ids, sampled, score)
        return found

    @contextmanager
    def reloaded(self, new: Weights, old: Weights) -> Iterator[None]:
        """Let all engines serve the checkpoint `new` in place of `old`, in the block and after it,
        or go back to `old`.

        The engines are paused for the reload: calls in flight end first, and new ones wait. They
        serve `new` when the block begins. Raises as `changed` does.
        """
        with self.changed(old) as change:

            def install(engine: EngineAdmin) -> None:
                change(engine)
                engine.install(new.folder, new.version)

            self.pause()
            self.each(install)
            self.resume()
            yield

    def pause(self) -> None:
        """Return when the calls in flight have ended or stand still. Another training's do not
        wait: see `resume`."""

        def pause(engine: EngineAdmin) -> None:
            self._require_owned(engine)
            engine.pause(keep=self._keep)

        self.each(pause)

    def resume(self) -> None:
        """Let the calls of all engines go on, but of those that another training has stolen: it may
        load weights."""

        def resume(engine: EngineAdmin) -> None:
            self._require_owned(engine)
            engine.resume()

        self.each(resume)

    @contextmanager
    def changed(self, old: Weights) -> Iterator[Callable[[EngineAdmin], None]]:
        """Go back to the weights `old` when the block raises. The block pauses the engines and
        resumes them.

        The block calls what is yielded before it changes an engine's weights. When it raises, these
        engines load `old` again, and all go on. Raises `EngineError` when one refused. An engine
        that cannot go back is named, and stays paused: its next call could crash it. One that
        another training has stolen is left to it. So are all when an interruption leaves calls
        under way: the next start of a training restores them.
        """
        touched: set[EngineAdmin] = set()

        def change(engine: EngineAdmin) -> None:
            self._require_owned(engine)
            touched.add(engine)

        try:
            yield change
        except Unanswered:
            raise
        except BaseException as error:
            self._go_back(touched, old, error)

    def _go_back(self, touched: set[EngineAdmin], old: Weights, error: BaseException) -> NoReturn:
        stolen: list[EngineAdmin] = []

        def go_back(engine: EngineAdmin) -> None:
            try:
                self._require_owned(engine)
            except StolenError:
                stolen.append(engine)
                return
            if engine in touched:
                engine.serve(old.folder, old.version, keep=self._keep)
            else:
                engine.resume()

        try:
            self.each(go_back)
        except EngineError as lost:
            raise EngineError(
                f"{error}; then it could not go back to the weights {old.version}: {lost}. Such an"
                " engine stays paused: restart it"
            ) from error
        if isinstance(error, EngineError):
            which = "all other engines" if stolen else "all engines"
            raise EngineError(f"{error}; {which} serve the weights {old.version}") from error
        raise error

    @contextmanager
    def loaded(self, adapters: Mapping[str, Path]) -> Iterator[None]:
        """Load adapters, name -> folder, into all engines or none. An engine keeps those that it
        has.

        Raises `EngineError` when one refused. Then, and when the block raises, what was loaded is
        unloaded again.
        """
        loaded: set[tuple[EngineAdmin, str]] = set()

        def load(engine: EngineAdmin) -> None:
            for name in adapters.keys() - engine.models().adapters:
                engine.load_adapter(name, adapters[name])
                loaded.add((engine, name))

        def unload(engine: EngineAdmin) -> None:
            for name in adapters:
                if (engine, name) in loaded:
                    # no call names the adapter; the first error is the informative one
                    with suppress(EngineError):
                        engine.unload_adapter(name)

        try:
            self.each(load)
            yield
        except Unanswered:
            raise
        except BaseException:
            self.each(unload)
            raise

    def unload(
        self,
        unwanted: Callable[[str], bool],
        why: str | None = None,
        engines: Collection[EngineAdmin] | None = None,
    ) -> None:
        """Unload the adapters whose names are `unwanted` from some engines, by default all. Log
        `why` if it is given.

        An engine that refuses is logged too. Its adapters stay, and the caller's next call tries
        again.
        """
        note = "the engine at %s: the adapter %s was unloaded: %s"

        def unload(engine: EngineAdmin) -> None:
            if engines is not None and engine not in engines:
                return
            try:
                for name in filter(unwanted, sorted(engine.models().adapters)):
                    engine.unload_adapter(name)
                    if why is not None:
                        _log.warning(note, engine.url, name, why)
            except EngineError as error:
                _log.warning("adapters that nothing needs any more stay loaded: %s", error)

        self.each(unload)

    def unload_ended(self, run: str) -> None:
        """Unload the adapters that other trainings than `run` published, from engines of this one,
        and log it."""

        def has_ended(name: str) -> bool:
            version = published_version(name)
            return version is not None and version.run != run

        self.unload(
            has_ended, "the training that published it does not own the engine", self._owned
        )
