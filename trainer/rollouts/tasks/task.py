"""A task: an instruction, the workspace to start from, and the evaluator of the result."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rolltap.addons.errors import InputError
from rolltap.trainer.rollouts.judges.spec import Judge
from rolltap.trainer.rollouts.tasks.limits import Limits
from rolltap.trainer.settings import describe


class Task(BaseModel):
    """An instruction, the workspace to start from, and the evaluator of the result.

    A task file is JSON Lines with these fields as keys. Paths in it are relative to the file. The constructor raises
    pydantic's `ValidationError`, a `ValueError`, for wrong fields.

    Attributes:
        id: Name of the task in the dataset: letters, digits, dot, dash and underscore.
        instruction: Prompt for the harness.
        workspace: Folder of which every session gets a copy. None: an empty folder, or the folder `workdir` of the
            image. Of a git checkout the copy has the history up to its commit, and nothing else of its repository.
        commit: Commit at which the checkout `workspace` starts; None: what is checked out, with its changes.
        image: Container image or root folder that the session runs in; None: none. The runtime must have images then.
        workdir: Absolute path of the workspace in a runtime with files of its own.
        timeout: Seconds after which the harness is stopped; None: the rollout's.
        limits: Limits of the session's box.
        env: Further environment variables of the harness and of the judge.
        judge: Description of the judge. `evaluate` is its short form; a task has one of the two.
        source: Where the task is from, for people: a folder, or a file and its row.
        evaluate: Command that runs in the session's workspace after the harness. The last line of its output is
            the reward if it is a number. Otherwise the reward is 1 for exit status 0, and 0 for other statuses.
            There is no reward when the command cannot be run (status 126 or 127), is killed by a signal, or takes
            more than 600 s; the session has the status `infrastructure` then.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    instruction: str = Field(min_length=1)
    workspace: Path | None = None
    commit: str | None = None
    image: str | None = None
    workdir: str = Field(default="/workspace", pattern=r"^/[^/].*$")
    timeout: float | None = Field(default=None, gt=0)
    limits: Limits = Limits()
    env: dict[str, str] = {}
    evaluate: list[str] = []
    judge: Judge | None = None
    source: str = ""


def load_tasks(path: Path) -> list[Task]:
    """Return the tasks of a file. Raises `InputError`, which names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the task file {path}: {error}") from error
    tasks: list[Task] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            task = Task.model_validate_json(line)
        except ValidationError as error:
            raise InputError(f"{where}: {describe(error)}") from error
        if task.workspace is not None:
            workspace = (path.parent / task.workspace).resolve()
            if not workspace.is_dir():
                raise InputError(f"{where}: the workspace {workspace} is not a folder")
            task = task.model_copy(update={"workspace": workspace})
        if any(task.id == other.id for other in tasks):
            raise InputError(f"{where}: the id {task.id!r} is used twice")
        tasks.append(task)
    if not tasks:
        raise InputError(f"the task file {path} has no tasks")
    return tasks
