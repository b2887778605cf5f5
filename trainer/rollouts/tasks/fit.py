"""Tasks and the runtime that is to run them: what a task needs and the runtime does not have."""

from collections.abc import Sequence

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.judges.spec import CommandJudge, Judge, SeveralJudges
from rolltap.trainer.rollouts.runtimes.runtime import ImageRuntime, Runtime
from rolltap.trainer.rollouts.tasks.task import Task


def fit_tasks(tasks: Sequence[Task], runtime: Runtime) -> list[Task]:
    """Return the tasks as a runtime runs them: without an image that is optional, where the runtime has none.

    Raises `InputError` for the first task that needs what the runtime does not have; it names the task and the need.
    """
    return [_fit(task, runtime) for task in tasks]


def _fit(task: Task, runtime: Runtime) -> Task:
    where = f"task {task.id!r}" + (f" ({task.source})" if task.source else "")
    if task.needs_network is not None and runtime.isolated:
        raise InputError(
            f"{where} needs a network: {task.needs_network}. The runtime {runtime.name} reaches the recorder only: "
            "change the task, or use the runtime process"
        )
    if not runtime.isolated and any(judge.mounts or judge.writable for judge in _commands(task.effective_judge)):
        raise InputError(
            f"{where}: its judge needs absolute paths of its own, which the runtime {runtime.name} does not have: use "
            "the runtime sandbox or container"
        )
    if isinstance(runtime, ImageRuntime):
        if task.image is None:
            raise InputError(f"{where} has no image, and the runtime {runtime.name} needs one: give 'image'")
        return task
    if task.image is None or task.image_optional:
        return task.model_copy(update={"image": None})
    raise InputError(
        f"{where} needs the image {task.image}, and the runtime {runtime.name} has no images: use the runtime "
        "container, or set 'image_optional' if this machine's own programs serve"
    )


def _commands(judge: Judge) -> list[CommandJudge]:
    if isinstance(judge, SeveralJudges):
        return [command for one in judge.judges for command in _commands(one.judge)]
    return [judge] if isinstance(judge, CommandJudge) else []
