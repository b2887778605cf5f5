"""Checks before the first session: the engines, and what tasks need and the runtime or this machine does not have."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rolltap.addons.errors import EngineError, InputError
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.weights import same_folder
from rolltap.trainer.rollouts.judges.protected import OneJudge
from rolltap.trainer.rollouts.runtimes.runtime import ImageRuntime, Runtime
from rolltap.trainer.tasks.sources import RefusedError, describe_refused
from rolltap.trainer.tasks.task import CommandJudge, Judge, LLMJudge, PytestJudge, SeveralJudges, Task

logger = logging.getLogger(__name__)


def check_engines(engine: str, model: str) -> str:
    """Ask every engine for its model, its context window and its weights, and return the version of the weights.

    `engine` is a URL, or several separated by commas. A model of another name than `model` is a warning only: the
    recorder compares the tokenizers, and refuses the calls of an engine with another one. So are weights that an engine
    does not name, and different ones. Raises `EngineError` when an engine does not answer or has no window.
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
            versions[admin.url] = "unknown"
            logger.warning("the engine at %s does not tell which weights it serves: %s", admin.url, error)
    if len(set(versions.values())) > 1:
        served = ", ".join(f"{url}: {version}" for url, version in versions.items())
        logger.warning("the engines serve different weights (%s): their sessions are in one group", served)
    return ",".join(sorted(set(versions.values())))


def kept_check(digest: str) -> Path:
    """Return the file in which `rolltap tasks check` keeps what it found of the task with a digest."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "rolltap" / "checks" / f"{digest}.json"


def warn_of_unchecked(digests: Sequence[str]) -> None:
    """Warn of tasks that `rolltap tasks check` did not try, or in which it found something."""
    unchecked = weak = 0
    for digest in digests:
        try:
            weak += not json.loads(kept_check(digest).read_text(encoding="utf-8"))["passed"]
        except (OSError, ValueError, LookupError, TypeError):
            unchecked += 1
    if unchecked or weak:
        counts = f"{unchecked} were not tried with cheats, {weak} have findings"
        logger.warning("of %d tasks %s: run `rolltap tasks check TASKS`", len(digests), counts)


def fit_tasks(tasks: Sequence[Task], runtime: Runtime) -> list[Task]:
    """Return the tasks as a runtime runs them: without an image that is optional, where the runtime has none.

    Tasks that need what the runtime does not have are left out, and a warning counts them. Raises `InputError` when
    these are all, and for the first path of a task that is not there.
    """
    fitting: list[Task] = []
    refused: list[RefusedError] = []
    for task in tasks:
        try:
            fitting.append(_fit(task, runtime))
        except RefusedError as error:
            refused.append(error)
    if not fitting and len(refused) == 1:
        raise refused[0]
    if refused:
        message = describe_refused(refused, len(tasks))
        if not fitting:
            raise InputError(message)
        logger.warning("%s; the others are run", message)
    return fitting


def _fit(task: Task, runtime: Runtime) -> Task:
    where = f"task {task.id!r}" + (f" ({task.source})" if task.source else "")
    judges = list(judges_of(task.effective_judge))
    _check_paths(task, judges, where)
    own_paths = any(isinstance(judge, CommandJudge) and (judge.mounts or judge.writable) for judge in judges)
    if task.needs_network is not None and (runtime.isolated or own_paths):
        raise RefusedError(
            f"{where} needs a network: {task.needs_network}. With the runtimes sandbox, container and apptainer a "
            "session reaches the recorder only, and its judge has no network: build an image that has what is "
            "downloaded, name it as the task's image ('environment.docker_image' of a Harbor task), and remove the "
            "downloads from the task" + ("" if own_paths else ", or use the runtime process")
        )
    if own_paths and not runtime.isolated:
        raise RefusedError(
            f"{where}: its judge needs absolute paths of its own, which the runtime {runtime.name} does not have: use "
            "the runtime sandbox or container"
        )
    if any(isinstance(judge, PytestJudge) and judge.log_parser for judge in judges) and not find_spec("swebench"):
        raise RefusedError(f"{where}: its judge's 'log_parser' needs swebench: pip install 'rolltap[swe]'")
    if isinstance(runtime, ImageRuntime):
        if task.image is None:
            raise RefusedError(f"{where} has no image, and the runtime {runtime.name} needs one: give 'image'")
        return task
    if task.image is None or task.image_optional:
        return task.model_copy(update={"image": None})
    raise RefusedError(
        f"{where} needs the image {task.image}, and the runtime {runtime.name} has no images: use the runtime "
        "container, or set 'image_optional' if this machine's own programs serve"
    )


def _check_paths(task: Task, judges: Sequence[OneJudge | LLMJudge], where: str) -> None:
    if task.workspace is not None and not task.workspace.is_dir():
        raise InputError(f"{where}: the workspace {task.workspace} is not a folder")
    named: list[tuple[str, Path]] = [("'files'", path) for path in task.files.values()]
    for judge in judges:
        if not isinstance(judge, LLMJudge) and judge.tests is not None:
            named.append(("'judge.tests'", judge.tests))
        if isinstance(judge, CommandJudge):
            named += [("'judge.mounts'", path) for path in judge.mounts.values()]
    for key, path in named:
        if not path.exists():
            raise InputError(f"{where}: {key} names {path}, which does not exist")


def judges_of(judge: Judge) -> Iterator[OneJudge | LLMJudge]:
    """Yield the judge, or each of several."""
    if isinstance(judge, SeveralJudges):
        for one in judge.judges:
            yield from judges_of(one.judge)
    else:
        yield judge
