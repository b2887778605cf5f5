"""The engines of a training: its weights are published to all of them, and what they serve is compared with it.

All of this happens on the main process.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from rolltap.addons.errors import EngineError, RunError
from rolltap.trainer.engine.agreement import LIMITS, fixed_ids
from rolltap.trainer.engine.base_weights import difference
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish import Publisher, make_publisher
from rolltap.trainer.grpo.trainer import TraceGRPOTrainer
from rolltap.trainer.models.loading import load_tokenizer
from rolltap.trainer.training.arguments import dtype_of
from rolltap.trainer.training.recipe import Recipe


@contextmanager
def published_folder(recipe: Recipe, run: Path, run_id: str) -> Iterator[Path]:
    """Yield the folder for weights on their way to the engines: in the run, or below the recipe's `publish_folder`.

    One outside of the run is removed at the end: the engines have loaded what was in it.
    """
    if recipe.publish_folder is None:
        yield run / "published"
        return
    folder = recipe.publish_folder / run_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"publish_folder: {folder} cannot be made: {error}; correct the key in the recipe") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Serving:
    """Weights on the engines of a training. `folder` is for those on their way, `run` is the run folder."""

    def __init__(self, recipe: Recipe, engines: Engines, folder: Path, run: Path) -> None:
        self.engines = engines
        self._recipe = recipe
        self._ids = fixed_ids(load_tokenizer(recipe.model))
        self._limit = recipe.max_difference or LIMITS[dtype_of(recipe)]
        self._publisher: Publisher = make_publisher(
            recipe.publish, engines, folder=folder, run=run, base=recipe.model, adapters=recipe.adapters
        )

    def verify_base(self, trainer: TraceGRPOTrainer, version: str, console: Console) -> None:
        """Make sure that every engine serves the weights that the training began with.

        Call it before a checkpoint is loaded. An engine that was left paused, or serves other weights, gets them again,
        as `version`. Raises `EngineError`.
        """

        def say(line: str) -> None:
            console.print(line, highlight=False, soft_wrap=True, markup=False)

        own = trainer.score(self._ids, base=True)
        self.engines.verify_base(self._recipe.model, version, self._ids, own, self._limit, say)

    def publish(self, trainer: TraceGRPOTrainer, version: str) -> None:
        """Publish the trainer's weights to every engine, and compare what they then serve with the trainer.

        The metric `engine_difference` is the mean absolute difference of the log-probabilities of a fixed text, in
        nats. Raises `EngineError` when it is over the limit, and what `Publisher.publish` raises.
        """
        name = self._publisher.publish(trainer.model, version)
        own = trainer.score(self._ids)
        differences = self.engines.each(lambda engine: difference(engine, name, self._ids, own))
        largest = max(differences)
        trainer.log_metrics({"engine_difference": largest})
        if not largest <= self._limit:
            engine = self.engines.admins[differences.index(largest)]
            raise EngineError(
                f"the engine at {engine.url}: after the weights {version} were published, its log-probabilities differ "
                f"from the trainer's by {largest:.2g} nats on average, and the limit is {self._limit:g}: it did not "
                f"apply the weights, or computes in another type; serve {self._recipe.model} with --dtype "
                f"{dtype_of(self._recipe)}, or set max_difference in the recipe"
            )
