"""The engines of a training: its weights are published to all of them, and what they serve is
compared with it."""

import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import get_args

from rich.console import Console

from rolltap.addons.errors import EngineError, InputError, RunError
from rolltap.addons.store.records import CallKind
from rolltap.addons.store.staging import locked
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish import make_publisher
from rolltap.trainer.engine.weights import (
    COMPARED,
    LIMITS,
    Base,
    expected_limit,
    fixed_ids,
    published_name,
)
from rolltap.trainer.models.loading import load_tokenizer
from rolltap.trainer.training.arguments import dtype_of
from rolltap.trainer.training.recipe import Recipe
from rolltap.trainer.training.step.trainer import TraceGRPOTrainer

_log = logging.getLogger(__name__)

PUBLISHED = "published"
"""Folder in the run for weights on their way to the engines."""


@contextmanager
def published_folder(recipe: Recipe, run: Path, run_id: str) -> Iterator[Path]:
    """Yield the folder for weights on their way to the engines: in the run, or below the recipe's
    `publish_folder`.

    One outside of the run is removed at the end: the engines have loaded what was in it. So are
    those that killed trainings left there, at the start: a folder is locked while its training
    runs. Raises `RunError`.
    """
    if recipe.publish_folder is None:
        yield run / PUBLISHED
        return
    folder = recipe.publish_folder / run_id
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(
                folder.parent, wait=True
            ):  # another start must not take a new folder for a left one
                _remove_left(folder.parent)
                folder.mkdir(exist_ok=True)
                stack.enter_context(locked(folder, wait=True))
        except OSError as error:
            raise RunError(
                f"publish_folder: {folder} cannot be made: {error}; correct the recipe"
            ) from error
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def _remove_left(folder: Path) -> None:
    """Remove the folders of trainings that do not run any more."""
    for left in folder.iterdir():
        names = f"{published_name(left.name)}."
        if re.fullmatch("[0-9a-f]{8}", left.name) and all(
            path.name.removeprefix(".").startswith(names) for path in left.iterdir()
        ):
            with locked(left) as free:
                if free is not None:
                    shutil.rmtree(left, ignore_errors=True)


class Serving:
    """Weights on the engines of a training. `folder` is for those on their way, `run` is the run
    folder."""

    def __init__(
        self,
        recipe: Recipe,
        engines: Engines,
        folder: Path,
        run: Path,
    ) -> None:
        self.engines, self._recipe, self._run = engines, recipe, run
        tokenizer = load_tokenizer(recipe.model)
        self._ids = fixed_ids(tokenizer)
        self._vocabulary = tokenizer.get_vocab()
        self._limit = recipe.max_difference or LIMITS[dtype_of(recipe)]
        self._expected = self._limit
        self._checked = False
        self._few = dict[str, tuple[float, float]]()
        """Kind of prompt -> number of tokens, too few to judge, and the sum of their differences.
        """
        self._publisher_from = partial(
            make_publisher, recipe.publish, engines, run=run, base=recipe.model
        )
        self._publisher = self._publisher_from(folder=folder, adapters=recipe.adapters)

    def verify_base(self, trainer: TraceGRPOTrainer, version: str, console: Console) -> None:
        """Make sure that every engine serves the weights that the training began with.

        Call it before a checkpoint is loaded. An engine that was left paused, or serves other
        weights, gets them again, as `version`. Adapters of ended trainings are unloaded. Raises
        `EngineError`.
        """
        for engine in self.engines.admins:
            with suppress(InputError):  # the folder is not seen here, or has no tokenizer
                root = Path(engine.models().root)
                if load_tokenizer(root).get_vocab() != self._vocabulary:
                    raise EngineError(
                        f"the engine at {engine.url} serves {root}, whose vocabulary is not that of"
                        f" {self._recipe.model}: start it with `rolltap serve {self._recipe.model}`"
                    )
        base = Base(
            self._recipe.model, version, self._ids, partial(trainer.score, base=True), self._limit
        )
        measured = max(self.engines.verify_base(base, console.print).values())
        self._expected = expected_limit(self._limit, measured)
        console.print(
            "the base weights: a token that an engine samples differs from the trainer's by"
            f" {measured:.1e} nats on average; more than {self._expected:.1e} is a warning, more"
            f" than {self._limit:g} ends the training"
        )
        self.engines.unload_ended(version.partition(".")[0])

    def publish(self, trainer: TraceGRPOTrainer, version: str, *, last: bool = False) -> None:
        """Publish the trainer's weights to every engine that then agrees with the trainer, on all
        engines or none.

        The metric `engine_difference` is the mean absolute difference of the log-probabilities of
        tokens that an engine samples after a fixed text, in nats. Of the training's adapters only
        the `last` one stays loaded at its end. It is loaded from the run folder, which stays: vLLM
        reads an adapter again that its cache has dropped.

        Raises `EngineError` when the difference is over the limit, and what `Publisher.publish`
        raises.
        """

        def agrees(name: str | None) -> None:
            differences = self.engines.differences(name, self._ids, trainer.score)
            engine, largest = max(differences.items(), key=itemgetter(1))
            trainer.log_metrics({"engine_difference": largest})
            if not largest <= self._limit:
                raise EngineError(
                    f"the engine at {engine.url}: with the weights {version} its log-probabilities"
                    f" differ from the trainer's by {largest:.2g} nats on average, and the limit is"
                    f" {self._limit:g}: it did not apply the weights, or computes in another type;"
                    f" serve {self._recipe.model} with --dtype {dtype_of(self._recipe)}, or set"
                    " max_difference in the recipe"
                )

        if last and self._recipe.publish == "lora":
            try:
                publisher = self._publisher_from(folder=self._run / PUBLISHED, adapters=1)
                publisher.publish(trainer.model, version, agrees)
                return
            except EngineError as error:
                if self._recipe.publish_folder is None:
                    raise
                _log.warning("the last adapter cannot be loaded from the run folder: %s", error)
        self._publisher.publish(trainer.model, version, agrees)

    def check_step(self, step: int, metrics: Mapping[str, float], console: Console) -> None:
        """Compare the tokens of an on-policy step with the engines that sampled them, before the
        weights change.

        `metrics` are those of the step, counted from 0. Raises `EngineError` when a kind of prompt
        differs by more than the limit. Where a step has too few tokens of it, they count with those
        of the next steps.
        """
        first = not self._checked
        self._checked = True
        for kind in get_args(CallKind):
            differs = metrics.get(f"difference/{kind}")
            if differs is None:
                continue
            what = (
                f"step {step + 1}: a sampled token after a {kind} prompt differs from the trainer's"
                f" by {differs:.1e} nats on average"
            )
            if first:
                console.print(what)
            tokens, total = self._few.pop(kind, (0.0, 0.0))
            tokens += metrics[f"tokens/{kind}"]
            total += metrics[f"tokens/{kind}"] * differs
            if tokens < COMPARED:
                self._few[kind] = tokens, total
            elif not total / tokens <= self._limit:
                raise EngineError(
                    f"{what}, and the limit is {self._limit:g}: the engine did not sample these"
                    " tokens with the weights of the step, or did not see what was recorded; the"
                    " weights are unchanged. Start the engines again and train into a new folder,"
                    " or set max_difference in the recipe"
                )
            if not differs <= self._expected:
                console.print(f"warning: {what}; rounding explains {self._expected:.1e}")
