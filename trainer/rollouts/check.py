"""Checks before the first session: the engines, and what tasks need and the runtime or this machine
does not have."""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from rolltap.addons.engine.policy import PolicyFile
from rolltap.addons.errors import EngineError, InputError, install_command
from rolltap.trainer.boxes.containers.build import image_of
from rolltap.trainer.boxes.programs import SYSTEM
from rolltap.trainer.boxes.runtime import BuildingRuntime, ImageRuntime, Runtime
from rolltap.trainer.engine.admin import EngineAdmin
from rolltap.trainer.engine.status import engine_status
from rolltap.trainer.judges.planted import computed_makefiles
from rolltap.trainer.judges.protected import OneJudge, ambiguous, judges_of
from rolltap.trainer.names import some
from rolltap.trainer.rollouts.harness import Harness
from rolltap.trainer.rollouts.recorder import Recorder
from rolltap.trainer.tasks.bounds import ARGUMENT_BYTES
from rolltap.trainer.tasks.content import content_digest
from rolltap.trainer.tasks.sources import RefusedError, describe_refused
from rolltap.trainer.tasks.task import Build, CommandJudge, LLMJudge, PytestJudge, PythonJudge, Task

logger = logging.getLogger(__name__)

_SET_PATHS = (
    "Set the judge's 'paths' to the files that the agent is to change; all others are then the"
    " judge's"
)


def check_engines(recorder: Recorder, say: Callable[[str], None]) -> str:
    """Tell `say` what every engine of a recorder serves, and return the version of the weights.

    Weights that are not the policy of the run, and different ones, are warnings. A model of another
    name is one of the recorder, which compares the tokenizers. Raises `EngineError` when an engine
    does not answer or has no window; and `InputError` when none answers for a model that cannot be
    recorded.
    """
    try:
        found = [engine_status(EngineAdmin(url.strip())) for url in recorder.engine.split(",")]
    except EngineError:
        recorder.require_rendering()  # before an engine is started for it
        raise
    policy = PolicyFile(recorder.path).read()
    for status in found:
        say(str(status))
        if status.max_model_len < 1:
            raise EngineError(
                f"the engine at {status.url} has a context window of {status.max_model_len}"
                " tokens: restart it with --max-model-len"
            )
        warning = status.mismatch(policy)
        if warning:
            logger.warning("%s", warning)
    if len({(status.model, status.version) for status in found}) > 1:
        served = [f"{each.url}: {each.version or 'unknown'} of {each.model}" for each in found]
        logger.warning(
            "the engines serve different weights (%s), and their sessions are in one group: publish"
            " the same weights to all, or give one --engine",
            "; ".join(served),
        )
    return ",".join(sorted({status.version or "unknown" for status in found}))


def kept_check(task: Task, digest: str, runtime: str) -> Path:
    """Return the file in which `rolltap tasks check` keeps what it found of a task with its digest,
    and its solution, in boxes of a runtime: one without isolation leaves cheats that another does
    not.

    Raises `InputError` for a solution that is not there.
    """
    solution = content_digest(task.solution) if task.solution is not None else task.gold_patch
    name = sha256(f"{digest} {solution} {runtime}".encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "rolltap" / "checks" / f"{name}.json"


def why_not_tried(task: Task, runtime: Runtime) -> str | None:
    """Return why `rolltap tasks check` cannot try a task in a runtime, None if it can."""
    for judge in judges_of(task.effective_judge):
        if isinstance(judge, LLMJudge):
            return "a model judges it, and these cheats are for programs: read its reasons"
        if not isinstance(judge, PythonJudge) and judge.allow and runtime.isolated:
            return (
                f"its judge may reach {judge.allow[0]} ('allow'), and only the recorder of a"
                " rollout leads there"
            )
    return None


def warn_of_unchecked(tasks: Sequence[Task], digests: Mapping[str, str], runtime: Runtime) -> None:
    """Warn of tasks that `rolltap tasks check` did not try in a runtime, or in which it found
    something. Those that it cannot try are left out.

    `digests` are those of the tasks by their ids.
    """
    unchecked: list[str] = []
    weak: list[str] = []
    advice = f"rolltap tasks check TASKS --runtime {runtime.name}"
    building = ""
    for task in tasks:
        if why_not_tried(task, runtime):
            continue
        passed = _passed(task, digests[task.id], runtime)
        if passed:
            continue
        if passed is None:
            unchecked.append(task.id)
        else:
            weak.append(task.id)
        if task.build is not None:
            building = " --build"
    told = []
    if unchecked:
        told.append(f"tasks not tried with cheats: {some(unchecked)}")
    if weak:
        told.append(f"tasks with findings: {some(weak)}")
    if told:
        logger.warning("%s: run `%s%s`", "; ".join(told), advice, building)


def _passed(task: Task, digest: str, runtime: Runtime) -> bool | None:
    """Return False if `rolltap tasks check` found something in a task, None if it was not tried."""
    try:
        kept = kept_check(task, digest, runtime.name).read_text(encoding="utf-8")
        return bool(json.loads(kept)["passed"])
    except InputError:  # the solution is not there, and a rollout needs none
        return None
    except (OSError, ValueError, LookupError, TypeError):  # nothing is kept, or no answer
        return None


def fit_tasks(
    tasks: Sequence[Task], runtime: Runtime, harness: Harness | None = None
) -> list[Task]:
    """Return the tasks as a runtime runs them: without an image that is optional, where the runtime
    has none, and with the name of the image that is to be built.

    Tasks that need what the runtime does not have, or whose instruction is too long for an argument
    of the harness, are left out, and a warning counts them. Raises `InputError` when these are all,
    and for the first path of a task that is not there.
    """
    fitting: list[Task] = []
    refused: list[RefusedError] = []
    for task in tasks:
        try:
            fitting.append(_fit(task, runtime, harness))
        except RefusedError as error:
            refused.append(error)
    return _require_some(fitting, refused)


def _require_some(fitting: list[Task], refused: Sequence[RefusedError]) -> list[Task]:
    """Return the tasks that fit. A warning counts the others; when these are all, an error does."""
    if not fitting and len(refused) == 1:
        raise refused[0]
    if refused:
        message = describe_refused(refused, len(fitting) + len(refused))
        if not fitting:
            raise InputError(message)
        logger.warning("%s; the others are run", message)
    return fitting


async def build_images(
    tasks: Sequence[Task],
    runtime: Runtime,
    logs: Path,
    *,
    at_once: int,
) -> list[Task]:
    """Build the images of tasks, `at_once` at a time, and return the tasks whose images are there.

    The folder `logs` gets the output of each build. A warning counts the tasks whose image cannot
    be built. Raises `InputError` when these are all.
    """
    builds: dict[str, Build] = {}
    for task in tasks:
        if task.image is not None and task.build is not None:
            builds[task.image] = task.build
    if not builds or not isinstance(runtime, BuildingRuntime):
        return list(tasks)
    places = asyncio.Semaphore(at_once)
    faults: dict[str | None, str] = {}

    async def make(image: str, build: Build) -> None:
        log = logs / f"build-{image.rpartition(':')[2][:16]}.log"
        async with places:
            try:
                await runtime.build(image, build, log)
            except (InputError, OSError) as error:
                faults[image] = str(error)

    async with asyncio.TaskGroup() as making:
        for image, build in builds.items():
            making.create_task(make(image, build))
    fitting: list[Task] = []
    refused: list[RefusedError] = []
    for task in tasks:
        if task.image in faults:
            refused.append(RefusedError(f"{_where(task)}: {faults[task.image]}"))
        else:
            fitting.append(task)
    return _require_some(fitting, refused)


def _where(task: Task) -> str:
    where = f"task {task.id!r}"
    if task.source:
        where += f" ({task.source})"
    return where


def _fit(task: Task, runtime: Runtime, harness: Harness | None) -> Task:
    for why in _refusals(task, runtime, harness):
        raise RefusedError(f"{_where(task)}{why}")
    if task.build is not None:
        return task.model_copy(update={"image": image_of(task.build)})
    if isinstance(runtime, ImageRuntime):
        return task
    return task.model_copy(update={"image": None})


def _refusals(task: Task, runtime: Runtime, harness: Harness | None) -> Iterator[str]:
    """Yield what a task needs and cannot have, as what follows its name in a sentence."""
    command = [task.instruction]
    if harness is not None:
        command = harness.command_for(task.instruction)
    size = max(len(os.fsencode(argument)) for argument in command) + 1
    if size > ARGUMENT_BYTES:
        yield (
            f": its instruction makes an argument of {size:,} bytes, and Linux takes"
            f" {ARGUMENT_BYTES:,}: shorten it, or lay its text into the workspace ('files') and let"
            " the instruction name that file"
        )
    judges = list(judges_of(task.effective_judge))
    _check_paths(task, judges)
    for judge in judges:
        if not isinstance(judge, LLMJudge):
            yield from _undecided_files(task, judge)
    if runtime.isolated and not isinstance(runtime, ImageRuntime):
        yield from _hidden_paths(task, judges)
    own_paths = any(isinstance(judge, CommandJudge) and judge.own_paths for judge in judges)
    if task.needs_network is not None and (runtime.isolated or own_paths):
        why = (
            f" needs a network: {task.needs_network}. With every runtime but process a session"
            " reaches the recorder only, and its judge has no network. Either name the hosts in the"
            " judge's 'allow' ('verifier.allowed_hosts' of a Harbor task), or build an image that"
            " has what is downloaded, name it as the task's image ('environment.docker_image'), and"
            " remove the downloads from the task"
        )
        if not own_paths:
            why += ", or use the runtime process"
        yield why
    if own_paths and not runtime.isolated:
        yield (
            f": its judge needs absolute paths of its own, which the runtime {runtime.name} does"
            " not have: use the runtime sandbox or container"
        )
    parses = any(isinstance(judge, PytestJudge) and judge.log_parser for judge in judges)
    if parses and not find_spec("swebench"):
        yield f": its judge's 'log_parser' needs swebench: {install_command('swe')}"
    if task.build is not None:
        if not isinstance(runtime, BuildingRuntime) or not runtime.builds:
            yield _no_build(task.build)
    elif isinstance(runtime, ImageRuntime):
        if task.image is None:
            yield f" has no image, and the runtime {runtime.name} needs one: give 'image'"
    elif task.image is not None and not task.image_optional:
        yield (
            f" needs the image {task.image}, and the runtime {runtime.name} has no images: use the"
            " runtime container, or set 'image_optional' if this machine's own programs serve"
        )


def _no_build(build: Build) -> str:
    file = str(build.folder / "Dockerfile")
    if build.why:
        file += f", {build.why}"
    return (
        f": {file}: this needs an image to be built: use --build with --runtime container (in a"
        f" recipe, build = true), or run `podman build -t NAME {build.folder}` and name it as the"
        " task's image ('environment.docker_image' of a Harbor task)"
    )


def _undecided_files(task: Task, judge: OneJudge) -> Iterator[str]:
    """Yield files of which nobody says whether they are the judge's or the agent's."""
    for shared in ambiguous(_start_files(task), task, judge):
        yield (
            f": the judge's command names {shared}, and the instruction does too: is it the judge's"
            f" or the agent's? {_SET_PATHS}"
        )
    if task.workspace is None:
        return
    for computed in computed_makefiles(task.workspace, _start_files(task), judge):
        yield (
            f": the judge runs make, and {computed} computes names of targets or includes: any new"
            f" file may decide for it. {_SET_PATHS}"
        )


def _hidden_paths(task: Task, judges: Sequence[OneJudge | LLMJudge]) -> Iterator[str]:
    """Yield paths of the box below the system's folders, which a sandbox shows as this machine has
    them."""
    paths: list[str] = [task.workdir]
    for judge in judges:
        if isinstance(judge, CommandJudge):
            paths += [*judge.mounts, *judge.writable, *judge.reward_files]
    for path in paths:
        if any(Path(path).is_relative_to(top) for top in (*SYSTEM, Path("/etc"))):
            yield (
                f" has {path} in its box, and a sandbox shows this machine's folder there: choose"
                " another path, or use the runtime container"
            )


def _start_files(task: Task) -> Iterator[str]:
    """Yield the files of a start, as far as they are on this machine, relative to the workspace."""
    sources = {}
    if task.workspace is not None:
        sources[""] = task.workspace
    sources.update(task.files)
    for place, source in sources.items():
        if source.is_file():
            yield place
        for folder, _, names in os.walk(source):
            inside = os.path.join(place, os.path.relpath(folder, source))
            for name in names:
                yield os.path.normpath(os.path.join(inside, name))


def _check_paths(task: Task, judges: Sequence[OneJudge | LLMJudge]) -> None:
    where = _where(task)
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
