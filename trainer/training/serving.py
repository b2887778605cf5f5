"""The engines of a training: its weights are published to all of them, and what they serve is compared with it.

All of this happens on the main process.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from rolltap.addons.errors import EngineError, RunError
from rolltap.trainer.engine.agreement import LIMITS, fixed_ids
from rolltap.trainer.engine.engines import Engines
from rolltap.trainer.engine.publish import Publisher, make_publisher
from rolltap.trainer.grpo.trainer import TraceGRPOTrainer
from rolltap.trainer.models.loading import load_tokenizer
from rolltap.trainer.training.arguments import dtype_of
from rolltap.trainer.training.recipe import Recipe


def engine_urls(engine: str) -> list[str]:
    """Return the URLs of a text that separates them by commas."""
    return [url for part in engine.split(",") if (url := part.strip())]


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
    """What the engines of a training serve. `folder` is for weights on their way to them; `run` is the run folder."""

    def __init__(self, recipe: Recipe, engines: Engines, urls: Sequence[str], folder: Path, run: Path) -> None:
        self._recipe = recipe
        self._engines = engines
        self.urls = urls
        """URLs of the engines."""
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
        self._engines.verify_base(self._recipe.model, version, self._ids, own, self._limit, say)

    def publish(self, trainer: TraceGRPOTrainer, version: str) -> None:
        """Publish the trainer's weights to every engine, and compare what they then serve with the trainer.

        The metric `engine_difference` is the mean absolute difference of the log-probabilities of a fixed text, in
        nats. Raises `EngineError` when it is over the limit, and what `Publisher.publish` raises.
        """
        name = self._publisher.publish(trainer.model, version)
        difference = self._engines.difference(name, self._ids, trainer.score(self._ids))
        trainer.log_metrics({"engine_difference": difference})
        if not difference <= self._limit:
            raise EngineError(
                f"{', '.join(self.urls)}: after the weights {version} were published, the engine's log-probabilities "
                f"differ from the trainer's by {difference:.2g} nats on average, and the limit is {self._limit:g}: the "
                "engine did not apply the weights, or computes in another precision; serve the recipe's model in the "
                "trainer's dtype, or set max_difference in the recipe"
            )
