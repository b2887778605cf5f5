"""Tasks of requests: those that were loaded, by their ids, and clients' own, which may reach no further than a box."""

from collections.abc import Mapping
from pathlib import PurePath

from rolltap.addons.errors import InputError
from rolltap.trainer.names import some
from rolltap.trainer.rollouts.check import fit_tasks, judges_of
from rolltap.trainer.rollouts.judges.check import check_judges
from rolltap.trainer.rollouts.runtimes.runtime import Runtime
from rolltap.trainer.rollouts.worker import Worker
from rolltap.trainer.service.requests import GroupRequest
from rolltap.trainer.tasks.task import LLMJudge, PythonJudge, Task


class ConflictError(InputError):
    """The request contradicts an earlier one, or a task that the service has."""


def requested_task(request: GroupRequest, tasks: Mapping[str, Task], worker: Worker) -> Task:
    """Return the task of a request as the worker runs it. `tasks` are those that were loaded. Raises `InputError`."""
    if isinstance(request.task, str):
        if request.task not in tasks:
            raise InputError(f"'task' is {request.task!r}, which is not loaded; there are {some([*tasks])}")
        return tasks[request.task]
    task = Task(**request.task)
    if task.id in tasks:
        raise ConflictError(f"'task.id' is {task.id!r}, a loaded task: send this id as 'task', or choose another")
    _require_portable(task, worker.runtime)
    [fitting] = fit_tasks([task], worker.runtime, worker.harness)
    check_judges([fitting], worker.recorder.engine)
    return fitting


def _require_portable(task: Task, runtime: Runtime) -> None:
    """Refuse a task of a request that would reach further than a box. Raises `InputError`, which names the field."""
    where = f"task {task.id!r}: "
    if not runtime.isolated:
        raise InputError(
            f"{where}the runtime {runtime.name} does not hold code from requests: send the id of a task that the "
            "service has loaded, or start the service with --runtime sandbox, container or apptainer"
        )
    advice = "load such a task with --tasks, and send its id"
    for name, value in task.model_dump().items():
        if _has_path(value) or (name == "image" and isinstance(value, str) and PurePath(value).is_absolute()):
            raise InputError(f"{where}{name!r} names a file of the service's machine: {advice}")
    for judge in judges_of(task.effective_judge):
        if isinstance(judge, PythonJudge) or (isinstance(judge, LLMJudge) and judge.key_env):
            key = "kind" if isinstance(judge, PythonJudge) else "key_env"
            raise InputError(f"{where}'judge.{key}' is {getattr(judge, key)!r}, which works outside of a box: {advice}")


def _has_path(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_path, value.values()))
    return isinstance(value, PurePath) or (isinstance(value, list | tuple) and any(map(_has_path, value)))
