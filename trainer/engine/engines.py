"""All engines of a training as one: they have one owner, and take new weights all or not at all."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.engine import weights
from rolltap.trainer.engine.admin import EngineAdmin, Load, Unanswered, ask_all
from rolltap.trainer.engine.status import engine_status
from rolltap.trainer.engine.weights import (
    COMPARED,
    Base,
    Owner,
    Score,
    StolenError,
    claim,
    published_version,
)
from rolltap.trainer.names import Version

T = TypeVar("T")
_log = logging.getLogger(__name__)


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
        given = [
            url.strip().rstrip("/") for url in (urls.split(",") if isinstance(urls, str) else urls)
        ]
        if not given or not all(given) or len(set(given)) < len(given):
            raise InputError(
                f"engine is {urls!r}: give the URL of each engine once, with commas between them"
            )
        self.admins = tuple(EngineAdmin(url) for url in given)
        self._keep = keep
        self._owner: Owner | None = None
        self._owned: set[EngineAdmin] = set()
        """Engines whose register names this training."""

    def silent(self) -> list[str]:
        """Return the URLs of the engines that do not answer their health check, asked twice."""
        found = self.each(lambda engine: engine.healthy() or engine.healthy())
        return [
            engine.url for engine, healthy in zip(self.admins, found, strict=True) if not healthy
        ]

    def load(self) -> Load:
        """Return the load of all engines together; `cache` is that of the fullest one."""
        running, waiting, cache, preemptions = zip(*self.each(EngineAdmin.load), strict=True)
        return Load(sum(running), sum(waiting), max(cache), sum(preemptions))

    @contextmanager
    def claimed(self, owner: str, about: str, *, steal: bool = False) -> Iterator[None]:
        """Own the engines inside the block: no other training can take one, unless it steals it.

        `owner` is the training's id, and its restarts take the engines again. `about` says where it
        runs, for people. Raises `EngineError` when another training owns an engine and `steal` is
        False.
        """
        training = Owner(owner, about)
        try:
            for engine in (
                self.admins
            ):  # in order: of two trainings that start together, one gets all engines
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
            self.each(partial(self._give_back, training))

    def _give_back(self, owner: Owner, engine: EngineAdmin) -> None:
        if engine in self._owned:
            self._owned.remove(engine)
            with suppress(EngineError):  # it ended with its register
                weights.release(engine, owner)

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
        doubts = dict(zip(self.admins, self.each(partial(weights.doubts, base=base)), strict=True))
        trusted = [engine for engine in self.admins if doubts[engine] is None]
        differences = self.differences(None, base.ids, base.score, trusted)
        for engine, differs in differences.items():
            root = engine.models().root
            if not differs <= base.limit:
                version = engine.weight_version()
                doubts[engine] = (
                    f"serves the weights {version}, which differ from {base.model} by {differs:.2g}"
                    " nats"
                )
            elif not weights.same_folder(root, str(base.model)):
                say(
                    f"the engine at {engine.url} serves {root}: taken for {base.model},"
                    f" {differs:.2g} nats from it"
                )
        loading = [engine for engine in self.admins if doubts[engine] is not None]
        for engine in loading:
            say(f"the engine at {engine.url} {doubts[engine]}: it loads {base.model} again")
        ask_all(loading, lambda engine: weights.load_base(engine, base, str(doubts[engine])))
        loaded = self.differences(None, base.ids, base.score, loading)
        if failures := [
            weights.differs_still(*found, base)
            for found in loaded.items()
            if not found[1] <= base.limit
        ]:
            raise EngineError("; ".join(failures))
        if (owner := self._owner) is not None:
            # verified: the engine's own model is the one in the folder
            note = {"owner": owner.run, "about": owner.about, "base": str(base.model.absolute())}
            ask_all([*self._owned], lambda engine: engine.register("PUT", **note))
        return differences | loaded

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
        sampled = ask_all(
            asked, lambda engine: engine.sample(name or engine.models().base, ids, COMPARED)
        )
        found = {}
        for engine, tokens in zip(
            asked, sampled, strict=True
        ):  # one after the other: there is one trainer
            found[engine] = weights.difference(ids, tokens, score)
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
                    with suppress(
                        EngineError
                    ):  # no call names the adapter; the first error is the informative one
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

        def unload(engine: EngineAdmin) -> None:
            if engines is not None and engine not in engines:
                return
            try:
                for name in filter(unwanted, sorted(engine.models().adapters)):
                    engine.unload_adapter(name)
                    if why is not None:
                        _log.warning(
                            "the engine at %s: the adapter %s was unloaded: %s",
                            engine.url,
                            name,
                            why,
                        )
            except EngineError as error:
                _log.warning("adapters that nothing needs any more stay loaded: %s", error)

        self.each(unload)

    def unload_ended(self, run: str) -> None:
        """Unload the adapters that other trainings than `run` published, from engines of this one,
        and log it."""

        def ended(name: str) -> bool:
            version = published_version(name)
            return version is not None and version.run != run

        self.unload(ended, "the training that published it does not own the engine", self._owned)

    def each(self, ask: Callable[[EngineAdmin], T]) -> list[T]:
        """Call `ask` with every engine as `ask_all` does."""
        return ask_all(self.admins, ask)


@dataclass(frozen=True, slots=True)
class Served:
    """Weights that engines serve."""

    names: dict[str, str | None]
    """Version -> the model's name in requests, None for the base model, of weights that every
    engine serves."""
    root: str
    """Folder or full name of the first engine's base model."""
    max_model_len: int
    """The smallest context window, in tokens."""
    found: str
    """Account of what each engine serves, in words."""


def served_weights(engines: Engines, run: Path, models: Collection[str]) -> Served:
    """Return the weights that engines serve under versions that mean the same in `run`. Raises
    `EngineError`.

    These are the base model, and published adapters where its weights are not published ones: on
    other weights they mean nothing. A training's version names the same weights everywhere. Another
    name, as vLLM's `default`, does so only where the engine's model is one of `models`, and for an
    adapter only where the run's `policy.json` names it.
    """
    policy = PolicyFile(run).read()
    served = engines.each(engine_status)
    every: list[dict[str, str | None]] = []
    for status in served:
        names: dict[str, str | None] = {}
        if status.version and weights.is_base(status.version):  # adapters are trained on these
            versions = {name: published_version(name) for name in status.adapters}
            names |= {
                str(version): name for name, version in versions.items() if version is not None
            }
            if policy.model in status.adapters:
                names[policy.version] = policy.model
        is_recorded = any(weights.same_folder(status.model, model) for model in models)
        if status.version and (is_recorded or Version.parse(status.version)):
            names[status.version] = None
        every.append(names)
    common = {
        version: name
        for version, name in every[0].items()
        if all(version in names for names in every)
    }
    found = [
        *map(str, served),
        f"the run was recorded with {' and '.join(sorted(models)) or 'no named model'}",
    ]
    return Served(
        common, served[0].model, min(status.max_model_len for status in served), "; ".join(found)
    )


def recorded_models(metadata: Mapping[str, Any]) -> set[str]:
    """Return the models of a run's `run.json`: the recorder's, and those of its engines."""
    engines = metadata.get("engines", {}).values()
    return {
        str(model)
        for model in (metadata.get("model"), *(engine.get("model") for engine in engines))
        if model
    }
