"""A task: an instruction, the workspace it starts from, and the command that judges the result."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rolltap.addons.errors import InputError
from rolltap.trainer.settings import describe


class Task(BaseModel):
    """One line of a task file (JSON Lines). Paths are relative to that file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Names the task in the dataset; letters, digits, dot, dash and underscore."""
    instruction: str = Field(min_length=1)
    """The prompt that the harness is given."""
    workspace: Path | None = None
    """Folder that every session gets its own copy of; an empty one when not given."""
    evaluate: list[str] = Field(min_length=1)
    """Command run in the workspace after the harness. Its last line of output is the reward when it is a number;
    otherwise the reward is 1 for exit status 0 and 0 for any other."""


def load_tasks(path: Path) -> list[Task]:
    """The tasks of a file. Raises `InputError` with the line of what is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the task file: {error}") from error
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
