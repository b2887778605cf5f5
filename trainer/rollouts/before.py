"""Checks before the first session: every engine answers, serves the model, and tells its window and weights.

The judges are checked too: one that cannot judge is found before the first session costs anything.
"""

import logging
from collections.abc import Sequence

from rolltap.addons.errors import EngineError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.base_weights import same_folder
from rolltap.trainer.rollouts.judges.check import check_judge
from rolltap.trainer.rollouts.tasks.task import Task

logger = logging.getLogger(__name__)

_UNKNOWN = "unknown"
"""Version of weights that an engine does not name."""


def check_judges(tasks: Sequence[Task], engine: str) -> None:
    """Check every task's judge, as `check_judge`. `engine` is a URL, or several separated by commas.

    Raises `InputError` that names the task, and `MissingPackageError`.
    """
    urls = [url.strip() for url in engine.split(",")]
    for task in tasks:
        check_judge(task, engine_urls=urls)


def check_engines(engine: str, model: str) -> str:
    """Ask every engine for its model, its context window and its weights, and return the version of the weights.

    `engine` is a URL, or several separated by commas. A model of another name than `model` is named in a warning: the
    recorder compares the tokenizers, and refuses the calls of an engine with another one. Weights that an engine does
    not name, and several engines with different ones, are named in a warning too.

    Raises `EngineError` when an engine does not answer, or its window is no number of tokens.
    """
    versions: dict[str, str] = {}
    for url in engine.split(","):
        admin = EngineAdmin(url.strip())
        models = admin.models()
        if models.max_model_len < 1:
            raise EngineError(f"the engine at {admin.url} has a context window of {models.max_model_len} tokens")
        if not any(same_folder(name, model) for name in (models.root, models.base)):
            logger.warning("the engine at %s serves %s, and the recorder's model is %s", admin.url, models.root, model)
        try:
            versions[admin.url] = admin.weight_version()
        except EngineError as error:
            versions[admin.url] = _UNKNOWN
            logger.warning("the engine at %s does not tell which weights it serves: %s", admin.url, error)
    if len(set(versions.values())) > 1:
        served = ", ".join(f"{url}: {version}" for url, version in versions.items())
        logger.warning("the engines serve different weights (%s): their sessions are in one group", served)
    return ",".join(sorted(set(versions.values())))
